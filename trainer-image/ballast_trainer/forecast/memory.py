"""Bytes that each rank holds at the fullest moment of a step.

What is held all the time, of a rank with stages s whose layers are l, with v_s versions of the weights:

    sum_s (sum_l held_l + (v_s - 1) sum_l weights_l)

From a microbatch's forward to its backward, or to the weights' half of it:

    sum_l activation_l + output_s                       output_s starts the backward

While a layer's backward runs, the gradients that flow into its weights, and where its forward is repeated its
activations again. Between the two halves of a split backward, these gradients of all layers. With torch's
pipelining a stage has a buffer for each of the m microbatches that it receives, in each direction; those of
inputs n_s in flight are activations:

    (m - n_s) input_s + m output_s

Its runtime for schedules other than GPipe and 1F1B waits for what it sends at the end of the step: outputs,
and gradients of inputs, are there until then. The inputs' half of a split backward leaves the activations
that it has repeated to the weights' half.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from ballast_policies.planning import Partition
from ballast_policies.planning.profile_file import ProfiledLayer
from ballast_policies.planning.schedules import Kind, Schedule, validate

_SENDS_AT_ONCE = ("GPipe", "1F1B")
"""Schedules that torch's pipelining does not run in its runtime."""

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """One rank.

    Attributes:
        layers: first and end layer of each of its stages.
        busy_seconds: of a step.
        in_flight: most microbatches whose activations it holds at once, over its stages.
        weight_versions: most versions of a stage's weights it holds.
        held_bytes: weights, gradients, optimizer state, further versions of the weights.
        activation_bytes: at the fullest moment.
    """

    rank: int
    layers: tuple[tuple[int, int], ...]
    busy_seconds: float
    in_flight: int
    weight_versions: int
    held_bytes: float
    activation_bytes: float

    @property
    def bytes(self) -> float:
        """Everything at the fullest moment."""
        return self.held_bytes + self.activation_bytes


def cuts_of(partition: Partition) -> list[tuple[int, int]]:
    """First and end layer of each stage."""
    return list(itertools.pairwise(partition.bounds))


def rank_forecasts(
    partition: Partition,
    schedule: Schedule,
    rows: Sequence[ProfiledLayer],
    busy: Sequence[float],
    *,
    buffered: bool,
) -> tuple[RankForecast, ...]:
    """The ranks of one pipeline.

    Args:
        partition: layers to stages.
        schedule: of one step, or of a run without a flush.
        rows: the layers.
        busy: seconds of a step by rank.
        buffered: torch's pipelining runs it, with a buffer for each message of a step.
    """
    facts, cuts = validate(schedule), cuts_of(partition)
    found = []
    for rank in range(schedule.ranks):
        own = [stage for stage, holders in enumerate(schedule.stage_ranks) if rank in holders]
        held = 0.0
        for stage in own:
            layers = rows[slice(*cuts[stage])]
            held += sum(row.held_bytes for row in layers)
            held += (facts.versions_held[stage] - 1) * sum(row.weight_bytes for row in layers)
        of_stages = {stage: _StageBytes.of(rows, cuts, stage) for stage in own}
        kept = _fullest(
            schedule, rank, of_stages, keeps_sent=buffered and schedule.name not in _SENDS_AT_ONCE
        )
        if buffered:
            count = schedule.microbatches
            for stage, sizes in of_stages.items():
                waiting = max(0, count - facts.stage_in_flight[stage])
                kept += waiting * sizes.received + count * sizes.handed_on
        found.append(
            RankForecast(
                rank=rank,
                layers=tuple(cuts[stage] for stage in own),
                busy_seconds=busy[rank],
                in_flight=facts.in_flight[rank],
                weight_versions=max(facts.versions_held[stage] for stage in own),
                held_bytes=held,
                activation_bytes=kept,
            )
        )
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StageBytes:
    """Bytes of one microbatch in one stage.

    Attributes:
        kept: from the forward to the backward.
        received: of its input, which another stage sends.
        output: of its output.
        handed_on: the same, where another stage receives it.
        gradients: into the weights of all layers, and what was repeated: kept between the halves of a split
            backward.
        passing: while one layer's backward runs.
    """

    kept: float
    received: float
    output: float
    handed_on: float
    gradients: float
    passing: float

    @classmethod
    def of(cls, rows: Sequence[ProfiledLayer], cuts: Sequence[tuple[int, int]], stage: int) -> "_StageBytes":
        """Those of a stage of the whole model."""
        first, end = cuts[stage]
        layers = rows[first:end]
        return cls(
            kept=sum(row.activation_bytes for row in layers) + layers[-1].output_bytes,
            received=rows[first - 1].output_bytes if first else 0.0,
            output=layers[-1].output_bytes,
            handed_on=layers[-1].output_bytes if end < len(rows) else 0.0,
            # The first stage does the whole backward in the weights' half.
            gradients=sum(row.gradient_bytes + row.repeated_bytes for row in layers) if first else 0.0,
            passing=max(row.repeated_bytes + row.gradient_bytes for row in layers),
        )


def _fullest(schedule: Schedule, rank: int, sizes: Mapping[int, _StageBytes], *, keeps_sent: bool) -> float:
    """Most bytes at once of the microbatches in flight, and of what was sent and is kept."""
    now = most = 0.0
    for action in schedule.actions[rank]:
        stage = sizes.get(action.stage)
        if stage is None:
            continue
        if action.kind is Kind.FORWARD:
            now += stage.kept
        passing = stage.passing if action.kind in BACKWARDS else 0.0
        most = max(most, now + passing)
        if action.kind is Kind.BACKWARD_INPUT:
            now += stage.gradients
        elif action.kind is Kind.BACKWARD_WEIGHT:
            now -= stage.kept + stage.gradients
        elif action.kind is Kind.BACKWARD:
            now -= stage.kept
        if keeps_sent and action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            now += stage.received + stage.handed_on
        most = max(most, now)
    return most
