"""PipeDream, 2BW, PTD-P and AMP, from a request to an answer.

2BW's and PTD-P's, over any profile, give parallel pipelines of stages with as many layers each. Both were
made for models of equal blocks on equal GPUs (dissertation 3.3 and 4.3): stages have the same number of
layers, up to one, and GPUs are taken in the cluster's order, tensor-parallel groups together, then replicas
of a stage, then stages. With different layers or GPUs the slowest stage counts, in the terms of
:mod:`cost_model`.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from ballast_policies.planning.partition import PlanningError, even_partition
from ballast_policies.planning.planners.amp import Grid, search
from ballast_policies.planning.planners.answers import FoundPlan, PlannerAnswer, PlanRequest, layouts_answer
from ballast_policies.planning.planners.best.placements import divisors
from ballast_policies.planning.planners.cost_model import CostModel, Degrees, StageTimes
from ballast_policies.planning.planners.layout import Groups, Layout
from ballast_policies.planning.planners.pipedream import DeviceMemory, Level, PipeDreamPlan, plan_pipedream
from ballast_policies.planning.planners.runnable import trainer_fields
from ballast_policies.planning.schedules.builders.synchronous import in_flight
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE


def two_versions_candidates(model: CostModel, *, batch_size: int, most: int) -> tuple[FoundPlan, ...]:
    """PipeDream-2BW: d pipelines of p stages, d p <= N, microbatch size, recomputation (algorithm 1).

    A microbatch passes every t = max over stages of max(compute + what arrives, exchange / m) seconds; two
    versions of the weights are held, and m >= p microbatches a pipeline and update are needed.

    ``batch_size``: samples of an update; ``most``: how many, best first.

    Raises:
        PlanningError: nothing fits.
    """

    def shapes() -> Iterator[tuple[Degrees, int]]:
        for data in range(1, model.devices.count + 1):
            for size, microbatches in _microbatches(batch_size, data):
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
) -> tuple[FoundPlan, ...]:
    """PTD-P: p t d = N and the microbatch size, with recomputation; equation 4.1 and the transfers.

    (m + p - 1) max(forward + backward) + 2 (p - 1) max(transfer) + max(exchange)

    ``batch_size``: samples of a step; ``most``: how many, best first.

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
                for size, microbatches in _microbatches(batch_size, data):
                    if microbatches >= stages:
                        yield Degrees(tensor, data, size, microbatches, True), stages

    def predicted(degrees: Degrees, times: StageTimes) -> float:
        compute = (times.forward + times.backward)[0].max()
        transfer = times.transfer[0].max(initial=0.0)
        stages = times.forward.shape[1]
        filled = (degrees.microbatches + stages - 1) * compute
        return float(filled + 2 * (stages - 1) * transfer + times.exchange[0].max())

    return _best(model, shapes(), predicted, most, schedule=DEFAULT_SCHEDULE, name="PTD-P")


def _microbatches(batch_size: int, data: int) -> list[tuple[int, int]]:
    share = batch_size // data
    return [] if batch_size % data else [(b, share // b) for b in divisors(share)]


def _best(
    model: CostModel,
    shapes: Iterator[tuple[Degrees, int]],
    predicted: Callable[[Degrees, StageTimes], float],
    most: int,
    *,
    schedule: str,
    name: str,
) -> tuple[FoundPlan, ...]:
    found: list[tuple[float, Degrees, int]] = []
    tried, least = 0, float("inf")
    for degrees, stages in shapes:
        bounds = np.array([even_partition(model.layers, stages).bounds])
        gpus = model.stage_gpus(_in_order(degrees, stages))
        if not model.profiled(degrees, gpus.types):
            continue
        tried += 1
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
            else model.no_degrees
        )
        raise PlanningError(f"{name}: {reason}")
    found.sort(key=lambda each: (each[0], each[1].tensor, each[2]))
    return tuple(
        FoundPlan(
            degrees.layout(even_partition(model.layers, stages).bounds, _in_order(degrees, stages)),
            schedule,
            seconds,
        )
        for seconds, degrees, stages in found[:most]
    )


def _in_order(degrees: Degrees, stages: int) -> tuple[Groups, ...]:
    t, d = degrees.tensor, degrees.data
    return tuple(
        tuple(tuple(range(t * (d * i + k), t * (d * i + k + 1))) for k in range(d)) for i in range(stages)
    )


def pipedream(request: PlanRequest) -> PlannerAnswer:
    """``--planner pipedream``."""
    request.model.check_layers_fit()
    found = _pipedream(request)
    layout = Layout(found.stages, request.model.profiled_size, request.microbatches)
    active = in_flight([stage.replicas for stage in found.stages], 0)
    notes = [
        f"{found.configuration}: {found.seconds_per_microbatch:.4g} s a microbatch (predicted, without a "
        f"flush), {active} in flight for each replica of the input stage",
        *_equal_note(request),
    ]
    return layouts_answer(
        request.model,
        [FoundPlan(layout, "PipeDream", found.seconds_per_microbatch * request.microbatches)],
        keys={
            "configuration": found.configuration,
            "secondsPerMicrobatch": found.seconds_per_microbatch,
            "activeMinibatches": active,
            "stages": [
                {"firstLayer": stage.first_layer, "endLayer": stage.end_layer, "replicas": stage.replicas}
                for stage in found.stages
            ],
        },
        notes=notes,
    )


def _pipedream(request: PlanRequest) -> PipeDreamPlan:
    devices, profile = request.model.devices, request.profile
    per_server, servers = devices.full_servers
    gpus = per_server * servers
    speed, memory = min(devices.speeds[:gpus]), min(devices.memory[:gpus])
    seconds = zip(profile.forward_seconds, profile.backward_seconds, strict=True)
    return plan_pipedream(
        [(forward + backward) / speed for forward, backward in seconds],
        profile.weight_bytes,
        profile.output_bytes,
        [
            Level(components=per_server, bandwidth=devices.inside),
            Level(components=servers, bandwidth=devices.between),
        ],
        memory=None if np.isinf(memory) else DeviceMemory(limit=memory, layers=profile.sums),
    )


def pipedream_layout(request: PlanRequest) -> Layout | None:
    """PipeDream's plan on the cluster's GPUs; None where there is none."""
    if request.model.measured is not None:
        return None
    try:
        return Layout(_pipedream(request).stages, request.model.profiled_size, request.microbatches)
    except PlanningError:
        return None


def two_versions_layout(request: PlanRequest) -> Layout | None:
    """2BW's plan on the cluster's GPUs; None where there is none."""
    try:
        return two_versions_candidates(request.model, batch_size=request.samples, most=1)[0].layout
    except PlanningError:
        return None


def _equal_note(request: PlanRequest) -> list[str]:
    devices = request.model.devices
    if len(set(zip(devices.speeds, devices.memory, strict=True))) == 1:
        return []
    return ["It plans for equal GPUs: all are taken for the slowest, with the least memory."]


def two_versions(request: PlanRequest) -> PlannerAnswer:
    """``--planner 2bw``."""
    request.model.check_layers_fit(smallest=1)
    found = two_versions_candidates(request.model, batch_size=request.samples, most=request.top or 1)
    return layouts_answer(
        request.model,
        found,
        keys={"batchSize": request.samples},
        notes=["Two versions of the weights, no flush."],
    )


def megatron(request: PlanRequest) -> PlannerAnswer:
    """``--planner megatron``."""
    most = min(request.most_tensor, request.model.devices.count)
    request.model.check_layers_fit(most_tensor=most, smallest=1)
    found = megatron_candidates(
        request.model,
        batch_size=request.samples,
        most=request.top or 1,
        most_tensor=request.most_tensor,
    )
    return layouts_answer(
        request.model,
        found,
        keys={"batchSize": request.samples},
    )


def amp(request: PlanRequest) -> PlannerAnswer:
    """``--planner amp``."""
    most = min(request.most_tensor, request.model.devices.count)
    request.model.check_layers_fit(most_tensor=most, smallest=1)
    grid = Grid(request.model)
    found = search(
        grid,
        batch_size=request.samples,
        evaluations=request.evaluations,
        seed=request.seed,
        most_tensor=request.most_tensor,
    )

    def runs(plan: tuple[float, Layout]) -> bool:
        job = trainer_fields(plan[1], request.model.devices, zero_stage=request.model.zero_stage)
        return job.refused is None

    most = request.top or 5
    first = list(itertools.islice(filter(runs, found.plans), most))
    plans = [*first, *(plan for plan in found.plans if plan not in first)][:most]
    return layouts_answer(
        request.model,
        [FoundPlan(layout, predicted_seconds=seconds) for seconds, layout in plans],
        keys={
            "batchSize": request.samples,
            "evaluations": found.evaluations,
            "strategies": [
                {
                    "stepSeconds": seconds,
                    "tensor": layout.tensor,
                    "data": layout.data,
                    "pipeline": layout.pipeline,
                    "microbatchSize": layout.microbatch_size,
                    "layers": list(layout.bounds),
                    "placement": grid.placement(layout),
                }
                for seconds, layout in plans
            ],
        },
        notes=[f"Best of {found.evaluations} strategies by AMP's cost model."],
    )
