"""The TrainingJob's fields that run a plan, or why the trainer refuses it: by the contract's own rules."""

import dataclasses
from typing import Any

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.job import JobConfig
from ballast_policies.planning.planners.layout import Layout
from ballast_policies.planning.planners.plan_memory import replicas_by_stage
from ballast_policies.planning.schedules import DEFAULT_SCHEDULE, SCHEDULES, ScheduleError, build_schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFields:
    """Fields of a TrainingJob that run a plan.

    Attributes:
        fields: ``pipeline``, ``parallelism`` and ``training``, as far as the plan sets them.
        refused: why the trainer does not run it; None: it does.
    """

    fields: dict[str, Any]
    refused: str | None


def trainer_fields(
    layout: Layout, schedule: str = DEFAULT_SCHEDULE, *, ranks: int | None = None, chunks: int | None = None
) -> TrainerFields:
    """The fields of a layout under a schedule.

    Args:
        layout: the plan.
        schedule: a name of :data:`SCHEDULES`.
        ranks: of the pipeline, where ranks have several stages; None: one for each stage.
        chunks: stages a rank, where the schedule leaves it open.
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
    if layout.recompute:
        fields["training"] = {"recompute": True}
    return TrainerFields(fields=fields, refused=_refusal(layout, fields, schedule, count, chunks, data))


def _refusal(
    layout: Layout, fields: dict[str, Any], schedule: str, ranks: int, chunks: int | None, data: int
) -> str | None:
    kind = SCHEDULES.find(schedule, ScheduleError)
    if not kind.trained:
        return f"schedule {schedule} is simulated only"
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
