"""The table of planners: every name that ``ballast plan --planner`` takes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.pipeline_plan import PipelinePlan, plan_pipeline
from ballast_policies.planning.planners.amp import anneal
from ballast_policies.planning.planners.amp.model import DeviceGrid, LayerCost
from ballast_policies.planning.planners.pipedream import Level, plan_pipedream
from ballast_policies.planning.profile import GpuKind, LayerProfile
from ballast_policies.planning.schedules import optimal_active_minibatches, timeline
from ballast_policies.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a planner plans from.

    Attributes:
        profile: the layers, of one microbatch.
        costs: the layers, of one sample, for planners that choose the microbatch's size.
        gpus: all of them are used, fastest first.
        bandwidth: bytes/s between neighbouring ranks; None: transfers are free.
        levels: GPUs of a server, then servers; None: the cluster's links are not known.
        grid: the GPUs with a column a server; None: the cluster's links are not known.
        microbatches: of a step.
        samples: of a step.
        schedule, chunks: the pipeline's schedule, and its stages a rank where it leaves them open.
        evaluations, seed: of a search.
    """

    profile: LayerProfile
    costs: tuple[LayerCost, ...]
    gpus: tuple[GpuKind, ...]
    bandwidth: float | None = None
    levels: tuple[Level, ...] | None = None
    grid: DeviceGrid | None = None
    microbatches: int = 8
    samples: int = 8
    schedule: str = "1F1B"
    chunks: int = 1
    evaluations: int = 200
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannerAnswer:
    """A plan for programs and for people.

    Attributes:
        content: keys of the JSON object.
        text: a table, and what it predicts.
        plan: the simulated pipeline, of planners that simulate one.
    """

    content: Mapping[str, Any]
    text: str
    plan: PipelinePlan | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Everything that is known about a planner; the command line and the documentation read it here.

    Attributes:
        summary: what it plans, for the documentation.
        plan: raises PlanningError or ScheduleError where there is no plan.
        needs_links: it weighs transfers: the cluster has to say its bandwidth.
        simulates: its answer has a simulated pipeline, which can be drawn and exported.
    """

    summary: str
    plan: Callable[[PlanRequest], PlannerAnswer]
    needs_links: bool = False
    simulates: bool = False


def _pipeline(request: PlanRequest) -> PlannerAnswer:
    found = plan_pipeline(
        request.profile,
        request.gpus,
        microbatches=request.microbatches,
        schedule=request.schedule,
        chunks=request.chunks,
        bandwidth=request.bandwidth,
    )
    content = {
        "schedule": found.schedule.name,
        "microbatches": found.schedule.microbatches,
        "stepSeconds": found.step_seconds,
        "evenStepSeconds": found.even_step_seconds,
        "imbalance": found.imbalance,
        "bubble": {
            "idle": found.bubble.idle,
            "inherent": found.bubble.inherent,
            "dynamic": found.bubble.dynamic,
        },
        "inFlight": list(found.facts.in_flight),
        "weightVersions": list(found.facts.versions_held),
        "transfers": found.facts.transfers,
        "stages": [
            {
                "stage": stage.stage,
                "rank": stage.rank,
                "gpuType": stage.gpu_type,
                "firstLayer": stage.first_layer,
                "endLayer": stage.end_layer,
                "seconds": stage.seconds,
                "bytes": stage.bytes,
            }
            for stage in found.stages
        ],
    }
    lines = [f"{'stage':>5} {'rank':>4}  {'GPU':<10} {'layers':>9} {'s/step':>10} {'GB':>8}"]
    lines += [
        f"{stage.stage:>5} {stage.rank:>4}  {stage.gpu_type:<10} "
        f"{stage.first_layer:>4}-{stage.end_layer - 1:<4} {stage.seconds:>10.4g} {stage.bytes / 1e9:>8.3g}"
        for stage in found.stages
    ]
    gain = found.even_step_seconds / found.step_seconds
    lines += [
        "",
        f"{found.schedule.name}, {found.schedule.microbatches} microbatches: "
        f"{found.step_seconds:.4g} s a step (simulated), {gain:.2f} x the even split's speed",
        f"idle {found.bubble.idle:.1%}: {found.bubble.inherent:.1%} the schedule's own, "
        f"{found.bubble.dynamic:.1%} imbalance; at most {max(found.facts.in_flight)} microbatches in flight, "
        f"{max(found.facts.versions_held)} weight versions",
        "",
        timeline(found.trace),
    ]
    return PlannerAnswer(content=content, text="\n".join(lines), plan=found)


def _pipedream(request: PlanRequest) -> PlannerAnswer:
    speeds = {kind.speed for kind in request.gpus}
    if len(speeds) > 1:
        raise PlanningError(
            "pipedream plans equal GPUs. To fix: use --planner pipeline or amp for mixed ones"
        )
    assert request.levels is not None
    (speed,) = speeds
    profile = request.profile
    seconds = zip(profile.forward_seconds, profile.backward_seconds, strict=True)
    found = plan_pipedream(
        [(forward + backward) / speed for forward, backward in seconds],
        profile.weight_bytes,
        profile.output_bytes,
        request.levels,
    )
    gpus = sum(kind.count for kind in request.gpus)
    active = optimal_active_minibatches(gpus, found.stages[0].replicas)
    content = {
        "configuration": found.configuration,
        "secondsPerMicrobatch": found.seconds_per_microbatch,
        "activeMinibatches": active,
        "stages": [
            {"firstLayer": stage.first_layer, "endLayer": stage.end_layer, "replicas": stage.replicas}
            for stage in found.stages
        ],
    }
    lines = [f"{'layers':>9} {'replicas':>8}"]
    lines += [f"{s.first_layer:>4}-{s.end_layer - 1:<4} {s.replicas:>8}" for s in found.stages]
    lines.append(
        f"\n{found.configuration}: {found.seconds_per_microbatch:.4g} s a microbatch (predicted), "
        f"{active} in flight for each replica of the input stage"
    )
    return PlannerAnswer(content=content, text="\n".join(lines))


def _amp(request: PlanRequest) -> PlannerAnswer:
    assert request.grid is not None
    search = anneal(
        request.costs,
        request.grid,
        batch_size=request.samples,
        evaluations=request.evaluations,
        seed=request.seed,
    )
    best = search.plans[:5]
    content = {
        "batchSize": request.samples,
        "evaluations": len(search.best_so_far),
        "strategies": [
            {
                "stepSeconds": seconds,
                "tensor": strategy.tensor,
                "data": strategy.data,
                "pipeline": strategy.pipeline,
                "microbatchSize": strategy.microbatch_size,
                "layers": list(strategy.partition.bounds),
                "placement": strategy.placement,
            }
            for seconds, strategy in best
        ],
    }
    lines = [f"{'s/step':>10} {'tensor':>6} {'data':>5} {'pipeline':>8} {'microbatch':>10}  layers"]
    lines += [
        f"{seconds:>10.4g} {s.tensor:>6} {s.data:>5} {s.pipeline:>8} {s.microbatch_size:>10}  "
        f"{' '.join(map(str, s.partition.bounds))}"
        for seconds, s in best
    ]
    lines.append(f"\nBest of {len(search.best_so_far)} strategies, predicted by AMP's cost model.")
    return PlannerAnswer(content=content, text="\n".join(lines))


PLANNERS = Registry(
    "planner",
    group="ballast.planners",
    row_type=Planner,
    rows={
        "pipeline": Planner(summary="one rank a GPU", plan=_pipeline, simulates=True),
        "pipedream": Planner(summary="replicated stages", plan=_pipedream, needs_links=True),
        "amp": Planner(summary="tensor x data x pipeline", plan=_amp, needs_links=True),
    },
)

DEFAULT_PLANNER = next(iter(PLANNERS.builtin))
"""The planner where none is named."""
