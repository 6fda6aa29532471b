"""The table of planners: every name that ``ballast plan --planner`` takes."""

import dataclasses
from collections.abc import Callable, Iterator

from ballast_policies.contract.errors import camel
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.pipeline_plan import PipelinePlan, plan_pipeline
from ballast_policies.planning.planners import published
from ballast_policies.planning.planners.answers import (
    FoundPlan,
    PlannerAnswer,
    PlanRequest,
    layouts_answer,
    plan_content,
)
from ballast_policies.planning.planners.best.search import BestPlans, plan_best
from ballast_policies.planning.planners.layout import Layout
from ballast_policies.planning.planners.one_f_one_b import check_playable
from ballast_policies.planning.planners.published import pipedream_layout, two_versions_layout
from ballast_policies.planning.planners.runnable import trainer_fields
from ballast_policies.planning.schedules.exports import timeline
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES, stages_of
from ballast_policies.registry import Registry

_MOST_COMPARED = 64
"""GPUs up to which ``best`` also looks at PipeDream's and 2BW's plans: their search grows with the square."""
_ALIKE = 1e-9
"""Relative gain by which a plan without a flush has to be faster than one with a flush."""


def best(request: PlanRequest) -> PlannerAnswer:
    """``--planner best``."""
    if request.schedule != DEFAULT_SCHEDULE:
        raise PlanningError(
            f"best plans {DEFAULT_SCHEDULE}, not {request.schedule}. To fix: leave --schedule out, or use "
            "--planner pipeline"
        )
    model = request.model
    replicated = pipedream_layout(request) if model.devices.count <= _MOST_COMPARED else None

    def others() -> Iterator[Layout]:
        for layout in (_single_ranks(request), _without_idle(replicated)):
            if layout is None or (model.zero_stage and layout.data is None):
                continue
            if trainer_fields(layout, model.devices, zero_stage=model.zero_stage).refused is None:
                yield layout

    without_flush = _without_flush(request, replicated)
    try:
        found = plan_best(
            model,
            batch_size=request.samples,
            most_tensor=request.most_tensor,
            top=request.top or 1,
            others=others(),
        )
    except PlanningError:
        if not without_flush:
            raise
        found = None
    flushed = [] if found is None else [(each[0], FoundPlan(each[1])) for each in found.plans]
    plans = sorted(flushed + without_flush, key=lambda each: each[0])[: request.top or 1]
    bound, optimal = (0.0, False) if found is None else (found.bound, found.optimal)
    seconds, first = plans[0]
    optimal = optimal and first.schedule == DEFAULT_SCHEDULE and not _uneven(first.layout)
    return layouts_answer(
        model,
        [plan for _, plan in plans],
        keys={
            "batchSize": request.samples,
            "boundSeconds": min(bound, seconds),
            "optimal": optimal,
            "shapes": 0 if found is None else found.shapes,
        },
        notes=[_how_good(found, seconds, first)],
    )


def _how_good(found: BestPlans | None, seconds: float, first: FoundPlan) -> str:
    """A sentence about the first plan."""
    if found is None:
        return (
            f"No plan with a flush fits the GPUs' memory: this one is for {first.schedule}, which has none."
        )
    shapes = f"{found.shapes} shapes that the trainer runs"
    if first.schedule != DEFAULT_SCHEDULE:
        return (
            f"This plan is for {first.schedule}, which has no flush: the fastest plan with one, of {shapes}, "
            f"takes {found.plans[0][0]:.4g} s."
        )
    if _uneven(first.layout):
        faster = "faster" if found.optimal else f"faster than {found.bound:.4g} s"
        return f"PipeDream's layout with a flush; none of {shapes} with equal pipelines is {faster}."
    if found.optimal:
        return f"Optimal: none of {shapes} has a faster plan with a flush."
    within = seconds / found.bound - 1
    return f"None of {shapes} is faster than {found.bound:.4g} s: this plan is within {within:.1%}."


def _uneven(layout: Layout) -> bool:
    """True if its pipelines are not equal, so that none of the shapes has it."""
    return layout.data is None or layout.microbatches % layout.data > 0


def _without_flush(request: PlanRequest, replicated: Layout | None) -> list[tuple[float, FoundPlan]]:
    """Plans without a flush that fit and that the trainer runs: they hold no buffers of messages."""
    if request.model.devices.count > _MOST_COMPARED or request.model.zero_stage:
        return []
    found = []
    layouts = (("PipeDream", replicated), ("PipeDream2BW", two_versions_layout(request)))
    for schedule, layout in layouts:
        if layout is None or trainer_fields(layout, request.model.devices, schedule).refused is not None:
            continue
        cost = request.model.judge(layout, schedule)
        if cost.fits:
            found.append((cost.seconds * (1 + _ALIKE), FoundPlan(layout, schedule)))
    return found


def pipeline(request: PlanRequest) -> PlannerAnswer:
    """``--planner pipeline``."""
    request.model.check_layers_fit()
    ranks = sum(kind.count for kind in request.gpus)
    stages = stages_of(request.schedule, 1, request.chunks) if ranks > 1 else 1
    check_playable(ranks, request.microbatches, stages_per_rank=stages)
    found = plan_pipeline(
        request.profile,
        request.gpus,
        microbatches=request.microbatches,
        schedule=request.schedule,
        chunks=request.chunks,
        bandwidth=request.bandwidth,
    )
    layout = _pipeline_layout(request, found)
    stated = found.schedule.ranks > 1 and SCHEDULES[request.schedule].stages_per_rank is None
    content = {
        "schedule": found.schedule.name,
        "microbatches": found.schedule.microbatches,
        "stepSeconds": found.step_seconds,
        "evenStepSeconds": found.even_step_seconds,
        "imbalance": found.imbalance,
        "bubble": dataclasses.asdict(found.bubble),
        "inFlight": list(found.facts.in_flight),
        "weightVersions": list(found.facts.versions_held),
        "transfers": found.facts.transfers,
        "stages": [
            {camel(name): value for name, value in dataclasses.asdict(stage).items()}
            for stage in found.stages
        ],
    }
    job = trainer_fields(
        layout,
        request.model.devices,
        request.schedule,
        ranks=found.schedule.ranks,
        chunks=request.chunks if stated else None,
    )
    content |= {"job": job.fields, "refused": job.refused, "plans": []}
    if found.schedule.stages == found.schedule.ranks and request.schedule == DEFAULT_SCHEDULE:
        plan = FoundPlan(layout, predicted_seconds=found.step_seconds)
        content["plans"] = [plan_content(request.model, plan)]
    return PlannerAnswer(
        content=content,
        text=_pipeline_text(found, job.refused),
        plan=found,
        picture=lambda: timeline(found.trace),
    )


def _pipeline_text(found: PipelinePlan, refused: str | None) -> str:
    lines = [f"{'stage':>5} {'rank':>4}  {'GPU':<10} {'layers':>9} {'s/step':>10} {'GB':>8}"]
    lines += [
        f"{stage.stage:>5} {stage.rank:>4}  {stage.gpu_type:<10} "
        f"{stage.first_layer:>4}-{stage.end_layer - 1:<4} {stage.seconds:>10.4g} {stage.bytes / 1e9:>8.3g}"
        for stage in found.stages
    ]
    gain = found.even_step_seconds / found.step_seconds if found.step_seconds else 1.0
    lines += [
        "",
        f"{found.schedule.name}, {found.schedule.microbatches} microbatches: "
        f"{found.step_seconds:.4g} s a step (simulated), {gain:.2f} x the even split's speed",
        f"idle {found.bubble.idle:.1%}: {found.bubble.inherent:.1%} the schedule's own, "
        f"{found.bubble.dynamic:.1%} imbalance; at most {max(found.facts.in_flight)} microbatches in flight, "
        f"{max(found.facts.versions_held)} weight versions",
    ]
    if refused is not None:
        lines.append(f"The trainer refuses this plan: {refused}")
    return "\n".join([*lines, "", timeline(found.trace)])


def _pipeline_layout(request: PlanRequest, found: PipelinePlan) -> Layout:
    """The plan's ranks on GPUs of their types, in the cluster's order."""
    left: dict[str, list[int]] = {}
    for gpu, gpu_type in reversed(list(enumerate(request.model.devices.types))):
        left.setdefault(gpu_type, []).append(gpu)
    gpus = [left[gpu_type].pop() for gpu_type in found.gpu_types]
    return Layout.of(
        (0, *(stage.end_layer for stage in found.stages)),
        (((gpus[stage.rank],),) for stage in found.stages),
        microbatch_size=request.model.profiled_size,
        microbatches=request.microbatches,
    )


def _without_idle(layout: Layout | None) -> Layout | None:
    """The layout without the replicas that no microbatch of a step goes to."""
    if layout is None or max(layout.replicas) <= layout.microbatches:
        return layout
    used = [dataclasses.replace(stage, groups=stage.groups[: layout.microbatches]) for stage in layout.stages]
    return dataclasses.replace(layout, stages=tuple(used))


def _single_ranks(request: PlanRequest) -> Layout | None:
    """The pipeline planner's layout, where it is small enough to be found at once."""
    gpus = request.model.devices.count
    if gpus * request.microbatches > 256 or gpus > request.profile.layers or request.model.measured:
        return None
    try:
        return _pipeline_layout(
            request,
            plan_pipeline(
                request.profile, request.gpus, microbatches=request.microbatches, bandwidth=request.bandwidth
            ),
        )
    except PlanningError:
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Everything that is known about a planner; the command line and the documentation read it here.

    Attributes:
        summary: what it plans, for the documentation.
        plan: raises PlanningError or ScheduleError where there is no plan.
        simulates: its answer has a simulated pipeline, which can be drawn and exported.
        measured: it plans from layers that were measured by GPU type and tensor degree.
        shards: it plans replicas that share the optimizer's state, gradients or weights.
    """

    summary: str
    plan: Callable[[PlanRequest], PlannerAnswer]
    simulates: bool = False
    measured: bool = False
    shards: bool = False


PLANNERS = Registry(
    "planner",
    group="ballast.planners",
    row_type=Planner,
    rows={
        "pipeline": Planner(summary="one rank a GPU", plan=pipeline, simulates=True),
        "best": Planner(
            summary="all degrees, microbatches, recomputation, layers and order of GPUs, with a bound",
            plan=best,
            measured=True,
            shards=True,
        ),
        "pipedream": Planner(summary="replicated stages", plan=published.pipedream),
        "2bw": Planner(
            summary="parallel pipelines with two weight versions", plan=published.two_versions, measured=True
        ),
        "megatron": Planner(
            summary="PTD-P: tensor x data x pipeline of equal stages",
            plan=published.megatron,
            measured=True,
            shards=True,
        ),
        "amp": Planner(
            summary="tensor x data x pipeline on mixed GPUs and links", plan=published.amp, shards=True
        ),
    },
)

DEFAULT_PLANNER = next(iter(PLANNERS.builtin))
"""The planner where none is named."""

__all__ = ["DEFAULT_PLANNER", "PLANNERS", "PlanRequest", "Planner", "PlannerAnswer"]
