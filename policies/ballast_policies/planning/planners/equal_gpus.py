"""2BW's and PTD-P's planners over any profile: parallel pipelines of stages with as many layers each.

Both were made for models of equal blocks on equal GPUs (dissertation 3.3 and 4.3): stages have the same
number of layers, up to one, and GPUs are taken in the cluster's order, tensor-parallel groups together, then
replicas of a stage, then stages. With unlike layers or GPUs the slowest stage counts, in the terms of
:mod:`cost_model`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ballast_policies.planning.partition import PlanningError, even_partition
from ballast_policies.planning.planners.best.placements import divisors
from ballast_policies.planning.planners.cost_model import CostModel, Degrees, StageTimes
from ballast_policies.planning.planners.layout import Groups, Layout, PlacedStage
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout, and the seconds of a step by the planner's own formula."""

    predicted_seconds: float
    layout: Layout


def two_versions_candidates(
    model: CostModel, *, batch_size: int, most: int, sizes: Sequence[int] | None = None
) -> tuple[Candidate, ...]:
    """PipeDream-2BW: d pipelines of p stages, d p <= N, microbatch size, recomputation (algorithm 1).

    A microbatch passes every t = max over stages of max(compute + what arrives, exchange / m) seconds; two
    versions of the weights are held, and m >= p microbatches a pipeline and update are needed.

    Args:
        model: profile and cluster.
        batch_size: samples of an update.
        most: how many, best first.
        sizes: microbatch sizes to try; None: all that divide.

    Raises:
        PlanningError: nothing fits.
    """

    def shapes() -> Iterator[tuple[Degrees, int]]:
        for data in range(1, model.devices.count + 1):
            for size, microbatches in _microbatches(batch_size, data, sizes):
                for stages in range(1, min(model.devices.count // data, model.layers, microbatches) + 1):
                    for recompute in (False, True):
                        yield Degrees(1, data, size, microbatches, recompute), stages

    def predicted(degrees: Degrees, times: StageTimes) -> float:
        compute = (times.forward + times.backward)[0]
        arrives = np.zeros_like(compute)
        arrives[1:] += times.transfer[0]
        arrives[:-1] += times.transfer[0]
        m = degrees.microbatches
        return float(m * np.maximum(compute + arrives, times.exchange[0] / m).max())

    return _best(model, shapes(), predicted, most, schedule="PipeDream2BW", name="2BW")


def megatron_candidates(
    model: CostModel,
    *,
    batch_size: int,
    most: int,
    most_tensor: int,
    sizes: Sequence[int] | None = None,
) -> tuple[Candidate, ...]:
    """PTD-P: p t d = N and the microbatch size, with recomputation; equation 4.1 and the transfers.

    (m + p - 1) max(forward + backward) + 2 (p - 1) max(transfer) + max(exchange)

    Args:
        model: profile and cluster.
        batch_size: samples of a step.
        most: how many, best first.
        most_tensor: largest tensor-parallel degree.
        sizes: microbatch sizes to try; None: all that divide.

    Raises:
        PlanningError: nothing fits.
    """
    n = model.devices.count

    def shapes() -> Iterator[tuple[Degrees, int]]:
        for tensor in (t for t in divisors(n) if t <= most_tensor):
            for data in divisors(n // tensor):
                stages = n // tensor // data
                if stages > model.layers:
                    continue
                for size, microbatches in _microbatches(batch_size, data, sizes):
                    if microbatches >= stages:
                        yield Degrees(tensor, data, size, microbatches, True), stages

    def predicted(degrees: Degrees, times: StageTimes) -> float:
        compute = (times.forward + times.backward)[0].max()
        transfer = times.transfer[0].max(initial=0.0)
        stages = times.forward.shape[1]
        filled = (degrees.microbatches + stages - 1) * compute
        return float(filled + 2 * (stages - 1) * transfer + times.exchange[0].max())

    return _best(model, shapes(), predicted, most, schedule=DEFAULT_SCHEDULE, name="PTD-P")


def _microbatches(batch_size: int, data: int, sizes: Sequence[int] | None) -> list[tuple[int, int]]:
    if batch_size % data:
        return []
    share = batch_size // data
    return [(b, share // b) for b in divisors(share) if sizes is None or b in sizes]


def _best(
    model: CostModel,
    shapes: Iterator[tuple[Degrees, int]],
    predicted: Callable[[Degrees, StageTimes], float],
    most: int,
    *,
    schedule: str,
    name: str,
) -> tuple[Candidate, ...]:
    found: list[tuple[float, Degrees, int]] = []
    tried, least = 0, float("inf")
    for degrees, stages in shapes:
        tried += 1
        bounds = np.array([even_partition(model.layers, stages).bounds])
        gpus = model.stage_gpus(_in_order(degrees, stages))
        if model.fits(degrees, gpus, bounds, schedule)[0]:
            found.append((predicted(degrees, model.times(degrees, gpus, bounds)), degrees, stages))
        elif not found:
            cut = even_partition(model.layers, stages)
            taken = model.stage_bytes(degrees, stages, schedule).of_cut(cut)
            least = min(least, float(taken.max()))
    if not found:
        reason = (
            f"none of {tried} configurations fits the GPUs' memory; the least needs {least / 1e9:.4g} GB "
            "a GPU. To fix: use more GPUs or more memory"
            if tried
            else f"no degrees over {model.devices.count} GPUs divide the batch. To fix: another --batch-size"
        )
        raise PlanningError(f"{name}: {reason}")
    found.sort(key=lambda each: (each[0], each[1].tensor, each[2]))
    return tuple(
        Candidate(predicted_seconds=seconds, layout=_layout(model, degrees, stages))
        for seconds, degrees, stages in found[:most]
    )


def _in_order(degrees: Degrees, stages: int) -> tuple[Groups, ...]:
    t, d = degrees.tensor, degrees.data
    return tuple(
        tuple(tuple(range(t * (d * i + k), t * (d * i + k + 1))) for k in range(d)) for i in range(stages)
    )


def _layout(model: CostModel, degrees: Degrees, stages: int) -> Layout:
    bounds = even_partition(model.layers, stages).bounds
    return Layout(
        stages=tuple(
            PlacedStage(first_layer=bounds[i], end_layer=bounds[i + 1], groups=groups)
            for i, groups in enumerate(_in_order(degrees, stages))
        ),
        microbatch_size=degrees.microbatch_size,
        microbatches=degrees.microbatches * degrees.data,
        recompute=degrees.recompute,
    )
