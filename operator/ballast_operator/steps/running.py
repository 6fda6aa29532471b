"""A gang that has its plan: what the trainer reports, wants and needs."""

import dataclasses
import datetime
import math
from typing import Any, TypeVar

from ballast_policies.accounting import isolated_seconds
from ballast_policies.contract import Directive, Report

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.steps.cost import accrue
from ballast_operator.steps.failure import failed, settling
from ballast_operator.steps.growing import begin_growth, carry_on_growth, strays, wants_to_grow
from ballast_operator.steps.outcome import Outcome, Situation, say, seconds_since
from ballast_operator.steps.shrinking import answer, carry_on_shrink, open_proposal
from ballast_operator.steps.stopping import end
from ballast_operator.views.clock import show
from ballast_operator.views.status import Cause, Isolated, JobStatus

N = TypeVar("N", int, float)

KEPT_REBALANCES = 20
"""``status.rebalances`` holds the newest so many."""


def run_gang(situation: Situation) -> Outcome:
    """One pass of a launch whose plan is written."""
    view, settings = situation.view, situation.settings
    failure = failed(situation) or _silent_exit(situation)
    if failure is not None:
        return end(situation, *failure)
    status = follow(situation)
    if view.status.held is not None and view.status.held.joining:
        outcome = carry_on_growth(_with_status(situation, status))
    elif view.shrinking:
        outcome = carry_on_shrink(_with_status(situation, status))
    else:
        proposal = open_proposal(situation)
        if proposal is not None:
            outcome = answer(_with_status(situation, status), proposal)
        elif wants_to_grow(situation):
            outcome = begin_growth(_with_status(situation, status))
        else:
            outcome = Outcome(status=status, again_seconds=_next_look(situation))
    outcome = dataclasses.replace(outcome, actions=(*strays(view), *outcome.actions))
    if any(not pod.alive for pod in view.gang) or settling(situation):
        return dataclasses.replace(outcome, again_seconds=min(outcome.again_seconds or 1.0, 1.0))
    return (
        outcome
        if outcome.again_seconds is not None
        else dataclasses.replace(outcome, again_seconds=settings.heartbeat_seconds)
    )


def follow(situation: Situation) -> JobStatus:
    """The status brought up to the newest report."""
    view, status = situation.view, situation.view.status
    held, lease = status.held, view.lease
    assert held is not None
    if view.acknowledged or status.is_true(JobCondition.RUNNING):
        message = f"{len(held.slots)} ranks train on {held.gpu_type} of pool {held.pool}"
        if not status.is_true(JobCondition.RUNNING):
            status = say(situation, status, JobCondition.RUNNING, True, JobReason.ALL_RANKS_TRAIN, message)
            if status.is_true(JobCondition.PREEMPTED):
                status = say(situation, status, JobCondition.PREEMPTED, False, JobReason.RESUMED, message)
    report = lease.report if lease is not None else None
    plan = view.launched_plan
    if report is None or plan is None or report.epoch > plan.epoch or not view.acknowledged:
        return status
    status = _rebalanced(situation, status, report)
    speed = situation.wish.isolated_speed if situation.wish is not None else 0.0
    status = dataclasses.replace(
        status, progress=progress(situation, report), isolated=isolated(status.isolated, report, speed)
    )
    return accrue(situation, status)


def isolated(known: Isolated | None, report: Report, speed: float) -> Isolated | None:
    """How long the progress so far would have taken on isolated equal shares (Themis's t_isolated).

    Args:
        known: what was summed up so far.
        report: the newest; its steps since are booked at its own speed.
        speed: steps/s on an isolated equal share / steps/s on the present GPUs; 0: not known yet.
    """
    before = known if known is not None else Isolated(seconds=0.0, step=0)
    step = max(0, report.step)
    if step < before.step:  # back to a checkpoint: what is lost counts no longer
        return Isolated(seconds=before.seconds * step / before.step, step=step)
    rate = _within(report.steps_per_second, 0.0, math.inf) or 0.0
    if step == before.step or rate * speed <= 0:
        return known
    more = isolated_seconds(float(step - before.step), rate * speed)
    return Isolated(seconds=before.seconds + more, step=step)


def progress(situation: Situation, report: Report) -> dict[str, Any]:
    """``status.progress`` from a report."""
    total = situation.spec.total_steps
    values: dict[str, Any] = {
        "step": max(0, report.step),
        "stepsPerSecond": _within(report.steps_per_second, 0.0, math.inf),
        "loss": _within(report.loss, -math.inf, math.inf),
        "imbalance": _within(report.imbalance, 0.0, math.inf),
        "bubble": _within(report.bubble, 0.0, 1.0),
        "checkpointStep": _within(report.checkpoint_step, 0, report.step),
        "percent": min(100, 100 * max(0, report.step) // total) if total else None,
        "emulatedSlowdown": _within(report.emulated, 1.0, math.inf),
    }
    if report.steps_per_second and report.steps_per_second > 1e-6 and total > report.step:
        left = datetime.timedelta(seconds=round((total - report.step) / report.steps_per_second))
        values["eta"] = show(situation.now + left)
    return {name: value for name, value in values.items() if value is not None}


def _within(value: N | None, least: N, most: N) -> N | None:
    """The trainer's number brought into the range that the API allows; rounding may have carried it out."""
    if value is None or not math.isfinite(value):
        return None
    return max(least, min(most, value))


def _rebalanced(situation: Situation, status: JobStatus, report: Report) -> JobStatus:
    if not report.rebalances or report.last_rebalance_step is None:
        return status
    last = status.rebalances[-1] if status.rebalances else {}
    launch = situation.view.launch
    entry: dict[str, Any] = {
        "launch": launch,
        "step": max(0, report.last_rebalance_step),
        "imbalanceBefore": _within(report.imbalance_before, 0.0, math.inf),
        "imbalanceAfter": _within(report.imbalance_after, 0.0, math.inf),
        "pauseMs": _within(report.rebalance_pause_ms, 0.0, math.inf),
    }
    entry = {name: value for name, value in entry.items() if value is not None}
    same = (last.get("launch"), last.get("step")) == (launch, report.last_rebalance_step)
    if same and {**last, **entry} == last:
        return status
    entry["time"] = last["time"] if same and "time" in last else show(situation.now)
    earlier = status.rebalances[:-1] if same else status.rebalances
    status = dataclasses.replace(status, rebalances=(*earlier, entry)[-KEPT_REBALANCES:])
    message = f"layers moved at step {report.last_rebalance_step}"
    if report.imbalance_before is not None and report.imbalance_after is not None:
        message += f": imbalance {report.imbalance_before:.3f} -> {report.imbalance_after:.3f}"
    return say(situation, status, JobCondition.REBALANCED, True, JobReason.LAYERS_MOVED, message)


def _silent_exit(situation: Situation) -> tuple[Cause, str] | None:
    """All ranks ended with success, but the last step was never announced."""
    view = situation.view
    quiet = view.lease.quiet_seconds if view.lease is not None else 0.0
    if not view.kept or any(pod.phase != "Succeeded" for pod in view.kept):
        return None
    if quiet < situation.settings.exit_seconds:
        return None
    return (
        Cause.USER_ERROR,
        "every rank exited with success, but training is not done: the lease names no last step",
    )


def _next_look(situation: Situation) -> float:
    view, settings = situation.view, situation.settings
    if view.acknowledged or view.plan_written is None:
        return settings.heartbeat_seconds
    if view.launched_plan is not None and view.launched_plan.directive is not Directive.RUN:
        return settings.heartbeat_seconds
    return max(1.0, settings.start_seconds - seconds_since(situation, view.plan_written))


def _with_status(situation: Situation, status: JobStatus) -> Situation:
    return dataclasses.replace(situation, view=dataclasses.replace(situation.view, status=status))
