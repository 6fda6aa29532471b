"""PipeDream, 2BW, PTD-P and AMP, from a request to an answer."""

import numpy as np

from ballast_policies.planning.memory.stage_bytes import LayerSums
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.amp.annealing import search
from ballast_policies.planning.planners.amp.model import Strategy
from ballast_policies.planning.planners.answers import FoundPlan, PlannerAnswer, layouts_answer
from ballast_policies.planning.planners.equal_gpus import megatron_candidates, two_versions_candidates
from ballast_policies.planning.planners.layout import Layout, PlacedStage
from ballast_policies.planning.planners.pipedream import DeviceMemory, PipeDreamPlan, plan_pipedream
from ballast_policies.planning.planners.request import PlanRequest
from ballast_policies.planning.planners.runnable import trainer_fields
from ballast_policies.planning.schedules.bubbles import optimal_active_minibatches


def pipedream(request: PlanRequest) -> PlannerAnswer:
    """``--planner pipedream``."""
    request.model.check_layers_fit()
    found = _pipedream(request)
    layout = _replicated(request, found)
    gpus = sum(found_stage.replicas for found_stage in found.stages)
    active = optimal_active_minibatches(gpus, found.stages[0].replicas)
    notes = [
        f"{found.configuration}: {found.seconds_per_microbatch:.4g} s a microbatch (predicted, without a "
        f"flush), {active} in flight for each replica of the input stage",
        *_equal_note(request),
    ]
    answer = layouts_answer(
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
    return answer


def _pipedream(request: PlanRequest) -> PipeDreamPlan:
    devices, profile = request.model.devices, request.profile
    assert request.levels is not None
    gpus = int(np.prod([level.components for level in request.levels]))
    speed, memory = min(devices.speeds[:gpus]), min(devices.memory[:gpus])
    seconds = zip(profile.forward_seconds, profile.backward_seconds, strict=True)
    return plan_pipedream(
        [(forward + backward) / speed for forward, backward in seconds],
        profile.weight_bytes,
        profile.output_bytes,
        request.levels,
        memory=None if np.isinf(memory) else DeviceMemory(limit=memory, layers=LayerSums.of(profile.rows)),
    )


def pipedream_layout(request: PlanRequest) -> Layout | None:
    """PipeDream's plan on the cluster's GPUs; None where there is none."""
    if request.levels is None:
        return None
    try:
        return _replicated(request, _pipedream(request))
    except PlanningError:
        return None


def two_versions_layout(request: PlanRequest) -> Layout | None:
    """2BW's plan on the cluster's GPUs; None where there is none."""
    try:
        return two_versions_candidates(request.model, batch_size=request.samples, most=1)[0].layout
    except PlanningError:
        return None


def _replicated(request: PlanRequest, found: PipeDreamPlan) -> Layout:
    return Layout(
        stages=tuple(
            PlacedStage(
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                groups=tuple((gpu,) for gpu in stage.ranks),
            )
            for stage in found.stages
        ),
        microbatch_size=request.model.profiled_size,
        microbatches=request.microbatches,
    )


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
        [FoundPlan(each.layout, "PipeDream2BW", each.predicted_seconds) for each in found],
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
        [FoundPlan(each.layout, predicted_seconds=each.predicted_seconds) for each in found],
        keys={"batchSize": request.samples},
    )


def amp(request: PlanRequest) -> PlannerAnswer:
    """``--planner amp``."""
    most = min(request.most_tensor, request.model.devices.count)
    request.model.check_layers_fit(most_tensor=most, smallest=1)
    assert request.grid is not None
    grid = request.grid
    found = search(
        request.costs,
        grid,
        batch_size=request.samples,
        evaluations=request.evaluations,
        seed=request.seed,
        most_tensor=request.most_tensor,
    )

    def refused(plan: tuple[float, Strategy]) -> bool:
        return trainer_fields(_amp_layout(request, plan[1]), request.model.devices).refused is not None

    plans = sorted(found.plans, key=refused)[: request.top or 5]
    layouts = [
        FoundPlan(_amp_layout(request, strategy), predicted_seconds=seconds) for seconds, strategy in plans
    ]
    return layouts_answer(
        request.model,
        layouts,
        keys={
            "batchSize": request.samples,
            "evaluations": len(found.best_so_far),
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
                for seconds, strategy in plans
            ],
        },
        notes=[f"Best of {len(found.best_so_far)} strategies by AMP's cost model."],
    )


def _amp_layout(request: PlanRequest, strategy: Strategy) -> Layout:
    """Device row * columns + column of the grid is the row-th GPU of server ``column``."""
    assert request.grid is not None
    rows, columns = request.grid.rows, request.grid.columns
    bounds = strategy.partition.bounds
    return Layout(
        stages=tuple(
            PlacedStage(
                first_layer=bounds[index],
                end_layer=bounds[index + 1],
                groups=tuple(
                    tuple(device % columns * rows + device // columns for device in group) for group in stage
                ),
            )
            for index, stage in enumerate(strategy.placement)
        ),
        microbatch_size=strategy.microbatch_size,
        microbatches=request.samples // strategy.microbatch_size,
    )
