"""End a launch: decide it once, let the trainer save, and release the GPUs when no pod is left."""

import datetime
from collections.abc import Collection

from ballast_policies.contract.messages import ExitReason
from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.moves import End, Why
from ballast_policies.protocol.observed import Cause, Deadline

from ballast_operator.api.conditions import JobCondition, JobReason, some_of
from ballast_operator.api.job_allocation import Ending, NodesLeaving
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
from ballast_operator.steps.gang import waits
from ballast_operator.steps.observed import final_end, said_to_be_done, seconds_left
from ballast_operator.steps.running import progress
from ballast_operator.views.clock import show
from ballast_operator.views.nodes import STUCK_FIX, STUCK_SECONDS
from ballast_operator.views.pod import EVICTION_REASONS, PodView

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


EXITED_WELL = "every rank of the command has exited with success"
"""Reason that a script has succeeded."""


def leaving_text(leaving: NodesLeaving | None) -> str:
    """Text on the nodes that go, with the time and the source of the notice."""
    if leaving is None:
        return "a node of the gang is about to go"
    nodes, go = ("nodes", "go") if len(leaving.nodes) > 1 else ("node", "goes")
    return f"{nodes} {some_of(leaving.nodes)} {go} at {show(leaving.at)}, by {leaving.by}"


def lost_text(context: ReconcileContext, lost: Collection[str]) -> str:
    """Text on the loss of pods without which the gang goes on."""
    there, names = {pod.name: pod for pod in context.view.gang if not pod.forced}, sorted(lost)
    found = [there[name] for name in names if name in there]
    if len(found) < len(names):
        return f"deleted by someone else: {some_of(names)}"
    dead = sorted({pod.node for pod in found if not pod.node_ready})
    ended = [describe(pod) for pod in found if not pod.alive]
    return "; ".join([*([f"node {some_of(dead)} is lost"] if dead else []), *ended])


def describe(pod: PodView) -> str:
    """A pod's end, as text."""
    if pod.reason == "OOMKilled" and pod.message is None:
        # What it printed last has nothing to do with it.
        return (
            f"pod {pod.name} was killed for its memory (OOMKilled): it used more than its container's limit. "
            "To fix: raise resources.limits.memory in spec.template, or use more stages"
        )
    code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
    # What the trainer says of an eviction is that it was told to stop.
    own = None if pod.reason in EVICTION_REASONS else pod.message
    reason, said = (pod.reason, pod.detail) if own is None else (own.reason, own.message)
    return f"pod {pod.name} ended{code}" + (f" ({reason})" if reason else "") + (f": {said}" if said else "")


def _led(context: ReconcileContext, *pods: str) -> str:
    """Reason that the others end with pods told to go, though they may go on; as text."""
    plan = context.view.launched_plan
    if plan is None or plan.pods[0] not in pods or not context.view.resizable:
        return ""
    return "; rank 0 hosts the rendezvous, so the others do not go on in place without its pod"


def why_it_ends(context: ReconcileContext, end: End) -> str:
    """Reason that a launch has to end, with numbers and names."""
    view, settings = context.view, context.settings
    pods = [pod for pod in view.pods if pod.name in end.pods]
    quiet = view.lease.quiet_seconds if view.lease is not None else 0.0
    match end.why:
        case Why.DONE if view.is_script:
            return EXITED_WELL
        case Why.DONE if view.ended_early:
            done = f"{view.finished_step} of {context.spec.config.total_steps} steps"
            return f"the callback ended the training after {done}: {view.ended_early}"
        case Why.DONE:
            return f"{view.finished_step} of {context.spec.config.total_steps} steps are done and saved"
        case Why.SUSPENDED:
            hold = context.hold
            return hold.message if hold is not None else "the job is suspended"
        case Why.TAKEN_BACK:
            why = context.assignment.why if context.assignment is not None else ""
            return why or "the allocator took the GPUs back"
        case Why.GPUS_TAKEN:
            return (
                f"the GPUs of the launch are not free, and no pod of it was made: {context.around.shortage}"
            )
        case Why.NOT_RUNNING_IN_TIME:
            ready, gang = sum(pod.ready_for_plan for pod in view.gang), context.allocation.pods
            return (
                f"only {ready} of {len(gang)} pods ran within {context.bind_seconds:g} s, "
                f"so all are deleted{waits(context)}"
            )
        case Why.POD_FAILED:
            (pod,) = pods
            if pod.lost_peer:
                return f"{describe(pod)}; no other rank is to blame"
            if pod.message is not None and pod.message.reason in (
                ExitReason.STOPPED,
                ExitReason.STOPPED_UNSAVED,
            ):
                # All ranks stop where one is told to: the one that was evicted says why.
                pod = next((each for each in view.gang if each.reason in EVICTION_REASONS), pod)
                return describe(pod) + _led(context, pod.name)
            return describe(pod) if pod.node_ready else f"node {pod.node} is lost; {describe(pod)}"
        case Why.POD_DELETED:
            dead = ", ".join(sorted({pod.node for pod in pods if not pod.node_ready}))
            if dead:
                return f"node {dead} is lost: it is not ready, and pod {', '.join(end.pods)} is being deleted"
            return f"pod {', '.join(end.pods)} is being deleted by someone else" + _led(context, *end.pods)
        case Why.POD_MISSING:
            return lost_text(context, end.pods)
        case Why.NODE_SILENT:
            nodes = ", ".join(sorted({pod.node for pod in pods}))
            return f"node {nodes} is not ready and the job is silent"
        case Why.NOT_RENEWED:
            return f"the lease was not renewed for {quiet:.0f} s while pods run"
        case Why.NOT_STARTED:
            return f"no acknowledgement of the plan within {settings.start_seconds:g} s"
        case Why.NOT_ACKNOWLEDGED:
            plan = context.plan
            shrinks = plan.directive is Directive.SHRINK
            change, limit = (
                ("shrink", settings.shrink_seconds) if shrinks else ("growth", settings.start_seconds)
            )
            return (
                f"the {change} to {len(plan.pods)} pods (epoch {plan.epoch}) was not acknowledged within "
                f"{limit:g} s; restarting from the checkpoint"
            )
        case Why.NODE_LEAVES:
            return leaving_text(context.allocation.leaving)
        case Why.STEPS_ADDED:
            more = context.spec.config.total_steps
            return f"the {view.launched_steps} steps of its launch are done; spec.totalSteps is {more} now"
        case Why.EXITED_EARLY:
            return "every rank exited with success, but training is not done: the lease names no last step"
