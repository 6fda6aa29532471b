"""A job without GPUs: wait with a reason, or write the next launch into the status."""

from collections.abc import Sequence

from ballast_policies.protocol.moves import Wait, WaitFor
from ballast_policies.protocol.observed import Cause, Deadline, Gang
from ballast_policies.rounds.values import Placement

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.job_allocation import AllocationPart, JobAllocation, SharedGpu
from ballast_operator.api.training_job_status import Decision, TrainingJobStatus
from ballast_operator.desired import access_objects, pod_group_name
from ballast_operator.steps.context import Apply, JobCounter, ReconcileContext, StepResult, with_condition
from ballast_operator.steps.observed import seconds_left
from ballast_operator.views.assignment import Assignment
from ballast_operator.views.clock import show

LOOK_AGAIN_SECONDS = 5.0
"""Until a job that waits for GPUs is looked at again, even if nothing is told."""

DECIDED_SOON_SECONDS = 10.0
"""Age up to which a new job's first status is left to the allocator's decision: one write for most jobs."""

ENDED_REASONS = frozenset(Cause) - {Cause.COMPLETED}
"""Reasons of Running that say why the last launch ended."""


def wait(context: ReconcileContext, waiting: Wait) -> StepResult:
    """A job without a gang waits; its condition Admitted says for what."""
    view, status, assignment = context.view, context.view.status, context.assignment
    match waiting.reason:
        case WaitFor.OLD_PODS:
            alive = ", ".join(pod.name for pod in view.alive)
            message = f"pods of an earlier launch are not gone yet: {alive}"
            status = _not_admitted(context, status, JobReason.WAITING_FOR_RELEASED_PODS, message)
            return StepResult(status=status, requeue_after_seconds=LOOK_AGAIN_SECONDS)
        case WaitFor.RESUME:
            hold = context.hold
            assert hold is not None
            return StepResult(status=_not_admitted(context, status, hold.reason, hold.message))
        case WaitFor.PAUSE:
            assert status.next_launch_at is not None
            reason, message = _why_it_pauses(context)
            message = f"{message}; the next launch is not before {show(status.next_launch_at)}"
            status = _not_admitted(context, status, reason, message)
            return StepResult(status=status, requeue_after_seconds=seconds_left(context, Deadline.PAUSE))
        case WaitFor.GPUS if assignment is not None:
            status = decided(status, assignment)
            return StepResult(status=_not_admitted(context, status, assignment.reason, assignment.why))
        case WaitFor.FREE_GPUS if assignment is not None:
            message = f"{assignment.chosen}: {context.around.shortage}"
            status = decided(status, assignment)
            status = _not_admitted(context, status, JobReason.WAITING_FOR_RELEASED_PODS, message)
            return StepResult(status=status, requeue_after_seconds=LOOK_AGAIN_SECONDS)
    if status.condition(JobCondition.ADMITTED) is None:
        soon = _decided_soon(context)
        if soon > 0:
            return StepResult(status=status, allocate=True, write_later=True, requeue_after_seconds=soon)
        text = "the allocator has not looked at the job yet"
        status = _not_admitted(context, status, JobReason.PENDING, text)
    return StepResult(status=status, allocate=True, requeue_after_seconds=LOOK_AGAIN_SECONDS)


def _decided_soon(context: ReconcileContext) -> float:
    """Seconds that are left to the allocator before a new job is told that there is no decision yet."""
    if context.view.created is None:
        return 0.0
    age = (context.now - context.view.created).total_seconds()
    return DECIDED_SOON_SECONDS - age if age >= 0 else 0.0  # clocks differ: better told too early


def _why_it_pauses(context: ReconcileContext) -> tuple[JobReason, str]:
    """(reason, message) of the pause between an early end and the next launch."""
    status = context.view.status
    running = status.condition(JobCondition.RUNNING)
    if running is not None and running.reason in (JobReason.NOT_ALLOWED, JobReason.NAME_TAKEN):
        return JobReason(running.reason), running.message
    if running is not None and running.reason == JobReason.NOT_BOUND:
        return JobReason.BACKING_OFF, running.message
    times = f"failed {status.counted_restarts} of at most {context.spec.backoff_limit + 1} times"
    return JobReason.BACKING_OFF, times if running is None else f"{times}; last: {running.message}"


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


def with_size(context: ReconcileContext) -> TrainingJobStatus:
    """The status of a gang that trains, with the decision about the size that it has now."""
    status, assignment = context.view.status, context.assignment
    if assignment is None or status.last_decision is None or assignment.placement is None:
        return status
    last = status.last_decision
    # While a gang shrinks, it has no other sizes to be told of.
    same = last.chosen == assignment.chosen[:1024] and (last.next_best or not assignment.next_best)
    if same or assignment.placement != context.allocation.placement:
        return status
    return decided(status, assignment)


def launch(context: ReconcileContext, gang: Gang) -> StepResult:
    """Write the next launch into the status.

    The pods follow in the next pass, so that a crash at any point finds either nothing or the intent.
    """
    assignment = context.assignment
    assert assignment is not None and assignment.placement is not None
    placement = assignment.placement
    degrees = context.spec.degrees_on(placement.by_pool)
    allocation = JobAllocation(
        launch=gang.launch,
        gpu_type=placement.gpu_type,
        pool=placement.pool,
        gpus=len(placement.nodes),
        gpus_per_pod=context.spec.gpus_per_pod,
        pods=gang.pods,
        nodes=placement.nodes[:: context.spec.gpus_per_pod],
        parts=_parts(placement, gang.pods, assignment.part_speeds, context.spec.gpus_per_pod),
        degrees=degrees,
        plan_id=assignment.plan_id,
        since=context.now,
        pod_group=pod_group_name(context.view, context.spec) if context.around.has_pod_groups else "",
        shared_gpu=SharedGpu(partner=context.around.sharer.job if context.around.sharer is not None else "")
        if assignment.may_share
        else None,
    )
    status = decided(context.view.status, assignment)
    status = status.replace(allocation=allocation, launches=gang.launch, next_launch_at=None)
    admitted = assignment.why or assignment.chosen
    if degrees is not None:
        admitted += f"; {degrees}, the shortest that these GPUs hold"
    status = with_condition(context, status, JobCondition.ADMITTED, True, JobReason.ASSIGNED, admitted)
    status = with_condition(
        context,
        status,
        JobCondition.RUNNING,
        False,
        JobReason.PODS_STARTING,
        f"0 of {len(gang.pods)} pods run",
    )
    account, *_ = access_objects(context.view)
    return StepResult(
        status=status,
        meanwhile=(Apply(*account),),  # it holds no GPUs
        requeue_after_seconds=0.0,
        metric_increments=tuple((JobCounter.LAUNCHES, part.pool, 1) for part in placement.by_pool),
    )


def _parts(
    placement: Placement, pods: Sequence[str], speeds: Sequence[float], per_pod: int
) -> tuple[AllocationPart, ...]:
    """What the gang has of each pool; empty: it is in one. ``speeds``: relative, of each part."""
    found, first = [], 0
    for part, speed in zip(placement.parts, speeds or (1.0,) * len(placement.parts), strict=True):
        end = first + part.gpus // per_pod
        names = tuple(pods[first:end])
        found.append(AllocationPart(pool=part.pool, gpu_type=part.gpu_type, pods=names, speed=speed))
        first = end
    return tuple(found)


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
