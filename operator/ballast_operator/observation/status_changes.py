"""Changes of a job's status: which have to be written now, and who has to hear of them."""

from typing import Any

from ballast_operator.api.base import storable
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.views.clock import Time

PROGRESS_FIELDS = frozenset(
    {
        "progress",
        "cost_so_far",
        "cost_at",
        "pool_costs",
        "team_costs",
        "lost_steps",
        "lost_cost",
        "active_seconds",
        "gpu_time",
        "isolated",
    }
)
"""Fields of the status that change with every report, and may wait."""


def progress_alone(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """True if nothing differs but what changes with every report."""
    fields = TrainingJobStatus.model_fields.keys() - PROGRESS_FIELDS
    return all(getattr(old, field) == getattr(new, field) for field in fields)


def reconciled(status: TrainingJobStatus, now: Time, generation: int) -> TrainingJobStatus:
    """The status without the complaint of an earlier pass."""
    known = status.condition(JobCondition.RECONCILED)
    if known is None or known.is_true:
        return status
    message = "the last pass over the job succeeded"
    kind, reason = JobCondition.RECONCILED, JobReason.PASS_COMPLETED
    return status.with_condition(kind, True, reason, message, now=now, generation=generation)


def refused_since(status: TrainingJobStatus, generation: int) -> bool:
    """True if the API server has refused a status of this spec."""
    known = status.condition(JobCondition.RECONCILED)
    return (
        known is not None
        and known.reason == JobReason.STATUS_REFUSED
        and known.observed_generation == generation
    )


def asks_or_frees(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """True if a status is news to the allocator, which decides on more than what it has caused itself."""
    launched = old.allocation is None and new.allocation is not None
    return (
        (old.allocation != new.allocation and not launched)
        or old.finished != new.finished
        or old.is_true(JobCondition.RUNNING) != new.is_true(JobCondition.RUNNING)
        or len(old.repacks) != len(new.repacks)
    )


def least_status(
    old: TrainingJobStatus, new: TrainingJobStatus, why: str, now: Time, generation: int
) -> TrainingJobStatus:
    """Status written in place of ``new``, which the API server refuses for the reason ``why``.

    What the job's life hangs on is new, with plain texts; everything else is as it is stored.
    """
    allocation = new.allocation
    if allocation is not None and allocation.ending is not None:
        ending = allocation.ending
        allocation = allocation.replace(ending=ending.replace(message=plain(ending.message)))
    conditions = tuple(condition.replace(message=plain(condition.message)) for condition in new.conditions)
    kept = {field: getattr(new, field) for field in LIFE_FIELDS}
    least = old.replace(**kept, allocation=allocation, conditions=conditions)
    message = f"the API server refused the job's full status: {plain(why)}. To fix: report this message"
    kind, reason = JobCondition.RECONCILED, JobReason.STATUS_REFUSED
    return least.with_condition(kind, False, reason, message, now=now, generation=generation)


LIFE_FIELDS = (
    "observed_generation",
    "state",
    "launches",
    "restarts",
    "lost_steps",
    "suspended_since",
    "suspended_seconds",
    "next_launch_at",
    "finished_at",
    "gpu_left_at",
)
"""Fields that later passes decide on, beside the conditions and the allocation."""


def plain(text: str) -> str:
    """The text in at most 500 printable ASCII characters."""
    return "".join(character if " " <= character <= "~" else "?" for character in text[:500])


def status_content(status: TrainingJobStatus) -> dict[str, Any]:
    """The status as the API has it; until its first launch, without what is empty.

    Thousands of jobs may arrive and wait. Absent means empty, for every reader; what was
    there before goes, as the whole status is replaced.

    Raises:
        pydantic.ValidationError: a value is outside its schema; a bug of a step.
    """
    content: dict[str, Any] = storable(status.to_dict())
    TrainingJobStatus.model_validate(content)
    if status.launches:
        return content
    return {name: value for name, value in content.items() if value != _EMPTY.get(name)}


_EMPTY = TrainingJobStatus().to_dict()
