"""Grow a running gang: write it into the status, create the pods, and let them join when all run.

Until the plan names the new pods, a failure of theirs aborts the growth and does not affect the gang.
From then on they are ranks like the others.
"""

from ballast_policies.contract import Rank, pod_name

from ballast_operator.api.cause import Cause
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
from ballast_operator.views.pod import PodView


def delete_abandoned_pods(view: JobView) -> tuple[DeletePod, ...]:
    """Deletions of pods of a growth that was aborted."""
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
    view, assignment = context.view, context.assignment
    allocation, plan = view.status.allocation, view.launched_plan
    if assignment is None or allocation is None or plan is None:
        return False
    offered = assignment.action is AssignmentAction.KEEP and bool(assignment.extra_nodes)
    same_gang = (
        assignment.launches == allocation.launch
        and assignment.placement == allocation.placement
        and len(plan.ranks) == len(allocation.pods)
    )
    able = view.acknowledged and not context.shortage and not delete_abandoned_pods(view)
    return offered and same_gang and able


def begin_growth(context: ReconcileContext) -> StepResult:
    """Write the larger gang into the status; its pods follow in the next pass."""
    view, assignment, allocation = context.view, context.assignment, context.allocation
    assert assignment is not None
    first = max(pod.rank for pod in view.gang) + 1
    new = {
        pod_name(view.name, allocation.launch, first + i): node
        for i, node in enumerate(assignment.extra_nodes)
    }
    allocation = allocation.with_pods(
        {**allocation.node_of, **new},
        joining=tuple(new),
        joining_since=context.now,
        first_newcomer=first,
    )
    status = accrue_cost(context, view.status).replace(allocation=allocation)
    message = f"to join: {', '.join(new)}; no other job can use these GPUs of pool {allocation.pool}"
    status = with_condition(context, status, JobCondition.GROWN, False, JobReason.GROWING, message)
    return StepResult(status=status, requeue_after_seconds=0.0)


def continue_growth(context: ReconcileContext) -> StepResult:
    """One pass of a growth that is in the status: create its pods, write the plan, or abandon it."""
    view, allocation, plan = context.view, context.allocation, context.plan
    assert allocation.joining_since is not None
    if plan.rank_of(allocation.joining[0]) is not None:
        return _await_join(context)
    joining = {pod.name: pod for pod in view.gang if pod.name in allocation.joining}
    for pod in joining.values():
        if not pod.alive or pod.leaving:
            return _abandon(context, f"pod {pod.name} is deleted" if pod.alive else describe(pod))
    ready = [joining[name] for name in allocation.joining if name in joining and joining[name].ready_for_plan]
    if len(ready) == len(allocation.joining):
        return _write_grown_plan(context, ready)
    limit = context.settings.bind_seconds
    left = limit - seconds_since(context, allocation.joining_since)
    if left <= 0:
        return _abandon(
            context, f"only {len(ready)} of {len(allocation.joining)} pods ran within {limit:g} s"
        )
    creations = tuple(
        CreatePod(
            pod_object(
                view,
                context.spec,
                allocation,
                rank=allocation.first_newcomer + i,
                pod=name,
                gpu_resource=context.gpu_resource,
            )
        )
        for i, name in enumerate(allocation.joining)
        if name not in joining
    )
    return StepResult(status=view.status, actions=creations, requeue_after_seconds=left)


def _write_grown_plan(context: ReconcileContext, ready: list[PodView]) -> StepResult:
    """All new pods run: the plan's next epoch names them."""
    plan, allocation = context.plan, context.allocation
    new = tuple(
        Rank(rank=len(plan.ranks) + i, pod=pod.name, address=pod.address, gpu_type=allocation.gpu_type)
        for i, pod in enumerate(ready)
    )
    grown = plan.grow(new, f"no other job can use {len(new)} GPUs of pool {allocation.pool}")
    return StepResult(
        status=context.view.status,
        actions=(WritePlan(grown),),
        requeue_after_seconds=context.settings.start_seconds,
    )


def _await_join(context: ReconcileContext) -> StepResult:
    """The plan names the new pods: the growth is done when rank 0 acknowledges it."""
    plan, allocation = context.plan, context.allocation
    waiting = await_acknowledgement(
        context,
        plan,
        change="growth",
        seconds=context.settings.start_seconds,
        cause=Cause.GROW_TIMEOUT,
    )
    if waiting is not None:
        return waiting
    node_of = allocation.node_of
    grown = allocation.with_pods({rank.pod: node_of[rank.pod] for rank in plan.ranks}, joining=())
    status = context.view.status.replace(allocation=grown)
    message = f"{', '.join(allocation.joining)} joined; {len(plan.ranks)} ranks train"
    status = with_condition(context, status, JobCondition.GROWN, True, JobReason.RANKS_JOINED, message)
    return StepResult(
        status=status,
        allocate=True,
        requeue_after_seconds=0.0,
        metric_increments=(("grown_gpus", "", len(allocation.joining)),),
    )


def _abandon(context: ReconcileContext, why: str) -> StepResult:
    """Back to the gang that trains; the new pods are deleted, in this pass or the next."""
    allocation = context.allocation
    smaller = allocation.with_pods(
        {pod: node for pod, node in allocation.node_of.items() if pod not in allocation.joining}, joining=()
    )
    status = accrue_cost(context, context.view.status).replace(allocation=smaller)
    message = f"{why}; the gang continues without the new pods"
    status = with_condition(context, status, JobCondition.GROWN, False, JobReason.GROWTH_GIVEN_UP, message)
    return StepResult(status=status, allocate=True, requeue_after_seconds=0.0)
