"""End a launch: decide it once, let the trainer save, and release the GPUs when no pod is left."""

import datetime

from ballast_policies.protocol.observed import Cause, Deadline

from ballast_operator.api.conditions import JobCondition, JobReason, some_of
from ballast_operator.api.job_allocation import Ending
from ballast_operator.api.training_job_status import Progress, TrainingJobStatus
from ballast_operator.steps.accounting import accrue_cost, with_final_deadline
from ballast_operator.steps.context import (
    JobCounter,
    ReconcileContext,
    StepResult,
    WritePlan,
    seconds_since,
    with_condition,
)
from ballast_operator.steps.failure import EXITED_WELL, describe
from ballast_operator.steps.observed import final_end, said_to_be_done, seconds_left
from ballast_operator.steps.running import progress
from ballast_operator.views.nodes import STUCK_FIX, STUCK_SECONDS

CHANGES = {
    JobCondition.REPACKED: JobReason.REPACKING,
    JobCondition.SHRUNK: JobReason.SHRINKING,
    JobCondition.GROWN: JobReason.GROWING,
}
"""Condition of a change of the gang's size -> its reason while the change is under way."""

MAX_ENDING_MESSAGE = 4096
"""Longest message of ``status.allocation.ending``, in characters."""


def begin_termination(context: ReconcileContext, cause: Cause, message: str) -> StepResult:
    """Write into the status that the launch has to end, and why. This is never taken back.

    The restart is counted in the same write, so that a crash afterwards cannot count it twice.
    """
    ending = Ending(cause=cause, message=message[:MAX_ENDING_MESSAGE], since=context.now)
    known = accrue_cost(context, context.view.status)  # up to here it may have trained
    status = known.replace(allocation=context.allocation.replace(ending=ending))
    trial = status.trial
    tries = trial is not None and (trial.launch, trial.kept) == (context.allocation.launch, None)
    if tries and (cause.graceful or cause is Cause.NODE_LOST):
        status = status.replace(trial=None)  # nothing has failed in it: the next launch tries
    increments: tuple[tuple[JobCounter, str, int], ...] = ()
    if cause.is_restart:
        restarts = {**status.restarts, cause.value: status.restarts.get(cause, 0) + 1}
        status = status.replace(restarts=restarts)
        increments = ((JobCounter.RESTARTS, cause, 1),)
    if cause.is_restart and not cause.graceful:
        status = status.replace(next_launch_at=context.now + _pause(context, status, cause))
    if cause is Cause.PREEMPTED:
        status = with_condition(context, status, JobCondition.PREEMPTED, True, JobReason.PREEMPTED, message)
    if cause is not Cause.COMPLETED:
        if cause.is_restart and not cause.graceful and not cause.may_pass:
            message += "; the gang restarts from its checkpoint"
        reason = JobReason(cause) if cause.value in set(JobReason) else JobReason.STOPPING
        status = with_condition(context, status, JobCondition.RUNNING, False, reason, message)
        for kind, under_way in CHANGES.items():
            change = status.condition(kind)
            if change is not None and change.reason == under_way:
                status = with_condition(context, status, kind, False, reason, f"aborted: {message}")
    return StepResult(status=status, requeue_after_seconds=0.0, metric_increments=increments, allocate=True)


def ask_to_save(context: ReconcileContext, epoch: int) -> StepResult:
    """The plan's next epoch tells the ranks to save a checkpoint and exit."""
    ending = context.allocation.ending
    assert ending is not None
    leaving = context.allocation.leaving
    deadline = leaving.at.timestamp() if leaving is not None else None
    plan = context.plan.stop(ending.message, deadline).replace(epoch=epoch)
    left = seconds_left(context, Deadline.SAVE)
    return StepResult(status=context.view.status, actions=(WritePlan(plan),), requeue_after_seconds=left)


def with_stuck_pods(context: ReconcileContext) -> TrainingJobStatus:
    """The status of a job that stops; it names the pods that were to have ended a while ago."""
    status, ending = context.view.status, context.allocation.ending
    running = status.condition(JobCondition.RUNNING)
    ends = ((pod, pod.deletion.at) for pod in context.view.alive if pod.deletion is not None)
    stuck = [pod for pod, at in ends if at is not None and seconds_since(context, at) > STUCK_SECONDS]
    if ending is None or running is None or running.is_true or not stuck:
        return status
    pods = some_of([f"{pod.name} on node {pod.node}" for pod in stuck])
    message = f"{ending.message}; pods that were told to end have not: {pods}. To fix: {STUCK_FIX}"
    return with_condition(context, status, JobCondition.RUNNING, False, running.reason, message[:1024])


def succeed(context: ReconcileContext) -> StepResult:
    """The job is done and its pods have ended: it holds nothing."""
    view, allocation = context.view, context.allocation
    ending = allocation.ending
    assert ending is not None
    status = view.status
    lease = view.lease
    last, done = status.progress, view.finished_step
    if lease is not None and lease.report is not None and view.has_spoken:
        # It may have come with the end alone.
        last = progress(context, lease.report)
    if view.is_script and lease is not None:
        # A launch of few steps may end before its client has read a plan: it names its last step alone.
        done = lease.finished_step if said_to_be_done(context) else None
    if done is not None:
        percent = min(100, 100 * done // max(1, context.spec.config.total_steps))
        last = (last if last is not None else Progress()).replace(step=done, percent=percent)
    if last is not None:
        status = status.replace(progress=last.replace(eta=None, steps_per_second=None))
    unreported = context.spec.config.total_steps if view.is_script and status.progress is None else 0
    status = accrue_cost(context, status, unreported=unreported)
    status = status.replace(allocation=None, finished_at=context.now)
    message = EXITED_WELL if view.is_script else f"{view.finished_step} steps are done"
    message = ending.message if ending.cause is Cause.COMPLETED else message
    reason = JobReason.ENDED_BY_CALLBACK if view.ended_early else JobReason.ALL_STEPS_DONE
    status = with_condition(context, status, JobCondition.SUCCEEDED, True, reason, message)
    status = with_final_deadline(context, status)
    status = _closed(context, status, f"last ran on {allocation.placement}")
    return StepResult(status=status, allocate=True, requeue_after_seconds=0.0)


def release_gpus(context: ReconcileContext, *, failed: bool) -> StepResult:
    """No pod of the launch is left: its GPUs are free. ``failed``: the job is not launched again."""
    limit, ending = context.spec.asked.backoff_limit, context.allocation.ending
    assert ending is not None
    status = accrue_cost(context, context.view.status).replace(allocation=None)
    if failed:
        status = status.replace(finished_at=context.now, next_launch_at=None)
        times, end = status.counted_restarts, final_end(context)
        if end is not None and times <= limit:
            why, message = JobReason.FAILURE_POLICY, f"failurePolicy.failOn: {describe(end)}"
        else:
            why = JobReason.BACKOFF_LIMIT_EXCEEDED
            message = f"failed {times} times, backoffLimit={limit}; last: {ending.message}"
        status = with_condition(context, status, JobCondition.FAILED, True, why, message)
        return StepResult(
            status=_closed(context, status, ending.message), allocate=True, requeue_after_seconds=0.0
        )
    hold = context.hold
    if ending.cause is Cause.SUSPENDED and hold is not None:
        reason, message = hold.reason, hold.message
    else:
        reason, message = JobReason.PENDING, f"to be launched again after {ending.cause}: {ending.message}"
    status = with_condition(context, status, JobCondition.ADMITTED, False, reason, message)
    return StepResult(status=status, allocate=True, requeue_after_seconds=0.0)


def let_go(context: ReconcileContext) -> StepResult:
    """The job is being deleted and has no pods: its GPUs do not wait for a finalizer of somebody else."""
    status = accrue_cost(context, context.view.status).replace(allocation=None)
    status = _closed(context, status, "the job is being deleted")
    return StepResult(status=status, allocate=True, needs_fresh_view=True)


def fail_at_limit(context: ReconcileContext) -> StepResult:
    """The job holds nothing, and its budget or deadline ends it: it has failed for good."""
    hold = context.hold
    assert hold is not None
    status = context.view.status.replace(finished_at=context.now, next_launch_at=None)
    status = with_condition(context, status, JobCondition.FAILED, True, hold.reason, hold.message)
    return StepResult(status=_closed(context, status, hold.message), allocate=True, requeue_after_seconds=0.0)


def _closed(context: ReconcileContext, status: TrainingJobStatus, message: str) -> TrainingJobStatus:
    status = with_condition(context, status, JobCondition.ADMITTED, False, JobReason.FINISHED, message)
    return with_condition(context, status, JobCondition.RUNNING, False, JobReason.FINISHED, message)


def _pause(context: ReconcileContext, status: TrainingJobStatus, cause: Cause) -> datetime.timedelta:
    """Doubles with each restart of this cause; starts over after a long run."""
    settings = context.settings
    ran_well = seconds_since(context, context.allocation.since) > 2 * settings.restart_max_seconds
    doubled = settings.restart_base_seconds * 2.0 ** (0 if ran_well else min(status.restarts[cause] - 1, 100))
    return datetime.timedelta(seconds=min(doubled, settings.restart_max_seconds))
