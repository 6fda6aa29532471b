"""The TrainingJob's fields that run a plan, or why the trainer refuses it: by the contract's own rules."""

import dataclasses
from typing import Any

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.planning.planners.layout import Devices, Layout
from ballast_policies.planning.planners.plan_memory import replicas_by_stage
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES, build_schedule
from ballast_policies.planning.schedules.schedule import ScheduleError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFields:
    """Fields of a TrainingJob that run a plan.

    Attributes:
        fields: ``pipeline``, ``parallelism``, ``training`` and ``plan``, as far as the plan sets them; over
            several GPU types ``mixedPools`` as well.
        refused: why the trainer does not run it; None: it does.
    """

    fields: dict[str, Any]
    refused: str | None


def trainer_fields(
    layout: Layout,
    devices: Devices,
    schedule: str = DEFAULT_SCHEDULE,
    *,
    ranks: int | None = None,
    chunks: int | None = None,
    zero_stage: int = 0,
) -> TrainerFields:
    """The fields of a layout under a schedule.

    Args:
        layout: the plan.
        devices: the GPUs; each type is a pool.
        schedule: a name of :data:`SCHEDULES`.
        ranks: of the pipeline, where ranks have several stages; None: one for each stage.
        chunks: stages a rank, where the schedule leaves it open.
        zero_stage: what replicas of the pipeline share, where there are some.
    """
    count = layout.pipeline if ranks is None else ranks
    pipeline: dict[str, Any] = {
        "minStages": count,
        "maxStages": count,
        "microbatches": layout.microbatches,
        "globalBatchSize": layout.batch_size,
        "schedule": schedule,
    }
    if chunks is not None:
        pipeline["stagesPerRank"] = chunks
    data = 1 if replicas_by_stage(layout, schedule) else layout.data or 1
    if replicas_by_stage(layout, schedule):
        pipeline["replicas"] = list(layout.replicas)
    fields: dict[str, Any] = {
        "pipeline": pipeline,
        "parallelism": {"tensor": layout.tensor, "data": data},
    }
    if zero_stage and data > 1:
        fields["parallelism"]["zeroStage"] = zero_stage
    fields["training"] = {"recompute": layout.recompute > 0}
    if layout.recompute > 1:
        fields["training"]["recomputeEvery"] = layout.recompute
    # Of several stages a rank, the first ones are on each rank in turn.
    types = [devices.types[stage.gpus[0]] for stage in layout.stages[:count]]
    fields["plan"] = {
        "layers": [stage.end_layer - stage.first_layer for stage in layout.stages],
        "gpus": [{"gpuType": kind, "stages": types.count(kind)} for kind in dict.fromkeys(types)],
    }
    refused = None
    if not SCHEDULES.find(schedule, ScheduleError).trained:
        refused = f"schedule {schedule} is simulated only"
    elif len({devices.types[gpu] for stage in layout.stages for gpu in stage.gpus}) > 1:
        refused = _in_several_pools(layout, devices, schedule, one_each=count == layout.pipeline)
    refused = refused or _refusal(layout, fields, schedule, count, chunks, data)
    if len(set(types)) > 1:
        fields["mixedPools"] = "Allowed"
    return TrainerFields(fields=fields, refused=refused)


def _in_several_pools(layout: Layout, devices: Devices, schedule: str, *, one_each: bool) -> str | None:
    """Reason that no gang in several pools runs it: its ranks are in one pool after the other.

    ``one_each``: ranks have one stage each.
    """
    in_turn: list[str] = []
    for index, stage in enumerate(layout.stages):
        types = sorted({devices.types[gpu] for gpu in stage.gpus})
        if len(types) > 1:
            return (
                f"stage {index} has GPUs of {' and '.join(types)}: a gang has all GPUs of a stage in one pool"
            )
        in_turn += [gpu_type for gpu_type in types if in_turn[-1:] != [gpu_type]]
    if not one_each or replicas_by_stage(layout, schedule):
        return "a gang in several pools has one stage a rank, and as many ranks for each stage"
    if not SCHEDULES[schedule].closed_form:
        return (
            f"a gang in several pools has a schedule whose speed on mixed GPUs is predicted, not {schedule}"
        )
    if len(in_turn) > len(set(in_turn)):
        return f"its GPUs are {', '.join(in_turn)} in turn: a gang has those of a pool one after the other"
    return None


def _refusal(
    layout: Layout, fields: dict[str, Any], schedule: str, ranks: int, chunks: int | None, data: int
) -> str | None:
    kind = SCHEDULES.find(schedule, ScheduleError)
    job = {"totalSteps": 1, "model": {"name": "gpt", "layers": layout.bounds[-1]}, **fields}
    try:
        JobConfig.from_mapping(job)
        alike = "replicas" not in fields["pipeline"]
        microbatches = layout.microbatches // data
        unsuited = kind.unsuited(ranks, microbatches) if alike else None
        if unsuited is not None:
            return f"{schedule}: {unsuited}"
        build_schedule(
            schedule,
            ranks=ranks if alike else sum(layout.replicas),
            microbatches=microbatches,
            chunks=chunks or 1,
            replicas=() if alike else layout.replicas,
        )
    except (ContractError, ScheduleError) as error:
        return str(error)
    return None
