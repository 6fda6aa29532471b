"""How a gang's speed depends on its size: what is known of one size says what to expect of another."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from ballast_policies.throughput.by_size import PipelineShape, relative_speed
from ballast_policies.throughput.estimator import PRIOR_DEVIATION
from ballast_policies.throughput.track import Estimate

from ballast_operator.views.spec import JobSpec

SCRIPT_EXPONENT = 0.9
"""Of a script nothing is known but what was measured: at other sizes its speed goes with this power."""

Speeds = Mapping[tuple[str, int], Estimate]
"""(GPU type, stages) -> what is known of it."""


def stated(
    spec: JobSpec, gpu_type: str, stages: int, layer_seconds: tuple[float, ...] = ()
) -> Estimate | None:
    """What the spec says of a gang of ``stages``; None: nothing.

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
    speeds: Speeds,
    gpu_type: str,
    stages: int,
    spec: JobSpec,
    layer_seconds: tuple[float, ...] = (),
) -> Estimate | None:
    """What is known of a gang of ``stages`` there; None: nothing.

    From the nearest known size by the pipeline's model of ``spec``.
    """
    sizes = [size for known_type, size in speeds if known_type == gpu_type]
    if not sizes:
        return None
    at = nearest(sizes, stages)
    known = speeds[gpu_type, at]
    if at == stages:
        return known
    return dataclasses.replace(
        known,
        steps_per_second=known.steps_per_second * size_ratio(spec, at, stages, layer_seconds),
        deviation=math.hypot(known.deviation, PRIOR_DEVIATION),
    )


def size_ratio(spec: JobSpec, known: int, stages: int, layer_seconds: tuple[float, ...] = ()) -> float:
    """Speed of a gang of ``stages`` over that of one of ``known``, by the pipeline's cost model.

    ``layer_seconds``: each layer's part of the step, as measured; empty: layers are alike.
    """
    if spec.is_script:
        return float((stages / known) ** SCRIPT_EXPONENT)
    shape = pipeline_shape(spec, layer_seconds)
    each = spec.ranks_per_position
    return relative_speed(shape, max(1, stages // each)) / relative_speed(shape, max(1, known // each))


def pipeline_shape(spec: JobSpec, layer_seconds: tuple[float, ...] = ()) -> PipelineShape:
    """What the speed of a job depends on besides its number of GPUs."""
    pipeline = spec.config.pipeline
    return PipelineShape(
        schedule=pipeline.schedule,
        microbatches=max(1, pipeline.microbatches // spec.config.parallelism.data),
        stages_per_rank=spec.stages_per_rank,
        layers=spec.layers,
        layer_seconds=layer_seconds,
    )


def known_ratio(spec: JobSpec, kind: Speeds, gpu_type: str, known: int, size: int) -> float | None:
    """Speed at ``size`` over that at ``known``, where both are stated or both were reported by the kind.

    A size between two stated ones counts as stated.
    """
    by_stages = spec.throughput.get(gpu_type, {})
    stated_known, stated_size = _stated_rate(by_stages, known), _stated_rate(by_stages, size)
    if stated_known and stated_size is not None:
        return stated_size / stated_known
    first, second = kind.get((gpu_type, known)), kind.get((gpu_type, size))
    if first is None or second is None or first.steps_per_second <= 0:
        return None
    return second.steps_per_second / first.steps_per_second


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
