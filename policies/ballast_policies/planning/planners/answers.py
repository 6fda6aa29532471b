"""Requests of planners and their answers: the same keys and table for every plan, by the one cost model."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ballast_policies.planning.pipeline_plan import PipelinePlan
from ballast_policies.planning.planners.cost_model import CostModel
from ballast_policies.planning.planners.layout import Layout
from ballast_policies.planning.planners.runnable import trainer_fields
from ballast_policies.planning.profile import GpuKind, LayerProfile
from ballast_policies.planning.schedules.exports import timeline
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Input of a planner.

    Attributes:
        profile: the layers, of one microbatch.
        gpus: all of them are used, fastest first.
        bandwidth: bytes/s between neighbouring ranks; None: transfers are free.
        microbatches: of a step.
        samples: of a step.
        schedule, chunks: the pipeline's schedule, and its stages a rank where it leaves them open.
        evaluations, seed: of a search.
        top: how many plans; None: as many as the planner shows.
        most_tensor: largest tensor-parallel degree.
        model: the one cost model, for this profile and cluster.
    """

    profile: LayerProfile
    gpus: tuple[GpuKind, ...]
    model: CostModel
    bandwidth: float | None = None
    microbatches: int = 8
    samples: int = 8
    schedule: str = "1F1B"
    chunks: int = 1
    evaluations: int = 200
    seed: int = 0
    top: int | None = None
    most_tensor: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannerAnswer:
    """A plan for programs and for people.

    Attributes:
        content: keys of the JSON object.
        text: a table, and what it predicts.
        plan: the simulated pipeline, of planners that simulate one.
        picture: draws the step of the first plan, stages x time as text. Raises PlanningError where it has
            too many microbatches.
    """

    content: Mapping[str, Any]
    text: str
    plan: PipelinePlan | None = None
    picture: Callable[[], str] = str


@dataclasses.dataclass(frozen=True, slots=True)
class FoundPlan:
    """A layout of a planner.

    Attributes:
        layout: the plan.
        schedule: that it is planned for.
        predicted_seconds: of a step by the planner's own formula, where it has one.
    """

    layout: Layout
    schedule: str = DEFAULT_SCHEDULE
    predicted_seconds: float | None = None


def plan_content(model: CostModel, plan: FoundPlan) -> dict[str, Any]:
    """One plan as JSON, as ``model`` judges it."""
    layout, schedule = plan.layout, plan.schedule
    cost = model.judge(layout, schedule)
    job = trainer_fields(layout, model.devices, schedule, zero_stage=model.zero_stage)
    return {
        "stepSeconds": cost.seconds,
        "samplesPerSecond": layout.batch_size / cost.seconds if cost.seconds else None,
        "predictedSeconds": plan.predicted_seconds,
        "pipeline": layout.pipeline,
        "tensor": layout.tensor,
        "data": layout.data,
        "gpus": sum(len(stage.gpus) for stage in layout.stages),
        "microbatchSize": layout.microbatch_size,
        "microbatches": layout.microbatches,
        "recompute": layout.recompute > 0,
        "recomputeEvery": max(1, layout.recompute),
        "schedule": schedule,
        "fits": cost.fits,
        "stages": [
            {
                "stage": index,
                "firstLayer": stage.first_layer,
                "endLayer": stage.end_layer,
                "replicas": stage.replicas,
                "gpus": [list(group) for group in stage.groups],
                "gpuTypes": sorted({model.devices.types[gpu] for gpu in stage.gpus}),
                "bytes": held,
            }
            for index, (stage, held) in enumerate(zip(layout.stages, cost.bytes, strict=True))
        ],
        "job": job.fields,
        "refused": job.refused,
    }


def _stage_table(model: CostModel, plan: Mapping[str, Any]) -> list[str]:
    """A row a stage: layers, GPUs, replicas, bytes."""
    lines = [f"{'stage':>5} {'layers':>9} {'replicas':>8} {'tensor':>6} {'GB':>8}  GPUs"]
    for stage in plan["stages"]:
        types: dict[str, list[int]] = {}
        for gpu in itertools.chain.from_iterable(stage["gpus"]):
            types.setdefault(model.devices.types[gpu], []).append(gpu)
        names = "; ".join(f"{gpu_type} {_ranges(gpus)}" for gpu_type, gpus in sorted(types.items()))
        lines.append(
            f"{stage['stage']:>5} {stage['firstLayer']:>4}-{stage['endLayer'] - 1:<4} {stage['replicas']:>8} "
            f"{plan['tensor']:>6} {stage['bytes'] / 1e9:>8.3g}  {names}"
        )
    return lines


def plans_table(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row a plan; of plans with a ``trial``, what was measured beside what was predicted."""
    tried = any("trial" in plan for plan in plans)
    lines = [
        f"{'s/step':>10} {'measured ' if tried else ''}{'pipeline':>8} {'tensor':>6} {'data':>5} {'GPUs':>5} "
        f"{'microbatches':>16} {'recompute':>9}  layers"
    ]
    for plan in plans:
        bounds = " ".join(str(stage["endLayer"]) for stage in plan["stages"])
        data = "x" if plan["data"] is None else plan["data"]
        size = f"{plan['microbatches']} of {plan['microbatchSize']}"
        seconds = plan.get("trial", {}).get("measuredSeconds")
        measured = "-" if seconds is None else f"{seconds:.4g}"
        lines.append(
            f"{plan['stepSeconds']:>10.4g} {f'{measured:>8} ' if tried else ''}"
            f"{plan['pipeline']:>8} {plan['tensor']:>6} {data:>5} "
            f"{plan['gpus']:>5} {size:>16} {_recomputed(plan):>9}  0 {bounds}"
        )
    return lines


def _recomputed(plan: Mapping[str, Any]) -> str:
    every = plan["recomputeEvery"]
    return ("yes" if every == 1 else f"1 of {every}") if plan["recompute"] else "no"


def picture(model: CostModel, layout: Layout) -> str:
    """The layout's step, stages x time; of pipelines alike, one."""
    drawn = timeline(model.trace(layout))
    if layout.data is None:
        return drawn
    return "\n".join(line.replace("rank", "stage", 1) for line in drawn.splitlines())


def layouts_answer(
    model: CostModel,
    plans: Sequence[FoundPlan],
    *,
    keys: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> PlannerAnswer:
    """The answer of a planner whose plans are layouts.

    ``plans``: best first; ``keys``: further ones of the JSON object; ``notes``: lines below the table.
    """
    contents = [plan_content(model, plan) for plan in plans]
    best, layout = contents[0], plans[0].layout
    lines = _stage_table(model, best)
    size = f"{best['microbatches']} microbatches of {best['microbatchSize']}"
    lines += [
        "",
        f"{best['stepSeconds']:.4g} s a step of {layout.batch_size} samples with a flush (simulated): {size}"
        + (f", recomputed: {_recomputed(best)}" if layout.recompute else ""),
    ]
    if best["predictedSeconds"] is not None:
        lines.append(f"{best['predictedSeconds']:.4g} s by the planner's own formula")
    lines += notes
    if best["refused"] is not None:
        lines.append(f"The trainer refuses this plan: {best['refused']}")
    if not best["fits"]:
        lines.append("Its stages do not fit the GPUs' memory.")
    if len(contents) > 1:
        lines += ["", *plans_table(contents)]
    return PlannerAnswer(
        content={"stepSeconds": best["stepSeconds"], **(keys or {}), "plans": contents},
        text="\n".join(lines),
        picture=lambda: picture(model, layout),
    )


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3 8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
