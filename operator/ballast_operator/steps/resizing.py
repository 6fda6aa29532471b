"""Changes of a running gang's size: by the trainer's proposal, as the allocator asks, or since nodes go.

A growth is written into the status, its pods are created, and they join when all run. Until the plan names
the new pods, a failure of theirs aborts the growth and does not affect the gang. From then on they are ranks
like the others.
"""

from ballast_policies.contract.messages import Proposal, Stage
from ballast_policies.contract.plan import Plan
from ballast_policies.protocol.moves import AbandonGrowth, RecordShrink, Why
from ballast_policies.protocol.observed import Deadline, Gang
from ballast_policies.rounds.values import counted

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.job_allocation import JobAllocation, NodesLeaving
from ballast_operator.api.training_job_status import Repacking, Survivor, TrainingJobStatus
from ballast_operator.steps.accounting import accrue_cost, accrue_pause
from ballast_operator.steps.context import (
    JobCounter,
    ReconcileContext,
    StepResult,
    WritePlan,
    refusal,
    with_condition,
)
from ballast_operator.steps.gang import creation, pod_group, ranks_of
from ballast_operator.steps.observed import seconds_left
from ballast_operator.steps.stopping import describe, leaving_text, lost_text
from ballast_operator.views.clock import Time

KEPT_REPACKS = 20
"""Entries that ``status.repacks`` keeps, newest last."""


def with_leaving_nodes(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status with the nodes of the gang that are about to go, and the condition NodesStay."""
    allocation = status.allocation
    found: NodesLeaving | None = None
    if allocation is not None:
        found = _nodes_leaving(context, allocation)
        if found != allocation.leaving:
            status = status.replace(allocation=allocation.replace(leaving=found))
        if allocation.ending is not None:
            return status  # the time to save is bounded by it, and no more
    known = status.condition(JobCondition.NODES_STAY)
    if found is not None:
        return with_condition(
            context, status, JobCondition.NODES_STAY, False, JobReason.NODE_LEAVING, leaving_text(found)
        )
    if known is None or known.is_true:
        return status
    message = "the gang needs no node that is about to go"
    return with_condition(context, status, JobCondition.NODES_STAY, True, JobReason.NODES_LEFT, message)


def _nodes_leaving(context: ReconcileContext, allocation: JobAllocation) -> NodesLeaving | None:
    """The nodes that go, and when the first does. A notice without a time counts from when it was seen."""
    now, known = context.now.replace(microsecond=0), allocation.leaving
    unbound = known.since if known is not None else now
    seen: dict[str, Time] = {}
    for pod in context.view.leaving:
        before = known.seen_first(pod.node) if known is not None else None
        seen[pod.node] = before or (now if pod.node else unbound)
    times = {
        pod: pod.leaves.goes_at(seen[pod.node]) for pod in context.view.leaving if pod.leaves is not None
    }
    if not times:
        return None
    first = min(times, key=lambda pod: times[pod])
    assert first.leaves is not None
    nodes = tuple(sorted(node for node in seen if node))
    return NodesLeaving(
        nodes=nodes,
        seen=tuple(seen[node] for node in nodes),
        by=first.leaves.by[:1024],
        since=seen[first.node],
        at=times[first].replace(microsecond=0),
    )


def _open_proposal(context: ReconcileContext) -> Proposal:
    lease = context.view.lease
    assert lease is not None and lease.proposal is not None
    return lease.proposal


def refuse_proposal(context: ReconcileContext) -> StepResult:
    """Say why the trainer's proposal is refused."""
    proposal = _open_proposal(context)
    message = f"proposal of step {proposal.step} refused: {refusal(context, proposal)}"
    status = with_condition(
        context, context.view.status, JobCondition.REPACKED, False, JobReason.PROPOSAL_REFUSED, message
    )
    return StepResult(status=status)


def write_shrink(context: ReconcileContext, epoch: int, kept: tuple[str, ...]) -> StepResult:
    """Write the plan of the pods ``kept``: the open proposal's, or those that the allocator asks for."""
    lease = context.view.lease
    proposal = lease.proposal if lease is not None else None
    is_open = proposal is not None and proposal.epoch == context.plan.epoch and proposal.kept_pods == kept
    if is_open and proposal is not None and not refusal(context, proposal):
        smaller, kind, reason = context.plan.shrink(proposal), JobCondition.REPACKED, JobReason.REPACKING
        message = f"releasing {', '.join(proposal.released_pods)}: {proposal.reason}"
    else:
        smaller, message = _asked_to_shrink(context, kept)
        kind, reason = JobCondition.SHRUNK, JobReason.SHRINKING
    return StepResult(
        status=with_condition(context, context.view.status, kind, False, reason, message),
        actions=(WritePlan(smaller.replace(epoch=epoch)),),
        requeue_after_seconds=context.settings.shrink_seconds,
    )


def _asked_to_shrink(context: ReconcileContext, kept: tuple[str, ...]) -> tuple[Plan, str]:
    """(the plan with fewer pods, onto which the trainer moves the layers; why, as text)."""
    assignment, plan = context.assignment, context.plan
    released = [pod for pod in plan.pods if pod not in kept]
    gpus = len(released) * context.allocation.gpus_per_pod
    why = assignment.why if assignment is not None else ""
    leaving = context.allocation.leaving
    if lost := context.view.lost.intersection(released):
        reason, why = lost_text(context, lost), ""
    elif leaving is not None:
        reason, why = leaving_text(leaving), ""
    else:
        reason = f"the allocator needs {gpus} of {len(plan.ranks)} GPUs"
    smaller = plan.keep(kept, reason, leaving.at.timestamp() if leaving is not None else None)
    smaller = smaller.replace(stages=_planned_stages(context, len(smaller.ranks)))
    return smaller, f"releasing {', '.join(released)}: {reason}" + (f"; {why}" if why else "")


def _planned_stages(context: ReconcileContext, gpus: int) -> tuple[Stage, ...]:
    """Stages of its planner for so many GPUs; empty, without one: the trainer chooses."""
    degrees = context.view.live_plans.get(gpus)
    return () if degrees is None else context.spec.with_degrees(degrees).first_stages(gpus)


def _as_cut(context: ReconcileContext, allocation: JobAllocation) -> JobAllocation:
    """The allocation with the planned degrees of its size, whose layers the plan in force has cut."""
    degrees = context.view.live_plans.get(allocation.gpus, allocation.degrees)
    layers = tuple(stage.end_layer - stage.first_layer for stage in context.plan.stages)
    if degrees is not None and layers:
        degrees = degrees.replace(layers=layers)
    return allocation.replace(degrees=degrees)


def _degrees(allocation: JobAllocation) -> str:
    """Degrees as text to append."""
    return "" if allocation.degrees is None else f"; {allocation.degrees}"


def record_shrink(context: ReconcileContext, move: RecordShrink) -> StepResult:
    """The released pods are gone: the gang is smaller, and their GPUs are free."""
    node_of, released = context.allocation.node_of, move.released
    shrunk = context.allocation.with_pods({pod: node_of[pod] for pod in move.gang.pods})
    shrunk = _as_cut(context, shrunk.resized(context.now, context.change_pause_ms))
    entry = _record(context, released, shrunk.gpus)
    status = accrue_cost(context, context.view.status)
    status = status.replace(allocation=shrunk, repacks=(*status.repacks, entry)[-KEPT_REPACKS:])
    status = accrue_pause(status, context.change_pause_ms)
    message = (
        f"{', '.join(released)} released at step {entry.step}; {counted(len(shrunk.pods), 'pod', 'continue')}"
    )
    message += _degrees(shrunk)
    kind, reason = JobCondition.REPACKED, JobReason.PODS_RELEASED
    if entry.asked:
        kind, reason = JobCondition.SHRUNK, JobReason.GPUS_GIVEN_BACK
    status = with_condition(context, status, kind, True, reason, message)
    return StepResult(
        status=status,
        actions=pod_group(context, shrunk),
        allocate=True,
        requeue_after_seconds=0.0,
        metric_increments=(
            (JobCounter.REPACKS, "", 1),
            (JobCounter.RELEASED_GPUS, "", len(released) * shrunk.gpus_per_pod),
        ),
    )


def _record(context: ReconcileContext, released: tuple[str, ...], gpus: int) -> Repacking:
    """The entry of ``status.repacks``."""
    view, plan, lease = context.view, context.plan, context.view.lease
    ack = lease.ack if lease is not None else None
    proposal = lease.proposal if lease is not None else None
    uids = {pod.name: pod.uid for pod in view.kept}
    entry = Repacking(
        epoch=plan.epoch,
        time=context.now.replace(microsecond=0),
        released_pods=released,
        survivors=tuple(Survivor(name=pod, uid=uids[pod]) for pod in plan.pods if pod in uids),
        gpus=gpus,
        step=max(0, ack.step) if ack is not None else 0,
        pause_ms=context.change_pause_ms,
    )
    if not _accepted(context, proposal):
        return entry.replace(asked=True, reason=plan.reason[:1024])
    assert proposal is not None
    return entry.replace(
        step_seconds_before=max(0.0, proposal.step_seconds_before),
        step_seconds_after=max(0.0, proposal.step_seconds_after),
        reason=proposal.reason[:1024],
    )


def _accepted(context: ReconcileContext, proposal: Proposal | None) -> bool:
    """True if the plan in force is what the trainer proposed, not what the allocator asked for."""
    plan = context.plan
    if proposal is None or proposal.epoch != plan.epoch - 1 or proposal.reason != plan.reason:
        return False
    return proposal.kept_pods == plan.pods


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
    # Newcomers are made for these degrees, whatever becomes of the planner meanwhile.
    degrees = context.view.live_plans.get(allocation.gpus)
    allocation = allocation.replace(degrees=degrees)
    status = accrue_cost(context, context.view.status).replace(allocation=allocation)
    pool = allocation.by_pool[-1].pool
    message = f"to join: {', '.join(new)}; no other job can use these GPUs of pool {pool}"
    status = with_condition(context, status, JobCondition.GROWN, False, JobReason.GROWING, message)
    return StepResult(status=status, requeue_after_seconds=0.0)


def create_newcomers(context: ReconcileContext, pods: tuple[str, ...]) -> StepResult:
    """Create these of the pods that are to join."""
    allocation = context.allocation
    numbers = {name: allocation.first_newcomer + i for i, name in enumerate(allocation.joining)}
    return StepResult(
        status=context.view.status,
        actions=(*pod_group(context), *(creation(context, name, numbers[name]) for name in pods)),
        requeue_after_seconds=seconds_left(context, Deadline.BIND),
    )


def write_grown_plan(context: ReconcileContext, epoch: int) -> StepResult:
    """All new pods run: the plan's next epoch names them."""
    plan, allocation = context.plan, context.allocation
    pods = {pod.name: pod for pod in context.view.gang}
    new = ranks_of(allocation, allocation.joining, pods, first=len(plan.ranks))
    pool = allocation.by_pool[-1].pool
    grown = plan.grow(new, f"no other job can use {len(new)} GPUs of pool {pool}")
    if allocation.degrees is not None:
        grown = grown.replace(stages=context.spec.first_stages(len(grown.ranks)))
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
    message = f"{', '.join(allocation.joining)} joined; {grown.gpus} ranks train{_degrees(grown)}"
    status = with_condition(context, status, JobCondition.GROWN, True, JobReason.RANKS_JOINED, message)
    return StepResult(
        status=status,
        allocate=True,
        requeue_after_seconds=0.0,
        metric_increments=((JobCounter.GROWN_GPUS, "", len(allocation.joining) * allocation.gpus_per_pod),),
    )


def give_up_growth(context: ReconcileContext, why: str) -> StepResult:
    """Back to the gang that trains; the new pods are deleted in the next pass. ``why``: as text."""
    allocation = context.allocation
    remaining = {pod: node for pod, node in allocation.node_of.items() if pod not in allocation.joining}
    failed = allocation.failed_growths + 1
    smaller = allocation.with_pods(remaining, joining=()).replace(
        resized_at=context.now.replace(microsecond=0), failed_growths=failed
    )
    smaller = _as_cut(context, smaller)
    status = accrue_cost(context, context.view.status).replace(allocation=smaller)
    message = f"{why}; the gang continues without the new pods"
    status = with_condition(context, status, JobCondition.GROWN, False, JobReason.GROWTH_GIVEN_UP, message)
    group = pod_group(context, smaller)
    return StepResult(status=status, actions=group, allocate=True, requeue_after_seconds=0.0)


def why_abandoned(context: ReconcileContext, move: AbandonGrowth) -> str:
    """Reason that a growth is given up, with numbers and names."""
    pods = {pod.name: pod for pod in context.view.gang}
    if move.pod in context.view.lost:
        return lost_text(context, {move.pod})
    if move.why is Why.POD_DELETED:
        return f"pod {move.pod} is deleted"
    if move.why is Why.NODE_LEAVES:
        return leaving_text(context.allocation.leaving)
    if move.why is Why.POD_FAILED:
        return describe(pods[move.pod])
    joining = context.allocation.joining
    ready = sum(name in pods and pods[name].ready_for_plan for name in joining)
    return f"only {ready} of {len(joining)} pods ran within {context.bind_seconds:g} s"
