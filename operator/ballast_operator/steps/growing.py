"""Grow a running gang: write it into the status, create the pods, and let them join when all run.

Until the plan names the new pods, a failure of theirs aborts the growth and does not affect the gang.
From then on they are ranks like the others.
"""

from ballast_policies.protocol.moves import AbandonGrowth, Why
from ballast_policies.protocol.observed import Deadline, Gang

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.steps.accounting import accrue_cost, accrue_pause
from ballast_operator.steps.context import (
    JobCounter,
    ReconcileContext,
    StepResult,
    WritePlan,
    with_condition,
)
from ballast_operator.steps.failure import describe, leaving_text
from ballast_operator.steps.gang import creation, ranks_of
from ballast_operator.steps.observed import seconds_left


def begin_growth(context: ReconcileContext, gang: Gang) -> StepResult:
    """Write the larger gang into the status; its pods follow in the next pass."""
    assignment, allocation = context.assignment, context.allocation
    assert assignment is not None
    nodes = assignment.extra_nodes[:: allocation.gpus_per_pod]
    new = dict(zip(gang.joining, nodes, strict=True))
    allocation = allocation.with_pods(
        {**allocation.node_of, **new},
        joining=gang.joining,
        joining_since=context.now,
        first_newcomer=gang.first_newcomer,
    )
    status = accrue_cost(context, context.view.status).replace(allocation=allocation)
    message = f"to join: {', '.join(new)}; no other job can use these GPUs of pool {allocation.pool}"
    status = with_condition(context, status, JobCondition.GROWN, False, JobReason.GROWING, message)
    return StepResult(status=status, requeue_after_seconds=0.0)


def create_newcomers(context: ReconcileContext, pods: tuple[str, ...]) -> StepResult:
    """Create these of the pods that are to join."""
    allocation = context.allocation
    numbers = {name: allocation.first_newcomer + i for i, name in enumerate(allocation.joining)}
    return StepResult(
        status=context.view.status,
        actions=tuple(creation(context, name, numbers[name]) for name in pods),
        requeue_after_seconds=seconds_left(context, Deadline.BIND),
    )


def write_grown_plan(context: ReconcileContext, epoch: int) -> StepResult:
    """All new pods run: the plan's next epoch names them."""
    plan, allocation = context.plan, context.allocation
    pods = {pod.name: pod for pod in context.view.gang}
    new = ranks_of(allocation, allocation.joining, pods, first=len(plan.ranks))
    grown = plan.grow(new, f"no other job can use {len(new)} GPUs of pool {allocation.pool}")
    return StepResult(
        status=context.view.status,
        actions=(WritePlan(grown.replace(epoch=epoch)),),
        requeue_after_seconds=context.settings.start_seconds,
    )


def record_growth(context: ReconcileContext, gang: Gang) -> StepResult:
    """Rank 0 has acknowledged the plan with the new pods."""
    allocation = context.allocation
    node_of = allocation.node_of
    status = accrue_cost(context, context.view.status)
    grown = allocation.with_pods({pod: node_of[pod] for pod in gang.pods}, joining=())
    grown = grown.settled({pod.name: pod.node for pod in context.view.gang})
    grown = grown.resized(context.now, context.change_pause_ms)
    status = status.replace(allocation=grown)
    status = accrue_pause(status, context.change_pause_ms)
    message = f"{', '.join(allocation.joining)} joined; {grown.gpus} ranks train"
    status = with_condition(context, status, JobCondition.GROWN, True, JobReason.RANKS_JOINED, message)
    return StepResult(
        status=status,
        allocate=True,
        requeue_after_seconds=0.0,
        metric_increments=((JobCounter.GROWN_GPUS, "", len(allocation.joining) * allocation.gpus_per_pod),),
    )


def abandon_growth(context: ReconcileContext, move: AbandonGrowth) -> StepResult:
    """Back to the gang that trains; the new pods are deleted in the next pass."""
    return give_up_growth(context, _abandoned_because(context, move))


def give_up_growth(context: ReconcileContext, why: str) -> StepResult:
    """As :func:`abandon_growth`, because of ``why``, as text."""
    allocation = context.allocation
    remaining = {pod: node for pod, node in allocation.node_of.items() if pod not in allocation.joining}
    failed = allocation.failed_growths + 1
    smaller = allocation.with_pods(remaining, joining=()).replace(
        resized_at=context.now.replace(microsecond=0), failed_growths=failed
    )
    status = accrue_cost(context, context.view.status).replace(allocation=smaller)
    message = f"{why}; the gang continues without the new pods"
    status = with_condition(context, status, JobCondition.GROWN, False, JobReason.GROWTH_GIVEN_UP, message)
    return StepResult(status=status, allocate=True, requeue_after_seconds=0.0)


def _abandoned_because(context: ReconcileContext, move: AbandonGrowth) -> str:
    pods = {pod.name: pod for pod in context.view.gang}
    if move.why is Why.POD_DELETED:
        return f"pod {move.pod} is deleted"
    if move.why is Why.NODE_LEAVES:
        return leaving_text(context.allocation.leaving)
    if move.why is Why.POD_FAILED:
        return describe(pods[move.pod])
    joining = context.allocation.joining
    ready = sum(name in pods and pods[name].ready_for_plan for name in joining)
    return f"only {ready} of {len(joining)} pods ran within {context.bind_seconds:g} s"
