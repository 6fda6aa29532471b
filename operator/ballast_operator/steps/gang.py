"""A launch on its way: make the gang's pods, all or none, and hand out the plan when all have an address."""

from ballast_policies.contract import Directive, Plan, Rank

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.desired.access import access_objects
from ballast_operator.desired.lease import lease_object
from ballast_operator.desired.pod import pod_object
from ballast_operator.kube.kinds import LEASE
from ballast_operator.steps.failure import failed
from ballast_operator.steps.outcome import Apply, CreatePod, Outcome, Situation, WritePlan, say, seconds_since
from ballast_operator.steps.stopping import end
from ballast_operator.views.status import Cause, Held


def start_gang(situation: Situation) -> Outcome:
    """One pass of a launch whose plan is not written yet."""
    view = situation.view
    held = _held(situation)
    failure = failed(situation)
    if failure is not None:
        return end(situation, *failure)
    gang = {pod.name: pod for pod in view.gang}
    ready = [gang[name] for name in held.pods if name in gang and gang[name].ready_for_plan]
    late = seconds_since(situation, held.since) - situation.settings.bind_seconds
    if len(ready) < len(held.slots):
        if late >= 0:
            return end(situation, Cause.NOT_BOUND, _not_bound(situation, held, len(ready)))
        status = say(
            situation,
            view.status,
            JobCondition.RUNNING,
            False,
            JobReason.PODS_STARTING,
            f"{len(ready)} of {len(held.slots)} pods run" + _waits(situation),
        )
        return Outcome(status=status, actions=_missing(situation, held), again_seconds=-late)
    plan = Plan(
        job=view.name,
        epoch=(view.plan.epoch if view.plan is not None else 0) + 1,
        launch=held.launch,
        directive=Directive.RUN,
        ranks=tuple(
            Rank(rank=rank, pod=pod.name, address=pod.address, gpu_type=held.gpu_type)
            for rank, pod in enumerate(ready)
        ),
        stages=situation.spec.first_stages(len(ready)),
        reason=f"launch {held.launch} on pool {held.pool}",
    )
    status = say(
        situation,
        view.status,
        JobCondition.RUNNING,
        False,
        JobReason.RANKS_MEETING,
        f"{len(ready)} pods run; ranks connect and load the checkpoint",
    )
    return Outcome(status=status, actions=(WritePlan(plan),), again_seconds=situation.settings.start_seconds)


def _held(situation: Situation) -> Held:
    held = situation.view.status.held
    assert held is not None
    return held


def _missing(situation: Situation, held: Held) -> tuple[Apply | CreatePod, ...]:
    view = situation.view
    there = {pod.name for pod in view.gang}
    absent = [(rank, slot) for rank, slot in enumerate(held.slots) if slot.pod not in there]
    if not absent:
        return ()
    objects = [*access_objects(view), (LEASE, lease_object(view))]
    return (
        *(Apply(kind, body) for kind, body in objects),
        *(
            CreatePod(
                pod_object(
                    view, situation.spec, held, rank=rank, slot=slot, gpu_resource=situation.gpu_resource
                )
            )
            for rank, slot in absent
        ),
    )


def _waits(situation: Situation) -> str:
    waits = [
        f"{pod.name}: {pod.reason} {pod.detail}".strip()
        for pod in situation.view.gang
        if pod.reason and not pod.ready_for_plan
    ]
    return "; " + "; ".join(waits) if waits else ""


def _not_bound(situation: Situation, held: Held, ready: int) -> str:
    return (
        f"only {ready} of {len(held.slots)} pods ran within {situation.settings.bind_seconds:g} s, "
        f"so all are taken back{_waits(situation)}"
    )
