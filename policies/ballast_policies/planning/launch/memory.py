"""Whether layers, as measured, fit the GPUs of a pipeline at a given number of positions.

Of layer l on position i, with n_i microbatches in flight and v_i versions of the weights held there,

    bytes[i, l] = held_l + n_i activation_l + (v_i - 1) weights_l

A position takes consecutive layers. With several stages a rank its stages count as one, so what does not
fit here does not fit the trainer either.
"""

import dataclasses
import functools
import math

import numpy as np

from ballast_policies.planning.schedules import SCHEDULES, Schedule, ScheduleError
from ballast_policies.planning.schedules.kind import ScheduleKind
from ballast_policies.planning.schedules.validate import validate

MOST_ACTIONS = 20_000
"""Positions x microbatches x stages a rank, up to which a schedule is built to see what it holds."""

WEIGHT_PARTS = {"adamw": 1 / 4, "sgd": 1 / 2}
"""Part of the held bytes that are weights: beside them are a gradient and the optimizer's numbers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayers:
    """Layers as a trainer has measured them; tuples of shape (L,), or empty: not measured.

    Attributes:
        seconds: of a step, in any unit.
        held_bytes: parameters, gradients and optimizer state, on one rank that holds the layer.
        activation_bytes: kept for the backward, of one microbatch.
    """

    seconds: tuple[float, ...] = ()
    held_bytes: tuple[int, ...] = ()
    activation_bytes: tuple[int, ...] = ()

    @property
    def largest(self) -> tuple[int, float]:
        """(number of the layer that takes most with one microbatch in flight, its bytes)."""
        kept = self.activation_bytes or (0,) * len(self.held_bytes)
        sizes = [held + activation for held, activation in zip(self.held_bytes, kept, strict=True)]
        layer = max(range(len(sizes)), key=sizes.__getitem__)
        return layer, float(sizes[layer])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineForm:
    """What the memory of a pipeline depends on besides its layers.

    Attributes:
        schedule: a name of ``planning.schedules.SCHEDULES``.
        positions: of the pipeline; of one with replicas, its stages.
        microbatches: of a step, in each replica of the pipeline.
        stages_per_rank: stages on each rank, where there are several positions.
        replicas: by stage, how many ranks hold it; empty: one each.
        optimizer: as ``training.optimizer`` names it.
    """

    schedule: str
    positions: int
    microbatches: int
    stages_per_rank: int = 1
    replicas: tuple[int, ...] = ()
    optimizer: str = "adamw"


class MemoryNeed:
    """What a pipeline of ``layers`` needs of its GPUs, at any number of positions; answers are kept."""

    def __init__(self, layers: MeasuredLayers, form: PipelineForm) -> None:
        """``form``: of any number of positions."""
        self.layers = layers
        self._form = form
        self._fits: dict[tuple[int, float], bool] = {}
        self._least: dict[int, float] = {}

    def fits(self, positions: int, memory: float) -> bool:
        """Whether there is a cut of the layers with which every position fits ``memory`` bytes.

        True where the layers' bytes were not measured, and where there are fewer layers than positions: then
        something else is wrong.
        """
        asked = positions, memory
        if asked not in self._fits:
            self._fits[asked] = self._unknown(positions) or _fits(self._rows(positions), memory)
        return self._fits[asked]

    def least(self, positions: int) -> float:
        """Bytes of the fullest position under the best cut for memory, to a thousandth; 0: unknown."""
        if positions not in self._least:
            self._least[positions] = self._found_least(positions)
        return self._least[positions]

    def _found_least(self, positions: int) -> float:
        if self._unknown(positions):
            return 0.0
        rows = self._rows(positions)
        low, high = 0.0, float(rows.sum(axis=1).max())
        while high - low > high / 1000:
            middle = (low + high) / 2
            low, high = (low, middle) if _fits(rows, middle) else (middle, high)
        return high

    def _unknown(self, positions: int) -> bool:
        return not len(self.layers.held_bytes) >= max(1, positions)

    def _rows(self, positions: int) -> np.ndarray:
        return bytes_on_positions(self.layers, dataclasses.replace(self._form, positions=positions))


def bytes_on_positions(layers: MeasuredLayers, form: PipelineForm) -> np.ndarray:
    """Bytes of each layer on each position, shape (positions, L)."""
    held = np.asarray(layers.held_bytes, dtype=float)
    kept = np.asarray(layers.activation_bytes or np.zeros(len(held)), dtype=float)
    in_flight, versions = _held(form)
    weights = WEIGHT_PARTS.get(form.optimizer, WEIGHT_PARTS["adamw"]) * held
    rows: np.ndarray = held + np.outer(in_flight, kept) + np.outer(np.asarray(versions) - 1.0, weights)
    return rows


def _fits(rows: np.ndarray, memory: float) -> bool:
    """Whether consecutive parts of the layers, at least one each, are all within ``memory``.

    The set of layers that the first positions may end with is followed from position to position: with
    rows that differ, the furthest end is not always the best.
    """
    positions, count = rows.shape
    limit = memory * (1 + 1e-9)  # what fits exactly fits, also after rounding
    if rows.min(axis=0).sum() > positions * limit:
        return False
    ends = np.zeros(count + 1, dtype=bool)
    ends[0] = True
    for row in rows:
        sums = np.concatenate([[0.0], np.cumsum(row)])
        furthest = np.searchsorted(sums, sums + limit, side="right") - 1
        steps = np.zeros(count + 2, dtype=np.int64)
        begins = np.flatnonzero(ends[:count])
        begins = begins[furthest[begins] > begins]
        np.add.at(steps, begins + 1, 1)
        np.add.at(steps, furthest[begins] + 1, -1)
        ends = np.cumsum(steps)[: count + 1] > 0
        if not ends.any():
            return False
    return bool(ends[count])


@functools.lru_cache(maxsize=1000)
def _held(form: PipelineForm) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """(microbatches in flight, versions of the weights) by position.

    One of each, which every schedule has at least, where a stage has replicas or the schedule is too large to
    be built.
    """
    positions, microbatches = form.positions, max(1, form.microbatches)
    ones, versions = (1.0,) * positions, (1,) * positions
    kind = SCHEDULES.get(form.schedule)
    # One rank alone goes through its microbatches one by one.
    if positions == 1 or kind is None or any(count != 1 for count in form.replicas):
        return ones, versions
    if form.schedule == "1F1B":
        return tuple(float(min(microbatches, positions - at)) for at in range(positions)), versions
    if form.schedule == "GPipe":
        return (float(microbatches),) * positions, versions
    if positions * microbatches * form.stages_per_rank > MOST_ACTIONS:
        return ones, versions
    try:
        schedule = _built(kind, form)
        facts = validate(schedule)
    except ScheduleError:
        return ones, versions
    own = [
        [stage for stage, holders in enumerate(schedule.stage_ranks) if position in holders]
        for position in range(positions)
    ]
    in_flight = tuple(count / len(stages) for count, stages in zip(facts.in_flight, own, strict=True))
    return in_flight, tuple(max(facts.versions_held[stage] for stage in stages) for stages in own)


def _built(kind: ScheduleKind, form: PipelineForm) -> Schedule:
    positions, microbatches = form.positions, max(1, form.microbatches)
    if not kind.asynchronous:
        return kind.build(positions, microbatches, form.stages_per_rank)
    # Long enough that the pipeline fills.
    steps = 2 + math.ceil(2 * positions / microbatches)
    if kind.build_run is not None:
        return kind.build_run(positions, microbatches, steps)
    return kind.build(positions, steps * microbatches, form.stages_per_rank)
