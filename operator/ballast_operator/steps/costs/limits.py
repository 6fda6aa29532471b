"""A job's budget and deadline as its pass sees them: reached or not, and when to look again."""

import math

from ballast_policies.accounting import cost

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.steps.context import ReconcileContext, with_condition
from ballast_operator.steps.costs.accounting import accrue_cost
from ballast_operator.steps.costs.data import data_cost_per_second
from ballast_operator.views.assignment import Advice
from ballast_operator.views.clock import show
from ballast_operator.views.hold import (
    active_seconds,
    budget_message,
    budget_spent,
    deadline_message,
    deadline_passed,
)


def with_cost_for_budget(context: ReconcileContext) -> TrainingJobStatus:
    """The status of a job with a budget, its cost brought up to now."""
    status = context.view.status
    return status if context.spec.budget is None else accrue_cost(context, status)


def limits_reached(context: ReconcileContext) -> tuple[Advice, ...]:
    """Conditions that the pass knows better than the last decision: what is reached, and what is no more."""
    spec, status = context.spec, context.view.status
    found = []
    kind = JobCondition.BUDGET_EXHAUSTED
    if budget_spent(spec, status):
        message = budget_message(spec)
        found.append(Advice(type=kind, value=True, reason=JobReason.BUDGET_SPENT, message=message))
    elif _is(status, kind, JobReason.BUDGET_SPENT):
        message = "spec.budget is above what the job has cost"
        found.append(Advice(type=kind, value=False, reason=JobReason.BUDGET_SUFFICIENT, message=message))
    kind = JobCondition.DEADLINE_AT_RISK
    if deadline_passed(spec, context.now):
        message = deadline_message(spec)
        found.append(Advice(type=kind, value=True, reason=JobReason.DEADLINE_PASSED, message=message))
    elif _is(status, kind, JobReason.DEADLINE_PASSED):
        message = "spec.deadline is in the future"
        found.append(Advice(type=kind, value=False, reason=JobReason.DEADLINE_WITHIN_REACH, message=message))
    return tuple(found)


def _is(status: TrainingJobStatus, kind: JobCondition, reason: JobReason) -> bool:
    condition = status.condition(kind)
    return condition is not None and condition.is_true and condition.reason == reason


def seconds_to_next_limit(context: ReconcileContext) -> float:
    """Until the budget is spent at the present price, a deadline passes, or it has run as long as it may."""
    spec, status, left = context.spec, context.view.status, math.inf
    allocation = status.allocation
    if status.finished:
        return left
    if spec.deadline is not None and not deadline_passed(spec, context.now):
        left = (spec.deadline - context.now).total_seconds()
    if spec.active_deadline_seconds is not None and allocation is not None:
        left = min(left, spec.active_deadline_seconds - active_seconds(status, context.now))
    if spec.budget is not None and allocation is not None and not budget_spent(spec, status):
        since = status.unpaid_since or context.now
        per_second = allocation.price_part * sum(
            cost(float(part.gpus), context.price_of(part.pool, since, context.now))
            for part in allocation.by_pool
        )
        per_second += data_cost_per_second(context)
        if per_second > 0:
            left = min(left, (spec.budget - status.cost_so_far) / per_second)
    return max(0.0, left)


def with_final_deadline(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status of a job that has succeeded, with what became of its deadline."""
    deadline = context.spec.deadline
    if deadline is None or deadline_passed(context.spec, context.now):
        return status
    message = f"the job was done before spec.deadline, {show(deadline)}"
    return with_condition(
        context, status, JobCondition.DEADLINE_AT_RISK, False, JobReason.DEADLINE_MET, message
    )
