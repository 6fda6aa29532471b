"""Bytes of a rank with one stage, of any layers at any position, in one array: as by :mod:`.rank_bytes`.

And bounds on them that add up over layers, for searches that need sums: a cut that is within them is within
the formula, which may find a little less.
"""

import functools
from weakref import WeakKeyDictionary

import numpy as np

from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.moments import Moments, moments_of, schedule_of
from ballast_policies.planning.memory.rank_bytes import RECEIVED_AHEAD, WHOLE_GRADIENTS, Layers, LayerSums
from ballast_policies.planning.partition import Partition, best_cuts, smallest_largest

ROUNDING = 1 + 1e-12
"""Tolerance by which what fits exactly fits after rounding, too."""


class StageBytes:
    """Bytes that a stage of some layers takes at each position of a pipeline with one stage a position."""

    def __init__(self, layers: LayerSums, form: PipelineForm) -> None:
        self.layers, self.form = layers, form
        self.moments: Moments = moments_of(form)

    def taken(self, position: Layers, first: Layers, end: Layers) -> np.ndarray:
        """Bytes of a rank with layers ``first`` to ``end - 1`` at the fullest moment.

        Args:
            position: in the pipeline.
            first: below ``end``; all three broadcast against each other.
            end: see there.
        """
        numbers, versions = self.moments.numbers[position], self.moments.versions[position]
        return self.layers.taken(numbers, versions, first, end, self.form)

    def of_cut(self, cut: Partition) -> np.ndarray:
        """Bytes at each position, shape (p,)."""
        bounds = np.array(cut.bounds)
        return self.taken(np.arange(cut.ranks), bounds[:-1], bounds[1:])

    def least(self) -> float:
        """Bytes of the fullest position under the best cut for memory; one layer a position at least."""
        return best_cuts(
            self.form.positions,
            self.layers.layers,
            lambda position, first, ends: self.taken(position, np.minimum(first, ends - 1), ends),
            smallest_largest,
        )[0]


@functools.lru_cache(maxsize=256)
def stage_bytes(layers: MeasuredLayers, form: PipelineForm) -> StageBytes:
    """Bytes of stages of measured layers; kept."""
    return StageBytes(sums_of_layers(layers), form)


_SUMS: WeakKeyDictionary[MeasuredLayers, LayerSums] = WeakKeyDictionary()


def sums_of_layers(layers: MeasuredLayers) -> LayerSums:
    """Kept for all numbers of positions, as long as the layers are: a round asks jobs' by turns."""
    found = _SUMS.get(layers)
    if found is None:
        found = _SUMS[layers] = LayerSums(
            held=layers.held_bytes,
            weights=layers.weight_bytes,
            activations=layers.activation_bytes,
            outputs=layers.output_bytes,
            repeated=layers.repeated_bytes,
            gradients=layers.gradient_bytes,
        )
    return found


def bytes_on_positions(layers: MeasuredLayers, form: PipelineForm) -> np.ndarray:
    """Bytes of each layer on each position, shape (positions, L)."""
    held, kept = np.asarray(layers.held_bytes, dtype=float), _values(layers, layers.activation_bytes)
    found = _moments(form)
    flying, between = found.numbers[..., 0].max(axis=1), found.numbers[..., 1].max(axis=1)
    step = np.outer(flying, kept) + np.outer(between, _passing(layers))
    rows: np.ndarray = held + step + np.outer(found.versions - 1.0, _values(layers, layers.weight_bytes))
    return rows


def reserves(layers: MeasuredLayers, form: PipelineForm) -> np.ndarray:
    """Bytes that each position needs besides at most, whichever layers it has, shape (positions,).

    Outputs that start backwards, messages, and what is there while one layer's backward runs.
    """
    positions, count, reserved = form.positions, len(layers.held_bytes), []
    gradients = _values(layers, layers.weight_bytes)
    outputs, passing, found = _values(layers, layers.output_bytes), _passing(layers), _moments(form)
    for at, (flying, _, _, running) in enumerate(found.numbers.max(axis=1)):
        end = max(at, count - positions + at) + 1  # layers at..end - 1 may be there
        last = at == positions - 1
        output = float(outputs[-1] if last else outputs[at:end].max(initial=0.0))
        received = float(outputs[at - 1 : end - 1].max(initial=0.0)) if at else 0.0
        handed_on = 0.0 if last else output
        largest = float(gradients[at:end].max(initial=0.0))
        needed = flying * output + running * float(passing[at:end].max(initial=0.0))
        if form.gradient_shares > 1:
            needed += WHOLE_GRADIENTS * largest
        elif form.averaged:
            needed = max(needed, largest)
        if form.weights_shared:
            needed += largest
        reserved.append(needed + RECEIVED_AHEAD * max(received, handed_on))
    return np.array(reserved)


def _moments(form: PipelineForm) -> Moments:
    """Moments of a form; where ranks have several stages, the mean of what its schedule has of each."""
    if form.stages_per_rank == 1 or form.positions == 1:
        return moments_of(form)
    built = schedule_of(form)
    if built is None:
        return moments_of(form)
    schedule, facts = built
    own = [
        [stage for stage, holders in enumerate(schedule.stage_ranks) if position in holders]
        for position in range(form.positions)
    ]
    flying = np.array([count / len(stages) for count, stages in zip(facts.in_flight, own, strict=True)])
    numbers = np.zeros((form.positions, 1, 4))
    numbers[:, 0, 0], numbers[:, 0, 3] = flying, 1
    versions = np.array([max(facts.versions_held[stage] for stage in stages) for stages in own], dtype=float)
    return Moments(numbers, flying, versions)


def _passing(layers: MeasuredLayers) -> np.ndarray:
    passing: np.ndarray = _values(layers, layers.gradient_bytes) + _values(layers, layers.repeated_bytes)
    return passing


def _values(layers: MeasuredLayers, values: tuple[int, ...]) -> np.ndarray:
    return np.asarray(values or (0,) * len(layers.held_bytes), dtype=float)
