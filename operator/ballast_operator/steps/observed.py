"""The state machine's view of a job, read from a pass's context."""

import math
from collections.abc import Callable, Collection, Iterable

from ballast_policies.contract.messages import ExitReason
from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.observed import (
    Action,
    Deadline,
    Failure,
    Gang,
    Observed,
    Offer,
    Phase,
    Pod,
    ProposedShrink,
    WrittenPlan,
)
from ballast_policies.rounds.ledger import in_whole_pods

from ballast_operator.steps.context import ReconcileContext, refusal, seconds_since
from ballast_operator.views.lease import LeaseView
from ballast_operator.views.notices import seconds_to_save
from ballast_operator.views.pod import PodView

DELETION_SECONDS = 5.0
"""Kept of a notice for the deletion of the pods, if the trainer has not saved by then; at most half."""


def observed(context: ReconcileContext) -> Observed:
    """The job as the machine sees it."""
    view, spec, status = context.view, context.spec, context.view.status
    allocation, plan, lease = status.allocation, view.plan, view.lease
    hold, gang = context.hold, None
    if allocation is not None:
        gang = Gang(
            launch=allocation.launch,
            pods=allocation.pods,
            joining=allocation.joining,
            first_newcomer=allocation.first_newcomer,
            ending=allocation.ending.cause if allocation.ending is not None else None,
        )
    going = {pod.name for pod in view.leaving}
    done = lease.finished_step if lease is not None else None
    ignored = spec.asked.failure_policy.ignore if spec.asked.failure_policy is not None else ()
    written = None
    if plan is not None:
        written = WrittenPlan(plan.epoch, plan.launch, plan.directive, plan.pods)
    return Observed(
        job=view.name,
        ended=status.finished,
        launches=status.launches,
        gang=gang,
        plan=written,
        pods=tuple(
            _pod(pod, ignored, leaves=pod.name in going, untold=_untold(context, pod)) for pod in view.pods
        ),
        acknowledged=lease.ack.epoch if lease is not None and lease.ack is not None else 0,
        heard=_heard(lease),
        proposal=_proposal(context),
        finished=view.finished_step is not None or said_to_be_done(context),
        steps_added=done is not None and done == view.launched_steps,
        suspended=hold is not None,
        fails=hold is not None and hold.fails,
        survivors=view.survivors,
        copies=spec.holds_copies,
        offer=_offer(context),
        gpus_free=not context.around.shortage,
        over=frozenset(deadline for deadline in Deadline if seconds_left(context, deadline) <= 0),
        tries_left=status.counted_restarts <= spec.asked.backoff_limit and final_end(context) is None,
        script=spec.is_script,
        listens=view.listens,
    )


def final_end(context: ReconcileContext) -> PodView | None:
    """A pod whose exit code fails the job for good, by ``failurePolicy.failOn``; None: there is none.

    Not one that was being deleted: how it ended says nothing of the job.
    """
    policy = context.spec.asked.failure_policy
    codes = policy.fail_on if policy is not None else ()
    failed = (pod for pod in context.view.gang if pod.at_fault and not pod.leaving)
    return next((pod for pod in failed if pod.exit_code in codes), None)


def said_to_be_done(context: ReconcileContext) -> bool:
    """True if a script's client has named the last step; its ranks may still run."""
    lease = context.view.lease
    last = lease.finished_step if context.spec.is_script and lease is not None else None
    return last is not None and last >= context.spec.config.total_steps


def seconds_left(context: ReconcileContext, deadline: Deadline) -> float:
    """Seconds until ``deadline`` passes; 0 or less: it has; infinite: it is not set."""
    since, limit = _lasted(context, deadline)
    if since is None:
        return math.inf
    left = limit - since
    return min(left, _seconds_to_save(context)) if deadline is Deadline.SAVE else left


def _seconds_to_save(context: ReconcileContext) -> float:
    """Seconds until pods on leaving nodes have to be deleted; infinite: none goes, or one outlasts it."""
    leaving, ending = context.allocation.leaving, context.allocation.ending
    if leaving is None or (ending is not None and ending.since >= leaving.at):
        return math.inf
    notice = max(0.0, (leaving.at - leaving.since).total_seconds())
    return -seconds_since(context, leaving.at) - min(DELETION_SECONDS, notice / 2)


def _lasted(context: ReconcileContext, deadline: Deadline) -> tuple[float | None, float]:
    """Seconds that what ``deadline`` limits has lasted (None: it does not last), and that it may last."""
    view, status, settings = context.view, context.view.status, context.settings
    lease, plan, allocation = view.lease, view.launched_plan, status.allocation
    ending = allocation.ending if allocation is not None else None
    written = view.plan_written if plan is not None else None
    begun = None
    match deadline:
        case Deadline.HEARTBEAT:
            if lease is None or not view.listens:
                return 0.0 if view.listens else None, settings.heartbeat_seconds
            return lease.quiet_seconds, lease.duration(settings.heartbeat_seconds)
        case Deadline.SETTLE:
            failed = [pod for pod in view.gang if pod.phase == Phase.FAILED]
            return _since_end(failed, max) if failed else None, settings.heartbeat_seconds
        case Deadline.QUIET:
            limit = settings.exit_seconds + (settings.renew_seconds if _may_renew(context) else 0.0)
            if lease is None or not view.listens:  # a lease that does not exist will not be renewed
                return math.inf, limit
            return min(lease.quiet_seconds, _since_end(view.gang, min)), limit
        case Deadline.PAUSE:
            at = status.next_launch_at
            return 0.0 if at is None else seconds_since(context, at), 0.0
        case Deadline.BIND:
            limit = context.bind_seconds
            if allocation is not None:
                begun = allocation.joining_since if allocation.joining else allocation.since
        case Deadline.ACKNOWLEDGEMENT:
            shrinks = plan is not None and plan.directive is Directive.SHRINK
            begun, limit = written, settings.shrink_seconds if shrinks else settings.start_seconds
        case Deadline.SAVE:
            begun, limit = ending.since if ending is not None else None, settings.stop_seconds
        case Deadline.EXIT if allocation is None:
            return math.inf, settings.exit_seconds  # what is left of an earlier launch has had its time
        case Deadline.EXIT:
            begun, limit = ending.since if ending is not None else written, settings.exit_seconds
        case Deadline.NOTICE:
            leaving = allocation.leaving if allocation is not None else None
            if leaving is None:
                return None, math.inf
            notice = (leaving.at - leaving.since).total_seconds()
            begun, limit = leaving.at, -seconds_to_save(notice, settings.stop_seconds)
        case Deadline.KEPT:
            begun, limit = status.finished_at, math.inf if view.ttl_seconds is None else view.ttl_seconds
    return None if begun is None else seconds_since(context, begun), limit


def _since_end(pods: Iterable[PodView], which: Callable[[list[float]], float]) -> float:
    """Seconds since the first (max) or last (min) of ``pods`` was seen to have ended; infinite: none has."""
    found = [pod.ended_seconds for pod in pods if pod.ended_seconds is not None]
    return which(found) if found else math.inf


def _may_renew(context: ReconcileContext) -> bool:
    """True if the rank that renews the lease may still run."""
    view, plan = context.view, context.view.launched_plan
    if view.lease is None or view.lease.released or plan is None:
        return False
    return any(pod.alive for pod in view.gang if pod.name == plan.ranks[0].pod)


def _heard(lease: LeaseView | None) -> int:
    """The highest epoch that the trainer has spoken of."""
    heard = (lease.ack, lease.report) if lease is not None else ()
    return max((message.epoch for message in heard if message is not None), default=0)


def _untold(context: ReconcileContext, pod: PodView) -> bool:
    """True if the pod cannot start as the address of a script's rank 0 is not written yet."""
    allocation = context.view.status.allocation
    if allocation is None or not context.spec.is_script or allocation.master_address:
        return False
    return pod.name in allocation.pods[1:]


def _pod(pod: PodView, ignored: Collection[int], *, leaves: bool, untold: bool) -> Pod:
    phase = Phase.PENDING
    if pod.phase in (Phase.SUCCEEDED, Phase.FAILED):
        phase = Phase(pod.phase)
    elif pod.phase == Phase.RUNNING and pod.address:
        phase = Phase.RUNNING
    failure = None
    if phase is Phase.FAILED:
        reason = None if pod.message is None else pod.message.reason
        stopped = reason in (ExitReason.STOPPED, ExitReason.STOPPED_UNSAVED)
        if pod.at_fault and pod.exit_code not in ignored:
            failure = Failure.AT_FAULT
        elif pod.lost_peer:
            failure = Failure.PEER_LOST
        else:
            failure = Failure.STOPPED if stopped else Failure.KILLED
    return Pod(
        name=pod.name,
        launch=pod.launch,
        number=pod.rank,
        phase=phase,
        leaving=pod.leaving,
        forced=pod.forced,
        failure=failure,
        node_ready=pod.node_ready,
        leaves=leaves,
        broken=pod.broken and not untold,
    )


def _proposal(context: ReconcileContext) -> ProposedShrink | None:
    lease = context.view.lease
    proposal = lease.proposal if lease is not None else None
    if proposal is None:
        return None
    open_one = context.view.launched_plan is not None and proposal.epoch == context.plan.epoch
    wanted = open_one and not refusal(context, proposal)
    return ProposedShrink(proposal.epoch, proposal.kept_pods, proposal.released_pods, wanted)


def _offer(context: ReconcileContext) -> Offer | None:
    assignment, allocation = context.assignment, context.view.status.allocation
    if assignment is None:
        return None
    placement, kind = assignment.placement, assignment.action
    per_pod = context.spec.gpus_per_pod if allocation is None else allocation.gpus_per_pod
    nodes = assignment.extra_nodes
    if kind is Action.PLACE:
        nodes = placement.nodes if placement is not None else ()
    if allocation is None and not in_whole_pods(nodes, per_pod):
        return None  # gpusPerPod was changed after the decision
    if allocation is None and nodes and placement is not None:
        spec, size = context.spec, len(nodes)
        if not spec.suits(size) or (spec.plans and spec.degrees_on(placement.by_pool) is None):
            return None  # planner or the degrees were
    kept_pods, plans = assignment.kept_pods, context.view.live_plans
    if allocation is not None and kind is Action.KEEP and allocation.degrees is not None:
        gpus = len(kept_pods) * per_pod or allocation.gpus + len(nodes)
        if gpus not in plans:  # so was planner
            nodes, kept_pods = (), ()
    if allocation is not None and kind is Action.KEEP and not context.view.has_template:
        nodes = ()  # so was the template
    size = len(nodes) // per_pod
    same = allocation is not None and placement == allocation.placement
    return Offer(kind, assignment.launches, size=size, same_placement=same, keep=kept_pods)
