"""A job's pass: from a view to a result, without side effects."""

import dataclasses
import math

from ballast_policies.protocol.cause import Cause
from ballast_policies.scheduling.assignments import Action

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.errors import NameTaken, NotAllowed, OperatorError, ServerInternalError
from ballast_operator.settings import JobSettings
from ballast_operator.steps.accounting import (
    account_suspension,
    limits_reached,
    seconds_to_next_limit,
    with_cost_for_budget,
    with_cost_of_last_team,
    with_ended_pods,
    with_sharer,
    with_team,
)
from ballast_operator.steps.context import (
    DeletePod,
    ReconcileContext,
    StepResult,
    Surroundings,
    apply_allocator_conditions,
    with_status,
)
from ballast_operator.steps.growing import give_up_growth
from ballast_operator.steps.messages import with_refused_messages
from ballast_operator.steps.running import with_saved_step
from ballast_operator.steps.shrinking import with_leaving_nodes
from ballast_operator.steps.stopping import begin_termination
from ballast_operator.steps.take_step import take_step
from ballast_operator.views.assignment import Assignment
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView

LACKS_RIGHT_SECONDS = 10.0
"""Pause before a request that the operator has no right to is tried again."""


def decide(
    view: JobView,
    *,
    assignment: Assignment | None,
    around: Surroundings,
    now: Time,
    settings: JobSettings,
) -> StepResult:
    """The result of a pass over a job now.

    Args:
        view: the job and all that belongs to it.
        assignment: what the allocator wants; None: it has not decided yet.
        around: the nodes, pools and other jobs that matter to it.
        now: the present.
        settings: deadlines.
    """
    if view.deleting:
        return StepResult(status=view.status, actions=_last_deletions(view))
    view = dataclasses.replace(view, status=view.status.replace(observed_generation=view.generation))
    if view.spec is None:
        return StepResult(status=_misconfigured(view, now))
    if view.blocked is not None and view.status.allocation is None:
        assignment = Assignment(
            action=Action.RELEASE,
            launches=view.status.launches,
            reason=view.blocked.reason,
            why=view.blocked.message,
        )
    context = ReconcileContext(
        view=view,
        spec=view.spec,
        assignment=assignment,
        around=around,
        now=now,
        settings=settings,
    )
    before = view.status
    if not view.status.finished:
        context = with_status(context, with_cost_of_last_team(context))
        context = with_status(context, with_cost_for_budget(context))
        status = apply_allocator_conditions(context, limits_reached(context))
        status = account_suspension(context, status)
        status = with_leaving_nodes(context, with_refused_messages(context, status))
        status = with_saved_step(context, with_ended_pods(context, status))
        context = with_status(context, status)
    result = take_step(context)
    status = with_team(context, with_sharer(context, before, result.status))
    result = dataclasses.replace(result, status=status)
    again, limit = result.requeue_after_seconds, seconds_to_next_limit(context)
    if math.isinf(limit):
        return result
    return dataclasses.replace(result, requeue_after_seconds=limit if again is None else min(again, limit))


def _misconfigured(view: JobView, now: Time) -> TrainingJobStatus:
    return view.status.with_condition(
        JobCondition.ADMITTED,
        False,
        JobReason.MISCONFIGURED,
        view.spec_problem,
        now=now,
        generation=view.generation,
    )


def refused(view: JobView, error: OperatorError, *, now: Time, settings: JobSettings) -> StepResult | None:
    """An object of the job cannot be made: the launch ends, and its GPUs are free; None: there is no launch.

    What is wrong with the job itself counts toward ``backoffLimit``, so that it is not tried without end.
    What the cluster does not allow now, or an object of somebody else in the way, is tried again after
    pauses that double, and does not count.
    """
    allocation = view.status.allocation
    if view.spec is None or allocation is None or allocation.ending is not None:
        return None
    context = ReconcileContext(view=view, spec=view.spec, assignment=None, now=now, settings=settings)
    plan = view.launched_plan
    if allocation.joining and plan is not None and plan.rank_of(allocation.joining[0]) is None:
        return give_up_growth(context, str(error))
    match error:
        case NameTaken():
            return begin_termination(context, Cause.NAME_TAKEN, str(error))
        case NotAllowed() | ServerInternalError():
            return begin_termination(
                context, Cause.NOT_ALLOWED, f"the cluster does not allow it now: {error}"
            )
    return begin_termination(
        context, Cause.USER_ERROR, f"the API server refused an object of the job: {error}"
    )


def rbac_forbidden(view: JobView, message: str, *, now: Time) -> StepResult:
    """The operator's account may not do what the job needs: it waits, and ``backoffLimit`` is not touched.

    Nothing of what was decided is written; the same is decided and tried again.
    """
    allocation, status = view.status.allocation, view.status
    if allocation is not None and not status.is_true(JobCondition.RUNNING):
        status = status.with_condition(
            JobCondition.RUNNING,
            False,
            JobReason.PODS_STARTING,
            f"the operator lacks a right: {message}. To fix: grant it the rules of the chart's ClusterRole",
            now=now,
            generation=view.generation,
        )
    return StepResult(status=status, requeue_after_seconds=LACKS_RIGHT_SECONDS)


def _last_deletions(view: JobView) -> tuple[DeletePod, ...]:
    """Pods of a job that is being deleted, so that their GPUs do not wait for a finalizer of somebody else.

    What the job owns beside them is the garbage collector's, and so are pods that the deletion is to leave.
    """
    if view.orphans:
        return ()
    return tuple(DeletePod(pod.name, pod.uid) for pod in view.pods if pod.alive and not pod.leaving)
