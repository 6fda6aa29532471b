"""The page on which a job's pass is decided: from a view to an outcome, nothing else."""

import dataclasses

from ballast_policies.contract import GPU_RESOURCE, Directive

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.settings import JobSettings
from ballast_operator.steps.advised import advised
from ballast_operator.steps.finished import tidy
from ballast_operator.steps.gang import start_gang
from ballast_operator.steps.outcome import Outcome, Situation, set_condition
from ballast_operator.steps.running import run_gang
from ballast_operator.steps.shrinking import carry_on_shrink
from ballast_operator.steps.stopping import end, stop_gang
from ballast_operator.steps.suspension import clocked
from ballast_operator.steps.waiting import wait_or_launch
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.status import Cause, JobStatus
from ballast_operator.views.wish import Verb, Wish

LACKS_RIGHT_SECONDS = 10.0
"""Pause before a request that the operator has no right to is tried again."""


def decide(
    view: JobView,
    *,
    wish: Wish | None,
    shortage: str,
    now: Time,
    settings: JobSettings,
    price_per_hour: float = 0.0,
    gpu_resource: str = GPU_RESOURCE,
) -> Outcome:
    """What to do about a job now.

    Args:
        view: the job and all that belongs to it.
        wish: what the allocator wants; None: it has not spoken yet.
        shortage: why the wish's nodes cannot hold the gang yet, in words; empty: they can.
        now: the present.
        settings: deadlines.
        price_per_hour: of one GPU that the job holds.
        gpu_resource: extended resource that a pod of the gang asks for.
    """
    if view.deleting:
        return Outcome(status=view.status)  # the garbage collector deletes what the job owns
    view = dataclasses.replace(
        view, status=dataclasses.replace(view.status, observed_generation=view.generation)
    )
    if view.spec is None:
        return Outcome(status=_misconfigured(view, now))
    situation = Situation(
        view=view,
        spec=view.spec,
        wish=wish,
        shortage=shortage,
        now=now,
        settings=settings,
        price_per_hour=price_per_hour,
        gpu_resource=gpu_resource,
    )
    if view.status.finished:
        return tidy(situation)
    status = clocked(situation, advised(situation))
    return _next_step(dataclasses.replace(situation, view=dataclasses.replace(view, status=status)))


def _next_step(situation: Situation) -> Outcome:
    """What to do about a job that is not at its end."""
    view, spec, wish, held = situation.view, situation.spec, situation.wish, situation.view.status.held
    if held is None:
        return wait_or_launch(situation)
    if held.ending is not None:
        return stop_gang(situation)
    if view.finished_step is not None and view.shrinking and view.acknowledged:
        return carry_on_shrink(situation)  # it was done before the job was: release and say so first
    if view.finished_step is not None:
        done = f"{view.finished_step} of {spec.total_steps} steps are done and saved"
        return end(situation, Cause.COMPLETED, done)
    if spec.suspend:
        return end(situation, Cause.SUSPENDED, "spec.suspend is set")
    unwanted = wish is not None and wish.launches == held.launch and wish.verb is not Verb.KEEP
    if unwanted and not _committed(view):
        why = wish.why if wish is not None else ""
        return end(situation, Cause.PREEMPTED, why or "the allocator took the GPUs back")
    return start_gang(situation) if view.launched_plan is None else run_gang(situation)


def _committed(view: JobView) -> bool:
    """In the middle of a change of shape: it ends, one way or the other, before the GPUs are taken back."""
    plan, held = view.launched_plan, view.status.held
    if plan is None or held is None:
        return False
    if plan.directive is Directive.GROW and held.joining:
        return True
    return plan.directive is Directive.SHRINK and view.shrinking


def _misconfigured(view: JobView, now: Time) -> JobStatus:
    return set_condition(
        view.status,
        JobCondition.ADMITTED,
        False,
        JobReason.MISCONFIGURED,
        view.spec_problem,
        now=now,
        generation=view.generation,
    )


def refused(view: JobView, message: str, *, now: Time, settings: JobSettings) -> Outcome:
    """The API server refuses an object of the job: the template is wrong, or a quota forbids it.

    Either ends the launch and counts toward ``backoffLimit``, so that it is not tried for ever.
    """
    held = view.status.held
    if view.spec is None or held is None or held.ending is not None:
        return Outcome(status=view.status, again_seconds=settings.restart_max_seconds)
    situation = Situation(view=view, spec=view.spec, wish=None, shortage="", now=now, settings=settings)
    return end(situation, Cause.USER_ERROR, f"the API server refused an object of the job: {message}")


def lacks_right(view: JobView, message: str, *, now: Time) -> Outcome:
    """The operator's account may not do what the job needs: it waits, and ``backoffLimit`` is not touched.

    Nothing of what was decided is written; the same is decided and tried again.
    """
    held, status = view.status.held, view.status
    if held is not None and not status.is_true(JobCondition.RUNNING):
        status = set_condition(
            status,
            JobCondition.RUNNING,
            False,
            JobReason.PODS_STARTING,
            f"the operator lacks a right: {message}. To fix: grant it the rules of the chart's ClusterRole",
            now=now,
            generation=view.generation,
        )
    return Outcome(status=status, again_seconds=LACKS_RIGHT_SECONDS)
