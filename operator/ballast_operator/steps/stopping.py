"""End a launch: decide it once, save if that is wanted, delete the pods, and only then let go of the GPUs."""

import dataclasses
import datetime

from ballast_policies.contract import Directive, ExitReason

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.steps.cost import accrue
from ballast_operator.steps.outcome import (
    Action,
    DeletePod,
    Outcome,
    Situation,
    WritePlan,
    say,
    seconds_since,
)
from ballast_operator.views.clock import Time
from ballast_operator.views.pod import PodView
from ballast_operator.views.status import Cause, Ending, Held, JobStatus


def end(situation: Situation, cause: Cause, message: str) -> Outcome:
    """Write down that the launch has to end, and why. From here it cannot come back.

    The restart is counted in the same write, so that it is counted once whatever crashes after.
    """
    status, held = situation.view.status, situation.view.status.held
    assert held is not None
    held = dataclasses.replace(held, ending=Ending(cause=cause, message=message, since=situation.now))
    status = dataclasses.replace(status, held=held)
    counts: tuple[tuple[str, str, int], ...] = ()
    if cause.is_restart:
        restarts = {**status.restarts, cause: status.restarts.get(cause, 0) + 1}
        status = dataclasses.replace(status, restarts=restarts)
        counts = (("restarts", cause, 1),)
    if cause.is_restart and not cause.graceful:
        status = dataclasses.replace(status, next_launch_at=situation.now + _pause(situation, status, cause))
    if cause is Cause.PREEMPTED:
        status = say(situation, status, JobCondition.PREEMPTED, True, JobReason.PREEMPTED, message)
    if cause is not Cause.COMPLETED:
        if cause.is_restart and not cause.graceful:
            message += "; the gang restarts from its checkpoint"
        reason = JobReason(cause) if cause.value in set(JobReason) else JobReason.STOPPING
        status = say(situation, status, JobCondition.RUNNING, False, reason, message)
        repacked = status.condition(JobCondition.REPACKED)
        if repacked is not None and repacked.reason == JobReason.REPACKING:
            status = say(situation, status, JobCondition.REPACKED, False, reason, f"broken off: {message}")
        grown = status.condition(JobCondition.GROWN)
        if grown is not None and grown.reason == JobReason.GROWING:
            status = say(situation, status, JobCondition.GROWN, False, reason, f"broken off: {message}")
    return Outcome(status=status, again_seconds=0.0, counts=counts, allocate=True)


def stop_gang(situation: Situation) -> Outcome:
    """One pass of a launch that is ending."""
    view, settings = situation.view, situation.settings
    held, ending = view.status.held, view.status.held.ending if view.status.held is not None else None
    assert held is not None and ending is not None
    alive = view.alive
    if ending.cause is Cause.COMPLETED or view.finished_step is not None:
        return _finish(situation, held, ending)
    if ending.cause.graceful and alive:
        waited = _save_first(situation, ending)
        if waited is not None:
            return waited
    # A pod at fault has ended and holds no GPU: it stays for its log until the next launch ends.
    leftovers = tuple(pod for pod in view.pods if not (pod.launch == held.launch and pod.at_fault))
    if leftovers:
        actions = deletions(situation, leftovers, since=ending.since)
        return Outcome(status=view.status, actions=actions, again_seconds=settings.exit_seconds)
    return _let_go(situation, ending)


def deletions(situation: Situation, pods: tuple[PodView, ...], *, since: Time) -> tuple[Action, ...]:
    """Delete these pods. Nobody answers for those on a dead node: they are removed without its word."""
    overdue = seconds_since(situation, since) > situation.settings.exit_seconds
    wanted: list[Action] = []
    for pod in pods:
        if not pod.node_ready and overdue:
            wanted.append(DeletePod(pod.name, pod.uid, grace_seconds=0))
        elif not pod.leaving:
            wanted.append(DeletePod(pod.name, pod.uid))
    return tuple(wanted)


def _save_first(situation: Situation, ending: Ending) -> Outcome | None:
    """Ask the trainer to save and stop, and wait for it; None: delete the pods now."""
    view, settings = situation.view, situation.settings
    plan = view.launched_plan
    left = settings.stop_seconds - seconds_since(situation, ending.since)
    someone_failed = any(
        pod.phase == "Failed" and (pod.message is None or pod.message.reason is not ExitReason.STOPPED)
        for pod in view.kept
    )
    if plan is None or left <= 0 or someone_failed or not any(pod.alive for pod in view.kept):
        return None
    if plan.directive is Directive.CHECKPOINT_AND_STOP:
        return Outcome(status=view.status, again_seconds=left)
    return Outcome(status=view.status, actions=(WritePlan(plan.stop(ending.message)),), again_seconds=left)


def _finish(situation: Situation, held: Held, ending: Ending) -> Outcome:
    """The job is done: its pods end by themselves, and are kept for their logs; stragglers are deleted."""
    view, settings = situation.view, situation.settings
    left = settings.exit_seconds - seconds_since(situation, ending.since)
    if view.alive:
        overdue = tuple(DeletePod(pod.name, pod.uid) for pod in view.alive if not pod.leaving)
        return Outcome(status=view.status, actions=overdue if left <= 0 else (), again_seconds=max(left, 1.0))
    status = accrue(situation, view.status)
    if view.finished_step is not None:
        last = {k: v for k, v in (status.progress or {}).items() if k not in ("eta", "stepsPerSecond")}
        status = dataclasses.replace(status, progress={**last, "step": view.finished_step, "percent": 100})
    status = dataclasses.replace(status, held=None, finished_at=situation.now)
    message = ending.message if ending.cause is Cause.COMPLETED else f"{view.finished_step} steps are done"
    status = say(situation, status, JobCondition.SUCCEEDED, True, JobReason.ALL_STEPS_DONE, message)
    status = _closed(
        situation, status, f"ran at last on {len(held.slots)} x {held.gpu_type} of pool {held.pool}"
    )
    return Outcome(status=status, allocate=True, again_seconds=0.0)


def _let_go(situation: Situation, ending: Ending) -> Outcome:
    """No pod of the launch is left: its GPUs are free."""
    view, limit = situation.view, situation.spec.backoff_limit
    status = dataclasses.replace(accrue(situation, view.status), held=None)
    if ending.cause.counts and status.counted_restarts > limit:
        status = dataclasses.replace(status, finished_at=situation.now, next_launch_at=None)
        times = status.counted_restarts
        message = f"failed {times} times by its own doing, backoffLimit is {limit}; last: {ending.message}"
        status = say(situation, status, JobCondition.FAILED, True, JobReason.BACKOFF_LIMIT_EXCEEDED, message)
        return Outcome(status=_closed(situation, status, ending.message), allocate=True, again_seconds=0.0)
    if ending.cause is Cause.SUSPENDED:
        reason, message = JobReason.SUSPENDED, "spec.suspend is set"
    else:
        reason, message = JobReason.PENDING, f"to be launched again after {ending.cause}: {ending.message}"
    status = say(situation, status, JobCondition.ADMITTED, False, reason, message)
    return Outcome(status=status, allocate=True, again_seconds=0.0)


def _closed(situation: Situation, status: JobStatus, message: str) -> JobStatus:
    status = say(situation, status, JobCondition.ADMITTED, False, JobReason.FINISHED, message)
    return say(situation, status, JobCondition.RUNNING, False, JobReason.FINISHED, message)


def _pause(situation: Situation, status: JobStatus, cause: Cause) -> datetime.timedelta:
    """Doubles with each end of this cause, so that a broken job does not spin; forgotten after a good run."""
    settings, held = situation.settings, status.held
    assert held is not None
    ran_well = seconds_since(situation, held.since) > 2 * settings.restart_max_seconds
    doubled = settings.restart_base_seconds * 2.0 ** (0 if ran_well else status.restarts[cause] - 1)
    return datetime.timedelta(seconds=min(doubled, settings.restart_max_seconds))
