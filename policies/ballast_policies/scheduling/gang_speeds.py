"""Speeds of gangs: by kind of training, and by size: what is known of one says what to expect of another."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Self

from ballast_policies.scheduling.gang_spec import GangSpec, JobKey
from ballast_policies.scheduling.state import NodeSizes
from ballast_policies.throughput.by_size import PipelineShape, relative_speed
from ballast_policies.throughput.estimator import PRIOR_DEVIATION
from ballast_policies.throughput.speeds import Estimate, SpeedKey

SCRIPT_EXPONENT = 0.9
"""Of a script nothing is known but what was measured: at other sizes its speed goes with this power."""

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
"""Of a spec that states speeds by nodes, specs as different nodes have it: jobs that are equal share them."""

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


def as_prior(estimate: Estimate) -> Estimate:
    """Prior of a job that has not reported itself, from a report of other jobs of the kind."""
    return Estimate(
        steps_per_second=estimate.steps_per_second,
        deviation=math.hypot(estimate.deviation, PRIOR_DEVIATION),
        source="prior",
    )
