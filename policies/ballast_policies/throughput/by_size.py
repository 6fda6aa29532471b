"""How the speed of a gang changes with its size, by the pipeline's cost model.

A step on p positions takes the load of the busiest one and the bubble of the schedule. The load follows
from the layers' measured seconds, cut exactly; before anything is measured, layers are alike.
"""

import dataclasses
import functools
import math

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.schedules.costs import even_costs
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule
from ballast_policies.planning.schedules.schedule import ScheduleError
from ballast_policies.planning.schedules.simulate import simulate

MOST_ACTIONS = 20_000
"""Positions x microbatches x stages a rank, up to which a schedule without a formula is simulated."""

DIGITS = 2
"""Of a layer's part of the step: measurements differ in their last digits, and equal shapes are cut once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What the step time of a pipeline depends on besides its number of positions.

    Attributes:
        schedule: a name of ``planning.schedules.SCHEDULES``.
        microbatches: of a step, in each replica of the pipeline.
        stages_per_rank: stages on each rank.
        layers: number of layers; None: not known.
        layer_seconds: seconds a step of each layer, in any unit; empty: all alike.
    """

    schedule: str
    microbatches: int
    stages_per_rank: int = 1
    layers: int | None = None
    layer_seconds: tuple[float, ...] = ()


def relative_speed(shape: PipelineShape, positions: int) -> float:
    """Speed on ``positions`` of the pipeline over that on one; 1 on one position.

    Args:
        shape: the pipeline.
        positions: at least 1.
    """
    return 1.0 / _step(shape, positions) if positions > 1 else 1.0


@functools.lru_cache(maxsize=50_000)
def _step(shape: PipelineShape, positions: int) -> float:
    """Step time on ``positions`` where it is 1 on one; ``planning.step_time`` has the closed form."""
    largest, microbatches = _largest_load(shape, positions), max(1, shape.microbatches)
    kind = SCHEDULES.get(shape.schedule)
    if shape.stages_per_rank == 1 and (kind is None or kind.closed_form):
        return ((microbatches - 1) * largest + 1.0) / microbatches
    return largest * _stretch(shape.schedule, positions, microbatches, shape.stages_per_rank)


def _largest_load(shape: PipelineShape, positions: int) -> float:
    """Part of the model's work at the busiest position."""
    seconds = shape.layer_seconds
    if seconds and positions <= len(seconds) and sum(seconds) > 0:
        return float(exact_partition(seconds, positions).loads(seconds).max() / sum(seconds))
    if shape.layers is None or shape.layers < positions:
        return 1.0 / positions
    # With several stages a rank, the uneven cut is that of stages.
    parts = positions * shape.stages_per_rank
    if shape.layers < parts:
        return math.ceil(shape.layers / positions) / shape.layers
    larger = shape.layers % parts
    base, most = shape.layers // parts, math.ceil(shape.layers / parts)
    each = min(shape.stages_per_rank, math.ceil(larger / positions))
    return (base * (shape.stages_per_rank - each) + most * each) / shape.layers


@functools.lru_cache(maxsize=10_000)
def _stretch(schedule: str, positions: int, microbatches: int, stages_per_rank: int) -> float:
    """Step time over the busiest rank's work, by the schedule's bubble on even stages."""
    formula = 1.0 + (positions - 1) / (stages_per_rank * microbatches)
    kind = SCHEDULES.get(schedule)
    if kind is None or kind.closed_form:
        return formula
    if kind.asynchronous:
        return 1.0
    if positions * microbatches * stages_per_rank > MOST_ACTIONS:
        return formula
    try:
        built = build_schedule(schedule, ranks=positions, microbatches=microbatches, chunks=stages_per_rank)
        idle = simulate(built, even_costs(built.stages, forward=1.0, backward=2.0)).idle_fraction
    except ScheduleError:
        return formula
    return 1.0 / (1.0 - idle) if idle < 1.0 else formula


def rounded(layer_seconds: tuple[float, ...]) -> tuple[float, ...]:
    """Each layer's part of the step, by two digits; empty where nothing was measured."""
    total = sum(layer_seconds)
    if not 0 < total < math.inf:
        return ()
    return tuple(float(f"{seconds / total:.{DIGITS}g}") for seconds in layer_seconds)
