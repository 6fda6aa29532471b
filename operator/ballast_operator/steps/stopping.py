"""End a launch: decide it once, let the trainer save, delete the pods, then release the GPUs."""

import datetime

from ballast_policies.contract import Directive, ExitReason

from ballast_operator.api.cause import Cause
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import Ending, JobAllocation, Progress, TrainingJobStatus
from ballast_operator.steps.accounting import accrue_cost
from ballast_operator.steps.context import (
    Action,
    DeleteJob,
    DeletePod,
    ReconcileContext,
    StepResult,
    WritePlan,
    seconds_since,
    with_condition,
)
from ballast_operator.views.clock import Time
from ballast_operator.views.pod import PodView

CHANGES = {JobCondition.REPACKED: JobReason.REPACKING, JobCondition.GROWN: JobReason.GROWING}
"""Condition of a change of the gang's size -> its reason while the change is under way."""

MAX_ENDING_MESSAGE = 4096
"""Longest message of ``status.allocation.ending``, in characters."""


def begin_termination(context: ReconcileContext, cause: Cause, message: str) -> StepResult:
    """Write into the status that the launch has to end, and why. This is never taken back.

    The restart is counted in the same write, so that a crash afterwards cannot count it twice.
    """
    ending = Ending(cause=cause, message=message[:MAX_ENDING_MESSAGE], since=context.now)
    status = context.view.status.replace(allocation=context.allocation.replace(ending=ending))
    increments: tuple[tuple[str, str, int], ...] = ()
    if cause.is_restart:
        restarts = {**status.restarts, cause.value: status.restarts.get(cause, 0) + 1}
        status = status.replace(restarts=restarts)
        increments = (("restarts", cause, 1),)
    if cause.is_restart and not cause.graceful:
        status = status.replace(next_launch_at=context.now + _pause(context, status, cause))
    if cause is Cause.PREEMPTED:
        status = with_condition(context, status, JobCondition.PREEMPTED, True, JobReason.PREEMPTED, message)
    if cause is not Cause.COMPLETED:
        if cause.is_restart and not cause.graceful:
            message += "; the gang restarts from its checkpoint"
        reason = JobReason(cause) if cause.value in set(JobReason) else JobReason.STOPPING
        status = with_condition(context, status, JobCondition.RUNNING, False, reason, message)
        for kind, under_way in CHANGES.items():
            change = status.condition(kind)
            if change is not None and change.reason == under_way:
                status = with_condition(context, status, kind, False, reason, f"aborted: {message}")
    return StepResult(status=status, requeue_after_seconds=0.0, metric_increments=increments, allocate=True)


def stop_gang(context: ReconcileContext) -> StepResult:
    """One pass of a launch that is ending."""
    view, settings = context.view, context.settings
    allocation, ending = context.allocation, context.allocation.ending
    assert ending is not None
    alive = view.alive
    if ending.cause is Cause.COMPLETED or view.finished_step is not None:
        return _finish(context, allocation, ending)
    if ending.cause.graceful and alive:
        waited = _save_first(context, ending)
        if waited is not None:
            return waited
    # A pod at fault has ended and holds no GPU: it stays for its log until the next launch ends.
    leftovers = tuple(pod for pod in view.pods if not (pod.launch == allocation.launch and pod.at_fault))
    if leftovers:
        actions = deletions(context, leftovers, since=ending.since)
        return StepResult(status=view.status, actions=actions, requeue_after_seconds=settings.exit_seconds)
    return _release_gpus(context, ending)


def deletions(context: ReconcileContext, pods: tuple[PodView, ...], *, since: Time) -> tuple[Action, ...]:
    """Delete these pods; those on a dead node without grace, since its kubelet cannot confirm it."""
    overdue = seconds_since(context, since) > context.settings.exit_seconds
    wanted: list[Action] = []
    for pod in pods:
        if not pod.node_ready and overdue:
            wanted.append(DeletePod(pod.name, pod.uid, grace_seconds=0))
        elif not pod.leaving:
            wanted.append(DeletePod(pod.name, pod.uid))
    return tuple(wanted)


def _save_first(context: ReconcileContext, ending: Ending) -> StepResult | None:
    """Ask the trainer to save a checkpoint and stop; None: delete the pods now."""
    view, settings = context.view, context.settings
    plan = view.launched_plan
    left = settings.stop_seconds - seconds_since(context, ending.since)
    someone_failed = any(
        pod.phase == "Failed" and (pod.message is None or pod.message.reason is not ExitReason.STOPPED)
        for pod in view.kept
    )
    if plan is None or left <= 0 or someone_failed or not any(pod.alive for pod in view.kept):
        return None
    if plan.directive is Directive.CHECKPOINT_AND_STOP:
        return StepResult(status=view.status, requeue_after_seconds=left)
    return StepResult(
        status=view.status, actions=(WritePlan(plan.stop(ending.message)),), requeue_after_seconds=left
    )


def _finish(context: ReconcileContext, allocation: JobAllocation, ending: Ending) -> StepResult:
    """The job is done: its pods exit and are kept for their logs; those that do not exit are deleted."""
    view, settings = context.view, context.settings
    left = settings.exit_seconds - seconds_since(context, ending.since)
    if view.alive:
        overdue = tuple(DeletePod(pod.name, pod.uid) for pod in view.alive if not pod.leaving)
        return StepResult(
            status=view.status, actions=overdue if left <= 0 else (), requeue_after_seconds=max(left, 1.0)
        )
    status = accrue_cost(context, view.status)
    if view.finished_step is not None:
        last = status.progress if status.progress is not None else Progress()
        last = last.replace(step=view.finished_step, percent=100, eta=None, steps_per_second=None)
        status = status.replace(progress=last)
    status = status.replace(allocation=None, finished_at=context.now)
    message = ending.message if ending.cause is Cause.COMPLETED else f"{view.finished_step} steps are done"
    status = with_condition(context, status, JobCondition.SUCCEEDED, True, JobReason.ALL_STEPS_DONE, message)
    status = _closed(
        context,
        status,
        f"last ran on {len(allocation.pods)} x {allocation.gpu_type} of pool {allocation.pool}",
    )
    return StepResult(status=status, allocate=True, requeue_after_seconds=0.0)


def _release_gpus(context: ReconcileContext, ending: Ending) -> StepResult:
    """No pod of the launch is left: its GPUs are free."""
    view, limit = context.view, context.spec.backoff_limit
    status = accrue_cost(context, view.status).replace(allocation=None)
    if ending.cause.counts and status.counted_restarts > limit:
        status = status.replace(finished_at=context.now, next_launch_at=None)
        times = status.counted_restarts
        message = f"failed {times} times, backoffLimit={limit}; last: {ending.message}"
        status = with_condition(
            context, status, JobCondition.FAILED, True, JobReason.BACKOFF_LIMIT_EXCEEDED, message
        )
        return StepResult(
            status=_closed(context, status, ending.message), allocate=True, requeue_after_seconds=0.0
        )
    if ending.cause is Cause.SUSPENDED:
        reason, message = JobReason.SUSPENDED, "spec.suspend is set"
    else:
        reason, message = JobReason.PENDING, f"to be launched again after {ending.cause}: {ending.message}"
    status = with_condition(context, status, JobCondition.ADMITTED, False, reason, message)
    return StepResult(status=status, allocate=True, requeue_after_seconds=0.0)


def _closed(context: ReconcileContext, status: TrainingJobStatus, message: str) -> TrainingJobStatus:
    status = with_condition(context, status, JobCondition.ADMITTED, False, JobReason.FINISHED, message)
    return with_condition(context, status, JobCondition.RUNNING, False, JobReason.FINISHED, message)


def _pause(context: ReconcileContext, status: TrainingJobStatus, cause: Cause) -> datetime.timedelta:
    """Doubles with each restart of this cause; starts over after a long run."""
    settings = context.settings
    ran_well = seconds_since(context, context.allocation.since) > 2 * settings.restart_max_seconds
    doubled = settings.restart_base_seconds * 2.0 ** (0 if ran_well else status.restarts[cause] - 1)
    return datetime.timedelta(seconds=min(doubled, settings.restart_max_seconds))


def reconcile_finished(context: ReconcileContext) -> StepResult:
    """Delete pods that should not be alive, and the job itself when its time is over."""
    view, ttl = context.view, context.spec.ttl_seconds
    actions: tuple[Action, ...] = tuple(DeletePod(pod.name, pod.uid) for pod in view.alive if not pod.leaving)
    if ttl is None or view.status.finished_at is None:
        return StepResult(status=view.status, actions=actions)
    left = ttl - seconds_since(context, view.status.finished_at)
    if left <= 0:
        return StepResult(status=view.status, actions=(*actions, DeleteJob(view.uid)))
    return StepResult(status=view.status, actions=actions, requeue_after_seconds=left)
