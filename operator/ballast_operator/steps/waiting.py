"""A job that holds nothing: wait with a reason, or write down the next launch."""

import dataclasses

from ballast_policies.contract import pod_name

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.steps.outcome import DeletePod, Outcome, Situation, say, seconds_since
from ballast_operator.views.clock import show
from ballast_operator.views.status import Cause, Held, JobStatus, Slot
from ballast_operator.views.wish import Verb, Wish

_LAST_WORDS = frozenset(Cause) - {Cause.COMPLETED}


def wait_or_launch(situation: Situation) -> Outcome:
    """One pass of a job without a gang.

    The launch itself is only written down here (``status.allocation``): the pods follow in the next
    pass, so that a crash at any point finds either nothing or the intent.
    """
    view, status, wish = situation.view, situation.view.status, situation.wish
    if view.alive:
        return Outcome(
            status=_not_admitted(
                situation,
                status,
                JobReason.WAITING_FOR_RELEASED_PODS,
                f"pods of an earlier launch are not gone yet: {', '.join(pod.name for pod in view.alive)}",
            ),
            actions=tuple(DeletePod(pod.name, pod.uid) for pod in view.alive if not pod.leaving),
            again_seconds=5.0,
        )
    if situation.spec.suspend:
        return Outcome(status=_not_admitted(situation, status, JobReason.SUSPENDED, "spec.suspend is set"))
    if status.next_launch_at is not None and status.next_launch_at > situation.now:
        pause = -seconds_since(situation, status.next_launch_at)
        return Outcome(
            status=_not_admitted(
                situation,
                status,
                JobReason.BACKING_OFF,
                f"failed {status.counted_restarts} of at most {situation.spec.backoff_limit + 1} times; "
                f"the next launch is not before {show(status.next_launch_at)}",
            ),
            again_seconds=pause,
        )
    if wish is None or wish.launches != status.launches or wish.verb is Verb.KEEP:
        if status.condition(JobCondition.ADMITTED) is None:
            text = "the allocator has not looked at the job yet"
            status = _not_admitted(situation, status, JobReason.PENDING, text)
        return Outcome(status=status, allocate=True, again_seconds=5.0)
    status = decided(status, wish)
    if wish.verb is Verb.NONE:
        return Outcome(status=_not_admitted(situation, status, wish.reason, wish.why))
    if situation.shortage:
        return Outcome(
            status=_not_admitted(
                situation, status, JobReason.WAITING_FOR_RELEASED_PODS, f"{wish.chosen}: {situation.shortage}"
            ),
            again_seconds=5.0,
        )
    return Outcome(
        status=_launch(situation, status, wish), again_seconds=0.0, counts=(("launches", wish.pool, 1),)
    )


def decided(status: JobStatus, wish: Wish) -> JobStatus:
    """The status with ``lastDecision`` taken from the wish."""
    decision = {
        "chosen": wish.chosen[:1024],
        "nextBest": wish.next_best[:1024],
        "why": wish.why[:1024],
        "planId": wish.plan_id,
        "gpuType": wish.gpu_type,
    }
    old = status.last_decision or {}
    if all(old.get(name, "") == value for name, value in decision.items() if name != "planId"):
        return status  # decided again, the same
    return dataclasses.replace(status, last_decision=decision)


def _launch(situation: Situation, status: JobStatus, wish: Wish) -> JobStatus:
    launch = status.launches + 1
    slots = tuple(
        Slot(pod=pod_name(situation.view.name, launch, rank), node=node)
        for rank, node in enumerate(wish.nodes)
    )
    held = Held(
        launch=launch,
        gpu_type=wish.gpu_type,
        pool=wish.pool,
        slots=slots,
        plan_id=wish.plan_id,
        since=situation.now,
    )
    status = dataclasses.replace(status, held=held, launches=launch, next_launch_at=None)
    admitted = wish.why or wish.chosen
    status = say(situation, status, JobCondition.ADMITTED, True, JobReason.ASSIGNED, admitted)
    return say(
        situation, status, JobCondition.RUNNING, False, JobReason.PODS_STARTING, f"0 of {len(slots)} pods run"
    )


def _not_admitted(situation: Situation, status: JobStatus, reason: str, message: str) -> JobStatus:
    status = say(situation, status, JobCondition.ADMITTED, False, reason, message)
    running = status.condition(JobCondition.RUNNING)
    if running is not None and not running.status and running.reason in _LAST_WORDS:
        return status  # why the last launch ended is worth more than "see Admitted"
    return say(
        situation, status, JobCondition.RUNNING, False, JobReason.NOT_ADMITTED, "see condition Admitted"
    )
