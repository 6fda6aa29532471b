"""A running gang takes more GPUs: write it down, make the pods, and have them join when all are there.

Up to the plan that names them, newcomers are nobody's peers: what befalls them ends the growth and
leaves the gang alone. From then on they are part of it.
"""

import dataclasses

from ballast_policies.contract import Plan, Rank, pod_name

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.desired.pod import pod_object
from ballast_operator.steps.accounting import accrue_cost
from ballast_operator.steps.acknowledgement import await_acknowledgement
from ballast_operator.steps.context import (
    CreatePod,
    DeletePod,
    ReconcileContext,
    StepResult,
    WritePlan,
    seconds_since,
    with_condition,
)
from ballast_operator.steps.failure import describe
from ballast_operator.views.assignment import AssignmentAction
from ballast_operator.views.job import JobView
from ballast_operator.views.status import Cause, JobAllocation, Slot


def delete_abandoned_pods(view: JobView) -> tuple[DeletePod, ...]:
    """Deletions of newcomers that were given up."""
    allocation = view.status.allocation
    if allocation is None:
        return ()
    return tuple(
        DeletePod(pod.name, pod.uid)
        for pod in view.gang
        if pod.name not in allocation.pods and pod.rank >= allocation.first_newcomer and not pod.leaving
    )


def wants_to_grow(context: ReconcileContext) -> bool:
    """Whether the allocator offers GPUs to this very gang, and it is in a state to take them."""
    view, assignment, allocation = context.view, context.assignment, context.view.status.allocation
    plan = view.launched_plan
    if (
        assignment is None
        or allocation is None
        or plan is None
        or assignment.action is not AssignmentAction.KEEP
        or not assignment.extra_nodes
    ):
        return False
    same = (
        assignment.launches == allocation.launch
        and assignment.nodes == allocation.nodes
        and len(plan.ranks) == len(allocation.slots)
    )
    return same and view.acknowledged and not context.shortage and not delete_abandoned_pods(view)


def begin_growth(context: ReconcileContext) -> StepResult:
    """Write down the larger gang; its pods follow in the next pass."""
    view, assignment, allocation = context.view, context.assignment, context.view.status.allocation
    assert assignment is not None and allocation is not None
    first = max(pod.rank for pod in view.gang) + 1
    new = tuple(
        Slot(pod=pod_name(view.name, allocation.launch, first + i), node=node)
        for i, node in enumerate(assignment.extra_nodes)
    )
    status = accrue_cost(context, view.status)
    allocation = dataclasses.replace(
        allocation,
        slots=allocation.slots + new,
        joining=tuple(slot.pod for slot in new),
        joining_since=context.now,
        first_newcomer=first,
    )
    status = dataclasses.replace(status, allocation=allocation)
    message = (
        f"to join: {', '.join(allocation.joining)}; no other job can use these GPUs of pool {allocation.pool}"
    )
    status = with_condition(context, status, JobCondition.GROWN, False, JobReason.GROWING, message)
    return StepResult(status=status, requeue_after_seconds=0.0)


def continue_growth(context: ReconcileContext) -> StepResult:
    """One pass of a growth that is written down."""
    view, allocation, plan = context.view, context.view.status.allocation, context.view.launched_plan
    assert allocation is not None and plan is not None and allocation.joining_since is not None
    if plan.rank_of(allocation.joining[0]) is not None:
        return _await_join(context, allocation, plan)
    newcomers = {pod.name: pod for pod in view.gang if pod.name in allocation.joining}
    ended = next((pod for pod in newcomers.values() if not pod.alive or pod.leaving), None)
    left = context.settings.bind_seconds - seconds_since(context, allocation.joining_since)
    if ended is not None:
        return _give_up(
            context, allocation, describe(ended) if not ended.alive else f"pod {ended.name} is deleted"
        )
    ready = [
        newcomers[name] for name in allocation.joining if name in newcomers and newcomers[name].ready_for_plan
    ]
    if len(ready) < len(allocation.joining) and left <= 0:
        limit = context.settings.bind_seconds
        return _give_up(
            context, allocation, f"only {len(ready)} of {len(allocation.joining)} pods ran within {limit:g} s"
        )
    if len(ready) < len(allocation.joining):
        makes = tuple(
            CreatePod(
                pod_object(
                    view,
                    context.spec,
                    allocation,
                    rank=allocation.first_newcomer + i,
                    slot=next(slot for slot in allocation.slots if slot.pod == name),
                    gpu_resource=context.gpu_resource,
                )
            )
            for i, name in enumerate(allocation.joining)
            if name not in newcomers
        )
        return StepResult(status=view.status, actions=makes, requeue_after_seconds=left)
    new = tuple(
        Rank(rank=len(plan.ranks) + i, pod=pod.name, address=pod.address, gpu_type=allocation.gpu_type)
        for i, pod in enumerate(ready)
    )
    grown = plan.grow(new, f"no other job can use {len(new)} GPUs of pool {allocation.pool}")
    return StepResult(
        status=view.status, actions=(WritePlan(grown),), requeue_after_seconds=context.settings.start_seconds
    )


def _await_join(context: ReconcileContext, allocation: JobAllocation, plan: Plan) -> StepResult:
    """The plan names the newcomers: done when rank 0 says so."""
    view = context.view
    waiting = await_acknowledgement(
        context,
        plan,
        change="growth",
        seconds=context.settings.start_seconds,
        cause=Cause.GROW_TIMEOUT,
    )
    if waiting is not None:
        return waiting
    slots = {slot.pod: slot for slot in allocation.slots}
    held_now = dataclasses.replace(
        allocation, slots=tuple(slots[rank.pod] for rank in plan.ranks), joining=()
    )
    status = dataclasses.replace(view.status, allocation=held_now)
    message = f"{', '.join(allocation.joining)} joined; {len(plan.ranks)} ranks train"
    status = with_condition(context, status, JobCondition.GROWN, True, JobReason.RANKS_JOINED, message)
    return StepResult(
        status=status,
        allocate=True,
        requeue_after_seconds=0.0,
        metric_increments=(("grown_gpus", "", len(allocation.joining)),),
    )


def _give_up(context: ReconcileContext, allocation: JobAllocation, why: str) -> StepResult:
    """Back to the gang that trains; its newcomers are deleted as strays, in this pass or the next."""
    status = accrue_cost(context, context.view.status)
    smaller = dataclasses.replace(
        allocation,
        slots=tuple(slot for slot in allocation.slots if slot.pod not in allocation.joining),
        joining=(),
    )
    status = dataclasses.replace(status, allocation=smaller)
    status = with_condition(
        context,
        status,
        JobCondition.GROWN,
        False,
        JobReason.GROWTH_GIVEN_UP,
        f"{why}; the gang goes on as it was",
    )
    return StepResult(status=status, allocate=True, requeue_after_seconds=0.0)
