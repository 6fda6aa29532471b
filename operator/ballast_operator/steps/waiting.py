"""A job without GPUs: wait with a reason, or write the next launch into the status."""

from ballast_policies.contract import pod_name
from ballast_policies.rounds import Placement

from ballast_operator.api.cause import Cause
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import Decision, JobAllocation, TrainingJobStatus
from ballast_operator.steps.context import (
    DeletePod,
    ReconcileContext,
    StepResult,
    seconds_since,
    with_condition,
)
from ballast_operator.views.assignment import Assignment, AssignmentAction
from ballast_operator.views.clock import show

ENDED_REASONS = frozenset(Cause) - {Cause.COMPLETED}
"""Reasons of Running that say why the last launch ended."""


def wait_or_launch(context: ReconcileContext) -> StepResult:
    """One pass of a job without a gang.

    The launch is only written into the status here (``status.allocation``): the pods follow in the next
    pass, so that a crash at any point finds either nothing or the intent.
    """
    view, status, assignment = context.view, context.view.status, context.assignment
    if view.alive:
        return StepResult(
            status=_not_admitted(
                context,
                status,
                JobReason.WAITING_FOR_RELEASED_PODS,
                f"pods of an earlier launch are not gone yet: {', '.join(pod.name for pod in view.alive)}",
            ),
            actions=tuple(DeletePod(pod.name, pod.uid) for pod in view.alive if not pod.leaving),
            requeue_after_seconds=5.0,
        )
    if context.spec.suspend:
        return StepResult(status=_not_admitted(context, status, JobReason.SUSPENDED, "spec.suspend is set"))
    if status.next_launch_at is not None and status.next_launch_at > context.now:
        pause = -seconds_since(context, status.next_launch_at)
        return StepResult(
            status=_not_admitted(
                context,
                status,
                JobReason.BACKING_OFF,
                f"failed {status.counted_restarts} of at most {context.spec.backoff_limit + 1} times; "
                f"the next launch is not before {show(status.next_launch_at)}",
            ),
            requeue_after_seconds=pause,
        )
    if (
        assignment is None
        or assignment.launches != status.launches
        or assignment.action is AssignmentAction.KEEP
    ):
        if status.condition(JobCondition.ADMITTED) is None:
            text = "the allocator has not looked at the job yet"
            status = _not_admitted(context, status, JobReason.PENDING, text)
        return StepResult(status=status, allocate=True, requeue_after_seconds=5.0)
    status = decided(status, assignment)
    placement = assignment.placement
    if assignment.action is AssignmentAction.RELEASE or placement is None:
        return StepResult(status=_not_admitted(context, status, assignment.reason, assignment.why))
    if context.shortage:
        return StepResult(
            status=_not_admitted(
                context,
                status,
                JobReason.WAITING_FOR_RELEASED_PODS,
                f"{assignment.chosen}: {context.shortage}",
            ),
            requeue_after_seconds=5.0,
        )
    return StepResult(
        status=_launch(context, status, assignment, placement),
        requeue_after_seconds=0.0,
        metric_increments=(("launches", placement.pool, 1),),
    )


def decided(status: TrainingJobStatus, assignment: Assignment) -> TrainingJobStatus:
    """The status with ``lastDecision`` taken from the assignment."""
    placement, old = assignment.placement, status.last_decision
    decision = Decision(
        chosen=assignment.chosen[:1024],
        next_best=assignment.next_best[:1024],
        why=assignment.why[:1024],
        plan_id=assignment.plan_id,
        gpu_type=placement.gpu_type if placement is not None else "",
    )
    if old is not None and old.replace(plan_id=decision.plan_id) == decision:
        return status  # another round decided the same
    return status.replace(last_decision=decision)


def _launch(
    context: ReconcileContext, status: TrainingJobStatus, assignment: Assignment, placement: Placement
) -> TrainingJobStatus:
    launch = status.launches + 1
    pods = tuple(pod_name(context.view.name, launch, rank) for rank in range(len(placement.nodes)))
    allocation = JobAllocation(
        launch=launch,
        gpu_type=placement.gpu_type,
        pool=placement.pool,
        gpus=len(pods),
        pods=pods,
        nodes=placement.nodes,
        plan_id=assignment.plan_id,
        since=context.now,
    )
    status = status.replace(allocation=allocation, launches=launch, next_launch_at=None)
    admitted = assignment.why or assignment.chosen
    status = with_condition(context, status, JobCondition.ADMITTED, True, JobReason.ASSIGNED, admitted)
    return with_condition(
        context, status, JobCondition.RUNNING, False, JobReason.PODS_STARTING, f"0 of {len(pods)} pods run"
    )


def _not_admitted(
    context: ReconcileContext, status: TrainingJobStatus, reason: str, message: str
) -> TrainingJobStatus:
    status = with_condition(context, status, JobCondition.ADMITTED, False, reason, message)
    running = status.condition(JobCondition.RUNNING)
    if running is not None and not running.is_true and running.reason in ENDED_REASONS:
        return status  # why the last launch ended is worth more than "see Admitted"
    return with_condition(
        context, status, JobCondition.RUNNING, False, JobReason.NOT_ADMITTED, "see condition Admitted"
    )
