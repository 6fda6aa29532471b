"""Bytes that each rank holds at the fullest moment of a step.

What is held all the time, of a rank with stages s whose layers are l, with v_s versions of the weights:

    sum_s (sum_l held_l + (v_s - 1) sum_l weights_l)

less the gradients, as large as the weights, up to a stage's first backward. From a microbatch's forward to
its backward, or to the weights' half of it:

    sum_l activation_l + output_s                       output_s starts the backward

While a layer's backward runs, the gradients that flow into its weights, and where its forward is repeated its
activations again. Between the two halves of a split backward, both of all layers: the inputs' half repeats,
and leaves what it has repeated to the weights' half. The first stage does all in the weights' half. There is
room for the next messages, of the largest of a rank:

    RECEIVED_AHEAD max_s max(input_s, output_s)

After a layer's last backward there is a copy of its gradients where they are averaged over replicas of the
pipeline.  Where these share the gradients (ZeRO-2), a rank holds its part of them, and after each backward
those of the layer, whole, and a copy of them.  Where they share the weights (ZeRO-3), it has whole ones of
one layer at a time.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

from ballast_policies.planning.partition import Partition
from ballast_policies.planning.schedules.schedule import Kind, Schedule
from ballast_policies.planning.schedules.validate import ScheduleFacts

RECEIVED_AHEAD = 2
"""Messages that a rank has room for before it needs them."""
WHOLE_GRADIENTS = 2
"""Of a layer, at the end of each of its backwards where replicas share them: those, and their copy."""


class LayerBytes(Protocol):
    """Bytes of one layer, as :class:`ballast_policies.planning.profile.ProfiledLayer` has them."""

    @property
    def held_bytes(self) -> float:
        """Parameters, gradients and optimizer state."""

    @property
    def weight_bytes(self) -> float:
        """The parameters alone."""

    @property
    def activation_bytes(self) -> float:
        """Kept for the backward, of one microbatch."""

    @property
    def repeated_bytes(self) -> float:
        """Kept by the repeated forward while the layer's backward runs; 0: forwards are not repeated."""

    @property
    def gradient_bytes(self) -> float:
        """Gradients from which those of the weights are computed."""

    @property
    def output_bytes(self) -> float:
        """Sent to the next layer, of one microbatch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of one rank.

    Attributes:
        held: weights, gradients, optimizer state, further versions of the weights.
        step: at the fullest moment of a step, besides what is held.
    """

    held: float
    step: float

    @property
    def total(self) -> float:
        """Everything at the fullest moment."""
        return self.held + self.step


def rank_bytes(
    partition: Partition,
    schedule: Schedule,
    facts: ScheduleFacts,
    rows: Sequence[LayerBytes],
    *,
    averaged: bool = False,
    gradient_shares: int = 1,
    weights_shared: bool = False,
) -> tuple[RankBytes, ...]:
    """Those of each rank of one pipeline.

    Args:
        partition: layers to stages.
        schedule: of one step, or of a run without a flush.
        facts: of the schedule.
        rows: the layers.
        averaged: gradients are averaged over replicas of the pipeline.
        gradient_shares: how many of these share a layer's gradients.
        weights_shared: they share its weights, too.
    """
    cuts, found = list(itertools.pairwise(partition.bounds)), []
    for rank in range(schedule.ranks):
        own = [stage for stage, holders in enumerate(schedule.stage_ranks) if rank in holders]
        held = 0.0
        for stage in own:
            layers = rows[slice(*cuts[stage])]
            held += sum(row.held_bytes for row in layers)
            held += (facts.versions_held[stage] - 1) * sum(row.weight_bytes for row in layers)
        sizes = {stage: _StageBytes.of(rows, cuts, stage, gradient_shares) for stage in own}
        step = _fullest(schedule, rank, sizes)
        if averaged:
            step = max(step, *(of_stage.largest_weights for of_stage in sizes.values()))
        messages = (max(of_stage.received, of_stage.handed_on) for of_stage in sizes.values())
        step += RECEIVED_AHEAD * max(messages, default=0.0)
        if weights_shared:
            step += max(of_stage.largest_weights for of_stage in sizes.values())
        found.append(RankBytes(held=held, step=step))
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StageBytes:
    """Bytes of one microbatch in one stage.

    Attributes:
        weights: bytes of their gradients that the rank holds, not of one microbatch.
        largest_weights: those of one layer, whole.
        kept: from the forward to the backward.
        received: of its input, which another stage sends.
        handed_on: the same, where another stage receives it.
        gradients: into the weights of all layers, and what was repeated: kept between the halves of a split
            backward.
        passing: while one layer's backward runs.
    """

    weights: float
    largest_weights: float
    kept: float
    received: float
    output: float
    handed_on: float
    gradients: float
    passing: float

    @classmethod
    def of(
        cls, rows: Sequence[LayerBytes], cuts: Sequence[tuple[int, int]], stage: int, gradient_shares: int
    ) -> "_StageBytes":
        """Those of a stage of the whole model."""
        first, end = cuts[stage]
        layers = rows[first:end]
        weights = [row.weight_bytes for row in layers]
        return cls(
            weights=sum(weights) / gradient_shares,
            largest_weights=max(weights),
            kept=sum(row.activation_bytes for row in layers) + layers[-1].output_bytes,
            received=rows[first - 1].output_bytes if first else 0.0,
            output=layers[-1].output_bytes,
            handed_on=layers[-1].output_bytes if end < len(rows) else 0.0,
            # The first stage does the whole backward in the weights' half.
            gradients=sum(row.gradient_bytes + row.repeated_bytes for row in layers) if first else 0.0,
            passing=max(row.repeated_bytes + row.gradient_bytes for row in layers)
            + WHOLE_GRADIENTS * max(weights) * (gradient_shares > 1),
        )


def _fullest(schedule: Schedule, rank: int, sizes: Mapping[int, _StageBytes]) -> float:
    """Most bytes of the microbatches in flight at once; gradients that are not there yet come off."""
    now = most = -sum(stage.weights for stage in sizes.values())
    learnt: set[int] = set()
    for action in schedule.actions[rank]:
        stage = sizes.get(action.stage)
        if stage is None:
            continue
        if action.kind is Kind.FORWARD:
            now += stage.kept
        elif action.kind is Kind.BACKWARD_INPUT:
            now += stage.gradients
        elif action.kind is Kind.UPDATE:
            now -= stage.weights * (action.stage in learnt)
            learnt.discard(action.stage)
        else:
            whole = action.kind is Kind.BACKWARD or not stage.gradients
            most = max(most, now + stage.passing * whole)
            now -= stage.kept + stage.gradients * (action.kind is Kind.BACKWARD_WEIGHT)
            now += stage.weights * (action.stage not in learnt)
            learnt.add(action.stage)
        most = max(most, now)
    return max(0.0, most)
