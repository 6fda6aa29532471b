"""A running gang takes more GPUs: write it down, make the pods, and have them join when all are there.

Up to the plan that names them, newcomers are nobody's peers: what befalls them ends the growth and
leaves the gang alone. From then on they are part of it.
"""

import dataclasses

from ballast_policies.contract import Plan, Rank, pod_name

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.desired.pod import pod_object
from ballast_operator.steps.acknowledgement import awaited
from ballast_operator.steps.cost import accrue
from ballast_operator.steps.failure import describe
from ballast_operator.steps.outcome import (
    CreatePod,
    DeletePod,
    Outcome,
    Situation,
    WritePlan,
    say,
    seconds_since,
)
from ballast_operator.views.job import JobView
from ballast_operator.views.status import Cause, Held, Slot
from ballast_operator.views.wish import Verb


def strays(view: JobView) -> tuple[DeletePod, ...]:
    """Deletions of newcomers that were given up."""
    held = view.status.held
    if held is None:
        return ()
    return tuple(
        DeletePod(pod.name, pod.uid)
        for pod in view.gang
        if pod.name not in held.pods and pod.rank >= held.first_newcomer and not pod.leaving
    )


def wants_to_grow(situation: Situation) -> bool:
    """Whether the allocator offers GPUs to this very gang, and it is in a state to take them."""
    view, wish, held = situation.view, situation.wish, situation.view.status.held
    plan = view.launched_plan
    if wish is None or held is None or plan is None or wish.verb is not Verb.KEEP or not wish.more:
        return False
    same = wish.launches == held.launch and wish.nodes == held.nodes and len(plan.ranks) == len(held.slots)
    return same and view.acknowledged and not situation.shortage and not strays(view)


def begin_growth(situation: Situation) -> Outcome:
    """Write down the larger gang; its pods follow in the next pass."""
    view, wish, held = situation.view, situation.wish, situation.view.status.held
    assert wish is not None and held is not None
    first = max(pod.rank for pod in view.gang) + 1
    new = tuple(
        Slot(pod=pod_name(view.name, held.launch, first + i), node=node) for i, node in enumerate(wish.more)
    )
    status = accrue(situation, view.status)
    held = dataclasses.replace(
        held,
        slots=held.slots + new,
        joining=tuple(slot.pod for slot in new),
        joining_since=situation.now,
        first_newcomer=first,
    )
    status = dataclasses.replace(status, held=held)
    message = f"to join: {', '.join(held.joining)}; no other job can use these GPUs of pool {held.pool}"
    status = say(situation, status, JobCondition.GROWN, False, JobReason.GROWING, message)
    return Outcome(status=status, again_seconds=0.0)


def carry_on_growth(situation: Situation) -> Outcome:
    """One pass of a growth that is written down."""
    view, held, plan = situation.view, situation.view.status.held, situation.view.launched_plan
    assert held is not None and plan is not None and held.joining_since is not None
    if plan.rank_of(held.joining[0]) is not None:
        return _meet(situation, held, plan)
    newcomers = {pod.name: pod for pod in view.gang if pod.name in held.joining}
    ended = next((pod for pod in newcomers.values() if not pod.alive or pod.leaving), None)
    left = situation.settings.bind_seconds - seconds_since(situation, held.joining_since)
    if ended is not None:
        return _give_up(
            situation, held, describe(ended) if not ended.alive else f"pod {ended.name} is deleted"
        )
    ready = [newcomers[name] for name in held.joining if name in newcomers and newcomers[name].ready_for_plan]
    if len(ready) < len(held.joining) and left <= 0:
        limit = situation.settings.bind_seconds
        return _give_up(
            situation, held, f"only {len(ready)} of {len(held.joining)} pods ran within {limit:g} s"
        )
    if len(ready) < len(held.joining):
        makes = tuple(
            CreatePod(
                pod_object(
                    view,
                    situation.spec,
                    held,
                    rank=held.first_newcomer + i,
                    slot=next(slot for slot in held.slots if slot.pod == name),
                    gpu_resource=situation.gpu_resource,
                )
            )
            for i, name in enumerate(held.joining)
            if name not in newcomers
        )
        return Outcome(status=view.status, actions=makes, again_seconds=left)
    new = tuple(
        Rank(rank=len(plan.ranks) + i, pod=pod.name, address=pod.address, gpu_type=held.gpu_type)
        for i, pod in enumerate(ready)
    )
    grown = plan.grow(new, f"no other job can use {len(new)} GPUs of pool {held.pool}")
    return Outcome(
        status=view.status, actions=(WritePlan(grown),), again_seconds=situation.settings.start_seconds
    )


def _meet(situation: Situation, held: Held, plan: Plan) -> Outcome:
    """The plan names the newcomers: done when rank 0 says so."""
    view = situation.view
    waiting = awaited(
        situation,
        plan,
        change="growth",
        seconds=situation.settings.start_seconds,
        cause=Cause.GROW_TIMEOUT,
    )
    if waiting is not None:
        return waiting
    slots = {slot.pod: slot for slot in held.slots}
    held_now = dataclasses.replace(held, slots=tuple(slots[rank.pod] for rank in plan.ranks), joining=())
    status = dataclasses.replace(view.status, held=held_now)
    message = f"{', '.join(held.joining)} joined; {len(plan.ranks)} ranks train"
    status = say(situation, status, JobCondition.GROWN, True, JobReason.RANKS_JOINED, message)
    return Outcome(
        status=status, allocate=True, again_seconds=0.0, counts=(("grown_gpus", "", len(held.joining)),)
    )


def _give_up(situation: Situation, held: Held, why: str) -> Outcome:
    """Back to the gang that trains; its newcomers are deleted as strays, in this pass or the next."""
    status = accrue(situation, situation.view.status)
    smaller = dataclasses.replace(
        held, slots=tuple(slot for slot in held.slots if slot.pod not in held.joining), joining=()
    )
    status = dataclasses.replace(status, held=smaller)
    status = say(
        situation,
        status,
        JobCondition.GROWN,
        False,
        JobReason.GROWTH_GIVEN_UP,
        f"{why}; the gang goes on as it was",
    )
    return Outcome(status=status, allocate=True, again_seconds=0.0)
