"""Ballast's own planners, ``best`` and ``pipeline``, from a request to an answer."""

from collections.abc import Iterable

from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.pipeline_plan import PipelinePlan, plan_pipeline
from ballast_policies.planning.planners.answers import PlannerAnswer, layouts_answer, plan_content
from ballast_policies.planning.planners.best import plan_best
from ballast_policies.planning.planners.layout import Layout, PlacedStage
from ballast_policies.planning.planners.published import pipedream_layout
from ballast_policies.planning.planners.request import PlanRequest
from ballast_policies.planning.planners.runnable import trainer_fields
from ballast_policies.planning.schedules import (
    DEFAULT_SCHEDULE,
    timeline,
)

_MOST_COMPARED = 64
"""GPUs up to which ``best`` also looks at PipeDream's plan, whose table grows with their square."""


def best(request: PlanRequest) -> PlannerAnswer:
    """``--planner best``."""
    if request.schedule != DEFAULT_SCHEDULE:
        raise PlanningError(
            f"best plans {DEFAULT_SCHEDULE}, not {request.schedule}. To fix: leave --schedule out, or use "
            "--planner pipeline"
        )
    model = request.model

    def others(limit: float) -> Iterable[Layout]:
        found = [_single_ranks(request)]
        if model.devices.count <= _MOST_COMPARED:
            found.append(pipedream_layout(request))
        for layout in found:
            if layout is not None and trainer_fields(layout).refused is None:
                yield layout

    found = plan_best(
        model,
        batch_size=request.samples,
        most_tensor=request.most_tensor,
        top=request.top or 1,
        others=others,
    )
    seconds = found.plans[0][0]
    if found.optimal:
        note = f"Optimal: none of {found.shapes} shapes has a faster plan."
    else:
        note = (
            f"No plan is faster than {found.bound:.4g} s: this one is within {seconds / found.bound - 1:.1%}."
        )
    return layouts_answer(
        model,
        [(None, layout) for _, layout in found.plans],
        keys={
            "batchSize": request.samples,
            "boundSeconds": found.bound,
            "optimal": found.optimal,
            "shapes": found.shapes,
        },
        notes=[note],
    )


def pipeline(request: PlanRequest) -> PlannerAnswer:
    """``--planner pipeline``."""
    request.model.check_layers_fit()
    found = plan_pipeline(
        request.profile,
        request.gpus,
        microbatches=request.microbatches,
        schedule=request.schedule,
        chunks=request.chunks,
        bandwidth=request.bandwidth,
    )
    layout = _pipeline_layout(request, found)
    chunks = request.chunks if found.schedule.stages > found.schedule.ranks else None
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
    job = trainer_fields(layout, request.schedule, ranks=found.schedule.ranks, chunks=chunks)
    content |= {"job": job.fields, "refused": job.refused, "plans": []}
    if found.schedule.stages == found.schedule.ranks and request.schedule == DEFAULT_SCHEDULE:
        content["plans"] = [plan_content(request.model, layout, predicted_seconds=found.step_seconds)]
    return PlannerAnswer(
        content=content, text=_pipeline_text(found, job.refused), plan=found, picture=timeline(found.trace)
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
    return Layout(
        stages=tuple(
            PlacedStage(
                first_layer=stage.first_layer, end_layer=stage.end_layer, groups=((gpus[stage.rank],),)
            )
            for stage in found.stages
        ),
        microbatch_size=request.model.profiled_size,
        microbatches=request.microbatches,
    )


def _single_ranks(request: PlanRequest) -> Layout | None:
    """The pipeline planner's layout, where it is small enough to be found at once."""
    gpus = request.model.devices.count
    if gpus * request.microbatches > 256 or gpus > request.profile.layers:
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
