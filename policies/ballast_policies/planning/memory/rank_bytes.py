"""Bytes that each rank holds at the fullest moment of a step.

What is held all the time, of a rank with stages s whose layers are l, with v_s versions of the weights:

    sum_s (sum_l held_l + (v_s - 1) sum_l weights_l)

less the gradients up to a stage's first backward: as large as the weights, of layers that do not learn none.
From a microbatch's forward to its backward, or to the weights' half of it:

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
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.partition import Partition, sums_of
from ballast_policies.planning.schedules.schedule import Kind, Schedule
from ballast_policies.planning.schedules.validate import ScheduleFacts

RECEIVED_AHEAD = 2
"""Messages that a rank has room for before it needs them."""
WHOLE_GRADIENTS = 2
"""Gradients of a layer at the end of each of its backwards where replicas share them: they and their copy."""


Numbers = Sequence[float] | np.ndarray
Layers = int | np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSizes:
    """Bytes of stages, which broadcast; None: nothing.

    Attributes:
        held: parameters, gradients and optimizer state.
        weights: the parameters alone.
        kept: of one microbatch, from the forward to the backward.
        gradients: into the weights of all layers, and what was repeated: kept between the halves of a split
            backward.
        own_gradients: those of the weights that the rank holds.
        passing: while one layer's backward runs.
        message: the larger one of the input that another stage sends, and the output that one receives.
    """

    held: np.ndarray
    weights: np.ndarray
    kept: np.ndarray
    gradients: np.ndarray | None
    own_gradients: np.ndarray
    passing: np.ndarray | None
    message: np.ndarray


class LayerSums:
    """Sums and maxima of neighbouring layers.

    Args, each of shape (L,), empty: nothing:
        held: parameters, gradients and optimizer state.
        weights: the parameters alone.
        activations: kept for the backward, of one microbatch.
        outputs: sent to the next layer, of one microbatch.
        repeated: kept by the repeated forward while the layer's backward runs.
        gradients: from which those of the weights are computed.
        experts: of the parameters, those whose gradients no replica adds to.
    """

    def __init__(
        self,
        *,
        held: Numbers,
        weights: Numbers = (),
        activations: Numbers = (),
        outputs: Numbers = (),
        repeated: Numbers = (),
        gradients: Numbers = (),
        experts: Numbers = (),
    ) -> None:
        self.layers = len(held)
        none = np.zeros(self.layers)
        weights, activations, outputs, repeated, gradients, experts = (
            values if len(values) else none
            for values in (weights, activations, outputs, repeated, gradients, experts)
        )
        # [j]: of layer j - 1, received where a stage begins with layer j.
        self._output = np.concatenate([[0.0], np.asarray(outputs, dtype=float)])
        self._held, self._weights, self._activations = sums_of(held), sums_of(weights), sums_of(activations)
        self._held_and_weights = np.asarray(held, dtype=float), np.asarray(weights, dtype=float)
        self._gradients: dict[tuple[int, bool], np.ndarray] = {}
        self._each_weight, self._each_passing = np.subtract(weights, experts), np.add(repeated, gradients)
        self._passing = sums_of(self._each_passing)

    def largest_weights(self, first: Layers, end: Layers) -> np.ndarray:
        """The most of one of the layers ``first`` to ``end - 1``, at least one, without experts."""
        return _largest_between(self._weight_table, first, end)

    def sizes(self, first: Layers, end: Layers, form: PipelineForm) -> StageSizes:
        """Sizes of stages of layers ``first`` to ``end - 1``, at least one."""
        own_gradients = self._own_gradients(form.gradient_shares, form.weights_shared)
        gradients = passing = None
        if self._passes:
            gradients = self._passing[end] - self._passing[first]
            passing = _largest_between(self._passing_table, first, end)
        if form.gradient_shares > 1:
            whole = WHOLE_GRADIENTS * self.largest_weights(first, end)
            passing = whole if passing is None else passing + whole
        return StageSizes(
            held=self._held[end] - self._held[first],
            weights=self._weights[end] - self._weights[first],
            kept=self._activations[end] - self._activations[first] + self._output[end],
            gradients=gradients,
            own_gradients=own_gradients[end] - own_gradients[first],
            passing=passing,
            message=np.maximum(
                self._output[first], np.where(np.less(end, self.layers), self._output[end], 0.0)
            ),
        )

    def taken(
        self,
        moments: np.ndarray,
        versions: float | np.ndarray,
        first: Layers,
        end: Layers,
        form: PipelineForm,
    ) -> np.ndarray:
        """Bytes of a stage of layers ``first`` to ``end - 1``.

        ``moments``: of its rank, shape (..., moments, 4); ``versions``: of the weights; all broadcast against
        each other. ``form``: what replicas share.
        """
        of = self.sizes(first, end, form)
        step: np.ndarray = np.zeros(())
        for k in range(moments.shape[-2]):
            at = moments[..., k, :]
            moment = at[..., 0] * of.kept
            for number, size in enumerate((of.gradients, of.own_gradients, of.passing), start=1):
                if size is not None and at[..., number].any():
                    moment = moment + at[..., number] * size
            step = np.maximum(step, moment)
        if form.averaged:
            step = np.maximum(step, self.largest_weights(first, end))
        taken: np.ndarray = of.held + step + RECEIVED_AHEAD * of.message
        if form.weights_shared:
            taken = taken + self.largest_weights(first, end)
        further = np.subtract(versions, 1)
        return taken + further * of.weights if further.any() else taken

    def _own_gradients(self, shares: int, weights_shared: bool) -> np.ndarray:
        """Of weights, sums over the first j layers: no more than a layer holds beside its weights."""
        found = self._gradients.get((shares, weights_shared))
        if found is None:
            held, weights = self._held_and_weights
            beside = held - weights / (shares if weights_shared else 1)
            found = self._gradients[shares, weights_shared] = sums_of(np.clip(beside, 0.0, weights / shares))
        return found

    @functools.cached_property
    def _passes(self) -> bool:
        return bool(self._each_passing.any())

    @functools.cached_property
    def _passing_table(self) -> np.ndarray:
        return _largest_table(self._each_passing)

    @functools.cached_property
    def _weight_table(self) -> np.ndarray:
        return _largest_table(self._each_weight)


def _largest_table(values: np.ndarray) -> np.ndarray:
    """[k][l]: the largest of 2^k values from l on."""
    rows = [values]
    while 2 ** len(rows) <= len(values):
        half = 2 ** (len(rows) - 1)
        wider = rows[-1].copy()
        wider[:-half] = np.maximum(wider[:-half], rows[-1][half:])
        rows.append(wider)
    return np.stack(rows)


def _largest_between(table: np.ndarray, first: Layers, end: Layers) -> np.ndarray:
    """The largest value from ``first`` to ``end - 1``, at least one."""
    level = np.frexp(np.subtract(end, first))[1] - 1
    both: np.ndarray = np.maximum(table[level, first], table[level, end - (1 << level)])
    return both


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
    layers: LayerSums,
    form: PipelineForm,
) -> tuple[RankBytes, ...]:
    """Bytes of each rank of one pipeline.

    Args:
        partition: layers to stages.
        schedule: of one step, or of a run without a flush.
        facts: of the schedule.
        layers: their bytes.
        form: what replicas of the pipeline share.
    """
    cuts, found = list(itertools.pairwise(partition.bounds)), []
    for rank in range(schedule.ranks):
        own = [stage for stage, holders in enumerate(schedule.stage_ranks) if rank in holders]
        sizes = {stage: layers.sizes(*cuts[stage], form) for stage in own}
        largest = max(float(layers.largest_weights(*cuts[stage])) for stage in own)
        held = sum(of.held + (facts.versions_held[at] - 1) * of.weights for at, of in sizes.items())
        step = max(_fullest(schedule, rank, sizes), largest if form.averaged else 0.0)
        step += RECEIVED_AHEAD * max(float(of.message) for of in sizes.values())
        step += largest if form.weights_shared else 0.0
        found.append(RankBytes(held=float(held), step=step))
    return tuple(found)


def _fullest(schedule: Schedule, rank: int, sizes: Mapping[int, StageSizes]) -> float:
    """Most bytes of the microbatches in flight at once; gradients that are not there yet come off."""
    bytes_of = {
        # The first stage does the whole backward in the weights' half.
        at: [
            float(size or 0.0) for size in (of.own_gradients, of.kept, of.gradients if at else 0, of.passing)
        ]
        for at, of in sizes.items()
    }
    now = most = -sum(own for own, *_ in bytes_of.values())
    learnt: set[int] = set()
    for action in schedule.actions[rank]:
        own, kept, gradients, passing = bytes_of[action.stage]
        if action.kind is Kind.FORWARD:
            now += kept
        elif action.kind is Kind.BACKWARD_INPUT:
            now += gradients
        elif action.kind is Kind.UPDATE:
            now -= own * (action.stage in learnt)
            learnt.discard(action.stage)
        else:
            whole = action.kind is Kind.BACKWARD or not gradients
            most = max(most, now + passing * whole)
            now -= kept + gradients * (action.kind is Kind.BACKWARD_WEIGHT)
            now += own * (action.stage not in learnt)
            learnt.add(action.stage)
        most = max(most, now)
    return max(0.0, most)
