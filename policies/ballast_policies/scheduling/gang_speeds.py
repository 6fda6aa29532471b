"""Speeds of gangs by kind of training, size and number of nodes: one says what to expect of another.

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
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Self

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.schedules.costs import even_costs
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule
from ballast_policies.planning.schedules.schedule import ScheduleError
from ballast_policies.planning.schedules.simulate import simulate
from ballast_policies.scheduling.gang_spec import GangSpec, JobKey
from ballast_policies.scheduling.state import NodeSizes
from ballast_policies.throughput.estimator import PRIOR_DEVIATION
from ballast_policies.throughput.speeds import Estimate, SpeedKey, Speeds

SCRIPT_EXPONENT = 0.9
"""Power of its size with which a script's speed grows: nothing is known of it but what was measured."""

SizeSpeeds = Mapping[tuple[str, int], Estimate]
"""(GPU type, GPUs) -> what is known of a gang on as few nodes as possible."""


def stated(
    spec: GangSpec, gpu_type: str, stages: int, layer_seconds: tuple[float, ...] = ()
) -> Estimate | None:
    """Speed that the spec states for a gang of ``stages``; None: it states none.

    Between two stated sizes by these; elsewhere from the nearest one by the pipeline's model, with
    ``layer_seconds`` as :func:`size_ratio` has them.
    """
    by_stages = spec.throughput.get(gpu_type)
    if not by_stages:
        return None
    rate = _stated_rate(by_stages, stages)
    if rate is None:
        known = nearest(by_stages, stages)
        rate = by_stages[known] * size_ratio(spec, known, stages, layer_seconds)
    return Estimate(steps_per_second=rate, deviation=PRIOR_DEVIATION, source="prior")


def resized(
    speeds: SizeSpeeds,
    gpu_type: str,
    stages: int,
    spec: GangSpec,
    layer_seconds: tuple[float, ...] = (),
    kind: SizeSpeeds = MappingProxyType({}),
) -> Estimate | None:
    """Speed known of a gang of ``stages`` there; None: none is.

    Between two known sizes by these, elsewhere from the nearest one by :func:`speed_ratio`.
    """
    rates = _rates(speeds, gpu_type)
    if not rates:
        return None
    at = nearest(rates, stages)
    known = speeds[gpu_type, at]
    if at == stages:
        return known
    rate = between(rates, stages)
    if rate is None:
        rate = rates[at] * speed_ratio(spec, kind, gpu_type, at, stages, layer_seconds)
    return dataclasses.replace(
        known, steps_per_second=rate, deviation=math.hypot(known.deviation, PRIOR_DEVIATION)
    )


def size_ratio(spec: GangSpec, known: int, stages: int, layer_seconds: tuple[float, ...] = ()) -> float:
    """Speed of a gang of ``stages`` over that of one of ``known``, by the pipeline's cost model.

    ``layer_seconds``: each layer's part of the step, as measured; empty: layers are alike.
    """
    if spec.is_script:
        return float((stages / known) ** SCRIPT_EXPONENT)
    shape = pipeline_shape(spec, layer_seconds)
    each = spec.ranks_per_position
    return relative_speed(shape, max(1, stages // each)) / relative_speed(shape, max(1, known // each))


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


def pipeline_shape(spec: GangSpec, layer_seconds: tuple[float, ...] = ()) -> PipelineShape:
    """Properties of a job that its speed depends on, besides its number of GPUs."""
    pipeline = spec.config.pipeline
    return PipelineShape(
        schedule=pipeline.schedule,
        microbatches=max(1, pipeline.microbatches // spec.config.parallelism.data),
        stages_per_rank=spec.stages_per_rank,
        layers=spec.layers,
        layer_seconds=layer_seconds,
    )


def speed_ratio(
    spec: GangSpec,
    kind: SizeSpeeds,
    gpu_type: str,
    known: int,
    size: int,
    layer_seconds: tuple[float, ...] = (),
) -> float:
    """Speed at ``size`` over that at ``known``.

    By what is stated of both, or of sizes around them; else by what the kind has reported of them; else by
    the pipeline's model, from the nearest stated size where one is stated.
    """
    by_stages = spec.throughput.get(gpu_type, {})
    for first, second in (
        (_stated_rate(by_stages, known), _stated_rate(by_stages, size)),
        (between(rates := _rates(kind, gpu_type), known), between(rates, size)),
    ):
        if first and second is not None:
            return second / first
    said, of_size = (stated(spec, gpu_type, stages, layer_seconds) for stages in (known, size))
    if said is not None and of_size is not None and said.steps_per_second > 0:
        return of_size.steps_per_second / said.steps_per_second
    return size_ratio(spec, known, size, layer_seconds)


def _rates(speeds: SizeSpeeds, gpu_type: str) -> dict[int, float]:
    """GPUs -> steps/s above 0, of what is known of the type."""
    return {
        size: known.steps_per_second
        for (of_type, size), known in speeds.items()
        if of_type == gpu_type and known.steps_per_second > 0
    }


def _stated_rate(by_stages: Mapping[int, float], size: int) -> float | None:
    """Steps/s at ``size`` by what the spec states of it, or of sizes around it; None: by neither."""
    if size in by_stages:
        return by_stages[size]
    return between({stages: rate for stages, rate in by_stages.items() if rate > 0}, size)


def between(reported: Mapping[int, float], size: int) -> float | None:
    """Steps/s at ``size`` by what was reported of it, or of a smaller and a larger size; None: by neither."""
    if size in reported:
        return reported[size]
    below, above = [s for s in reported if s < size], [s for s in reported if s > size]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    part = math.log(size / low) / math.log(high / low)
    return math.exp((1 - part) * math.log(reported[low]) + part * math.log(reported[high]))


def nearest(sizes: Iterable[int], stages: int) -> int:
    """The one of ``sizes`` that is nearest to ``stages``, the smaller of two."""
    return min(sizes, key=lambda size: (abs(size - stages), size))


MOST_KEPT = 8
"""Specs kept for each spec that states speeds by nodes, as different nodes have it: equal jobs share them."""

NO_NODES = NodeSizes()
"""Nothing is known of the nodes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangRequest:
    """A job, and the gang for which its speed is asked.

    Attributes:
        gpus: of the gang.
        nodes: of the pools; empty: not known.
        barred: groups of nodes (``Node.group``) on which it must not be started.
    """

    key: JobKey
    spec: GangSpec
    gpus: int
    nodes: NodeSizes = NO_NODES
    barred: frozenset[str] = frozenset()

    @property
    def on_its_nodes(self) -> Self:
        """The same, whose spec states each size's speed on as many nodes as hold that size."""
        spec = self.spec
        if not spec.spread:
            return self
        nodes = tuple(self.fewest_nodes(gpu_type, gpus) or 1 for gpu_type, gpus in spec.spread)
        if nodes not in spec.on_nodes:
            throughput = {gpu_type: dict(by_size) for gpu_type, by_size in spec.throughput.items()}
            for ((gpu_type, gpus), by_nodes), count in zip(spec.spread.items(), nodes, strict=True):
                throughput[gpu_type][gpus] = _rate_on(by_nodes, count)
            if len(spec.on_nodes) >= MOST_KEPT:
                spec.on_nodes.clear()
            spec.on_nodes[nodes] = dataclasses.replace(spec, throughput=throughput)
        return dataclasses.replace(self, spec=spec.on_nodes[nodes])

    def stated_spread(self, gpu_type: str, gpus: int) -> dict[SpeedKey, Estimate]:
        """Speeds that :attr:`on_its_nodes` states, or as the nearest stated size loses by them."""
        sizes = [size for of_type, size in self.spec.spread if of_type == gpu_type]
        fewest, packed = self.fewest_nodes(gpu_type, gpus), stated(self.spec, gpu_type, gpus)
        if not sizes or fewest is None or packed is None:
            return {}
        by_nodes = self.spec.spread[gpu_type, nearest(sizes, gpus)]
        here = _rate_on(by_nodes, fewest)
        return {
            SpeedKey.of(gpu_type, gpus, nodes): dataclasses.replace(
                packed, steps_per_second=packed.steps_per_second * _rate_on(by_nodes, nodes) / here
            )
            for nodes in range(fewest, max(fewest, *by_nodes) + 1)
        }

    def fewest_nodes(self, gpu_type: str, gpus: int) -> int | None:
        """Nodes on which a gang of ``gpus`` is as close together as pools allow; None: unknown."""
        per_pod = self.spec.gpus_per_pod
        return self.nodes.fewest(gpu_type, gpus, per_pod=per_pod, barred=self.barred)


def _rate_on(by_nodes: Mapping[int, float], nodes: int) -> float:
    """Steps/s on ``nodes`` nodes: of 1 below the first other that is stated, beyond the last as there."""
    beyond = {stated_on: rate for stated_on, rate in by_nodes.items() if stated_on > 1}
    if nodes < min(beyond):
        return by_nodes[1]
    return between(beyond, min(nodes, max(beyond))) or by_nodes[1]


def reconcile_with_spec(job: GangRequest, reports: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """GPU type -> reports; where they bear out how the spec says that types compare, exactly so.

    A window with a pause in it would otherwise change who gets which GPU. Beyond PRIOR_DEVIATION the
    reports count as they are.
    """
    said = {gpu_type: stated(job.spec, gpu_type, job.gpus) for gpu_type in reports}
    expected = {t: s.steps_per_second for t, s in said.items() if s is not None and s.steps_per_second > 0}
    ratios = {t: math.log(reports[t].steps_per_second / rate) for t, rate in expected.items()}
    scale = sum(ratios.values()) / len(ratios) if ratios else 0.0
    if any(abs(ratio - scale) > PRIOR_DEVIATION for ratio in ratios.values()):
        return dict(reports)
    borne_out = {
        t: dataclasses.replace(reports[t], steps_per_second=rate * math.exp(scale))
        for t, rate in expected.items()
    }
    return {**reports, **borne_out}


def as_prior(estimate: Estimate, ratio: float = 1.0) -> Estimate:
    """Prior of a job, from a report of other jobs of the kind, or of another placement times ``ratio``."""
    return Estimate(
        steps_per_second=estimate.steps_per_second * ratio,
        deviation=math.hypot(estimate.deviation, PRIOR_DEVIATION),
        source="prior",
    )


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
                found.known[at] = as_prior(by_nodes[nodes], ratio)
            (found.at_least if nodes > wanted else found.at_most).setdefault(at, by_nodes[nodes])
    return found


def bounded(prior: Estimate | None, at_least: Estimate | None, at_most: Estimate | None) -> Estimate | None:
    """Correction of ``prior`` by the bounds; None: it is within them."""
    if prior is None:
        guess = at_least or at_most
        return None if guess is None else as_prior(guess)
    if at_least is not None and prior.steps_per_second < at_least.steps_per_second:
        return as_prior(at_least)
    if at_most is not None and prior.steps_per_second > at_most.steps_per_second:
        return as_prior(at_most)
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

    ``packed``: its steps/s on the ``fewest`` nodes that hold it; ``own``, ``like``: what the job, and jobs of
    its kind, have reported.
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


MOST_ACTIONS = 20_000
"""Positions x microbatches x stages a rank, up to which a schedule without a formula is simulated."""

DIGITS = 2
"""Digits of a layer's part of the step: measurements differ in their last, and equal shapes are cut once."""


def relative_speed(shape: PipelineShape, positions: int) -> float:
    """Speed on ``positions`` of the pipeline, at least 1, over that on one."""
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
