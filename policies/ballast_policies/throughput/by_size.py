"""Speeds of a gang by its size, and by the number of its nodes.

By size the pipeline's cost model says it. A step on p positions takes the load of the busiest one and the
bubble of the schedule. The load follows from the layers' measured seconds, cut exactly; before anything is
measured, layers are alike.

By nodes measurements say it (dissertation section 5.3.1). The ranks of a gang on one node exchange data
faster than those on several: these are different speeds, and what was measured of one is not taken for the
other. Gavel has two of them in its tables, ``v100`` and ``v100_unconsolidated``; here the number of nodes
counts, as nodes of a cluster have different sizes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.schedules.costs import even_costs
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule
from ballast_policies.planning.schedules.schedule import ScheduleError
from ballast_policies.planning.schedules.simulate import simulate
from ballast_policies.throughput.estimator import PRIOR_DEVIATION
from ballast_policies.throughput.speeds import Estimate, SpeedKey, Speeds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedSpeeds:
    """Speeds of gangs on as few nodes as possible, derived from speeds by number of nodes.

    Attributes:
        known: (GPU type, GPUs) -> measured there, or on more or fewer nodes of which like jobs have shown how
            the two compare.
        at_least: measured on more nodes only: a gang on fewer is no slower.
        at_most: measured on fewer nodes only.
    """

    known: dict[tuple[str, int], Estimate] = dataclasses.field(default_factory=dict)
    at_least: dict[tuple[str, int], Estimate] = dataclasses.field(default_factory=dict)
    at_most: dict[tuple[str, int], Estimate] = dataclasses.field(default_factory=dict)


def packed_speeds(
    speeds: Speeds, fewest: Callable[[str, int], int | None], like: Speeds | None = None
) -> PackedSpeeds:
    """The speeds of gangs on as few nodes as possible.

    Args:
        speeds: of which those in several pools, and beside another job, say nothing.
        fewest: (GPU type, GPUs) -> nodes that hold such a gang; None: unknown, the fewest measured count.
        like: speeds that jobs of the same kind have reported.
    """
    found, others = PackedSpeeds(), {}
    for key, estimate in speeds.items():  # most were measured where they are asked for
        gang = key.alone_in_pool
        if gang is not None and key.nodes == fewest(*gang):
            found.known[gang] = estimate
        else:
            others[key] = estimate
    for at, by_nodes in _by_nodes(others).items():
        if at in found.known:
            continue
        gpu_type, gpus = at
        wanted = fewest(gpu_type, gpus) or min(by_nodes)
        if wanted in by_nodes:
            found.known[at] = by_nodes[wanted]
            continue
        for nodes in sorted(by_nodes, key=lambda nodes: abs(nodes - wanted)):
            ratio = _ratio(like or {}, gpu_type, gpus, nodes, wanted)
            if ratio is not None and at not in found.known:
                found.known[at] = _scaled(by_nodes[nodes], ratio)
            (found.at_least if nodes > wanted else found.at_most).setdefault(at, by_nodes[nodes])
    return found


def bounded(prior: Estimate | None, at_least: Estimate | None, at_most: Estimate | None) -> Estimate | None:
    """Correction of ``prior`` by the bounds; None: it is within them."""
    if prior is None:
        guess = at_least or at_most
        return None if guess is None else _scaled(guess, 1.0)
    if at_least is not None and prior.steps_per_second < at_least.steps_per_second:
        return _scaled(at_least, 1.0)
    if at_most is not None and prior.steps_per_second > at_most.steps_per_second:
        return _scaled(at_most, 1.0)
    return None


def speed_on(
    nodes: int,
    gpu_type: str,
    gpus: int,
    *,
    packed: float,
    fewest: int,
    own: Speeds,
    like: Speeds,
) -> float:
    """Steps/s of a gang on ``nodes`` nodes: as reported there, else as like jobs' speeds compare.

    Where neither has run so, by the nearest number of nodes beyond the fewest; ``packed`` where nothing is
    known: then it is not known that more nodes make the gang slower.

    Args:
        nodes: that the gang is on.
        gpu_type: of its GPUs.
        gpus: of the gang.
        packed: its steps/s on the fewest nodes.
        fewest: nodes that hold it.
        own: what the job has reported.
        like: what jobs of its kind have reported.
    """
    reported = own.get(SpeedKey.of(gpu_type, gpus, nodes))
    if reported is not None:
        return reported.steps_per_second
    if nodes <= fewest:
        return packed
    ratio = _ratio(like, gpu_type, gpus, fewest, nodes)
    if ratio is not None:
        return packed * ratio
    mine = {n: e for n, e in _by_nodes(own).get((gpu_type, gpus), {}).items() if n > fewest}
    if mine:
        return mine[min(mine, key=lambda n: (abs(n - nodes), n))].steps_per_second
    theirs = _by_nodes(like).get((gpu_type, gpus), {})
    beyond = sorted((n for n in theirs if n > fewest), key=lambda n: (abs(n - nodes), n))
    if fewest in theirs and beyond:
        return packed * theirs[beyond[0]].steps_per_second / theirs[fewest].steps_per_second
    return packed


def _by_nodes(speeds: Speeds) -> dict[tuple[str, int], dict[int, Estimate]]:
    found: dict[tuple[str, int], dict[int, Estimate]] = {}
    for key, estimate in speeds.items():
        if (gang := key.alone_in_pool) is not None:
            found.setdefault(gang, {})[key.nodes or 1] = estimate
    return found


def _ratio(like: Speeds, gpu_type: str, gpus: int, known: int, wanted: int) -> float | None:
    """Speed on ``wanted`` nodes over that on ``known`` ones; None: like jobs have not run on both."""
    there = like.get(SpeedKey.of(gpu_type, gpus, wanted))
    here = like.get(SpeedKey.of(gpu_type, gpus, known))
    if there is None or here is None or here.steps_per_second <= 0:
        return None
    return there.steps_per_second / here.steps_per_second


def _scaled(estimate: Estimate, ratio: float) -> Estimate:
    """No measurement any more: another placement's, times ``ratio``."""
    return Estimate(
        steps_per_second=estimate.steps_per_second * ratio,
        deviation=math.hypot(estimate.deviation, PRIOR_DEVIATION),
        source="prior",
    )


MOST_ACTIONS = 20_000
"""Positions x microbatches x stages a rank, up to which a schedule without a formula is simulated."""

DIGITS = 2
"""Of a layer's part of the step: measurements differ in their last digits, and equal shapes are cut once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """Properties of a pipeline that its step time depends on, besides its number of positions.

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
        idle = simulate(built, even_costs(built.stages)).idle_fraction
    except ScheduleError:
        return formula
    return 1.0 / (1.0 - idle) if idle < 1.0 else formula


def rounded(layer_seconds: tuple[float, ...]) -> tuple[float, ...]:
    """Each layer's part of the step, by two digits; empty where nothing was measured."""
    total = sum(layer_seconds)
    if not 0 < total < math.inf:
        return ()
    return tuple(float(f"{seconds / total:.{DIGITS}g}") for seconds in layer_seconds)
