"""Causes for which a job must hold no GPUs: its owner, its budget, its deadlines; by values alone."""

import dataclasses

from ballast_operator.api.conditions import JobReason
from ballast_operator.api.costs import OnLimit
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.views.clock import Time, show
from ballast_operator.views.spec import JobSpec

ROUNDING = 1e-9
"""Relative error of a sum of costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class SuspendCause:
    """Why a job must hold no GPUs.

    Attributes:
        reason: of its condition Admitted, and of Failed.
        message: what is the case, and what to change.
        fails: it has failed for good once it holds nothing.
    """

    reason: JobReason
    message: str
    fails: bool = False


def hold(spec: JobSpec, status: TrainingJobStatus, now: Time) -> SuspendCause | None:
    """Why the job must hold no GPUs; None: it may."""
    if spec.suspend:
        return SuspendCause(JobReason.SUSPENDED, "spec.suspend is set")
    if spec.on_budget_exhausted is not OnLimit.CONTINUE and budget_spent(spec, status):
        fails = spec.on_budget_exhausted is OnLimit.FAIL
        return SuspendCause(JobReason.BUDGET_SPENT, budget_message(spec), fails)
    if spec.on_deadline_missed is not OnLimit.CONTINUE and deadline_passed(spec, now):
        fails = spec.on_deadline_missed is OnLimit.FAIL
        return SuspendCause(JobReason.DEADLINE_MISSED, deadline_message(spec), fails)
    limit = spec.active_deadline_seconds
    if limit is not None and active_seconds(status, now) >= limit * (1 - ROUNDING):
        message = f"the job has run for spec.activeDeadlineSeconds={limit}. To fix: ask for more in a new job"
        return SuspendCause(JobReason.ACTIVE_DEADLINE_EXCEEDED, message, fails=True)
    return None


def active_seconds(status: TrainingJobStatus, now: Time) -> float:
    """Seconds during which the job has held GPUs, up to ``now``."""
    since = status.unpaid_since
    return status.active_seconds + (0.0 if since is None else max(0.0, (now - since).total_seconds()))


def budget_spent(spec: JobSpec, status: TrainingJobStatus) -> bool:
    """Whether the cost that is summed up has reached the budget."""
    return spec.budget is not None and status.cost_so_far >= spec.budget * (1 - ROUNDING)


def deadline_passed(spec: JobSpec, now: Time) -> bool:
    """Whether there is a deadline, and it is over."""
    return spec.deadline is not None and now >= spec.deadline


def budget_message(spec: JobSpec) -> str:
    """That the budget is spent; unchanged while the cost of the last checkpoint is added."""
    assert spec.budget is not None
    what = f"the job has cost its budget of {spec.budget:.10g}"
    if spec.on_budget_exhausted is OnLimit.FAIL:
        return f"{what}, and spec.onBudgetExhausted is Fail"
    if spec.on_budget_exhausted is OnLimit.SUSPEND:
        return f"{what}. To fix: raise spec.budget, and it resumes from its checkpoint"
    return f"{what}, and continues, as spec.onBudgetExhausted is Continue"


def deadline_message(spec: JobSpec) -> str:
    """That the deadline has passed."""
    assert spec.deadline is not None
    what = f"spec.deadline, {show(spec.deadline)}, has passed before the job was done"
    if spec.on_deadline_missed is OnLimit.FAIL:
        return f"{what}, and spec.onDeadlineMissed is Fail"
    if spec.on_deadline_missed is OnLimit.SUSPEND:
        return f"{what}. To fix: set a later spec.deadline, and it resumes from its checkpoint"
    return f"{what}; the job continues"
