"""Classify a failed launch by cause."""

from ballast_policies.contract import Directive

from ballast_operator.api.cause import Cause
from ballast_operator.steps.context import ReconcileContext, seconds_since
from ballast_operator.views.job import JobView
from ballast_operator.views.pod import PodView

Failure = tuple[Cause, str]


def find_failure(context: ReconcileContext) -> Failure | None:
    """Why the gang cannot continue, or None.

    A rank that dies takes others with it, and their ends may be seen first. Where only ranks that lost a
    peer have ended, the first cause is waited for ``exit_seconds`` (see :func:`settling`).
    """
    view, gang = context.view, _ranks(context.view)
    at_fault = next((pod for pod in gang if pod.at_fault), None)
    if at_fault is not None:
        return Cause.USER_ERROR, describe(at_fault)
    lost = _lost(context, gang)
    if lost is not None:
        return lost
    plan = view.launched_plan
    if plan is None:
        return None
    present = {pod.name for pod in view.gang}
    missing = [rank.pod for rank in plan.ranks if rank.pod not in present]
    if missing:
        return Cause.POD_LOST, f"deleted by someone else: {', '.join(missing)}"
    peers = [pod for pod in gang if pod.lost_peer]
    if peers and not settling(context):
        return Cause.PEER_LOST, f"{describe(peers[0])}; no other rank is to blame"
    return _silent(context, started=view.acknowledged or plan.directive is not Directive.RUN)


def _ranks(view: JobView) -> list[PodView]:
    """Pods whose end is a failure of the gang.

    Not those that are still to join, were given up before they joined, or are released by a shrink (before
    its acknowledgement only a failure of theirs counts).
    """
    released = {pod.name for pod in view.released} if view.shrinking else set()
    ranks = []
    for pod in view.gang:
        outside = pod.name in view.unjoined_pods or _abandoned(view, pod)
        leaves = pod.name in released and (view.acknowledged or pod.phase != "Failed")
        if not outside and not leaves:
            ranks.append(pod)
    return ranks


def _abandoned(view: JobView, pod: PodView) -> bool:
    """Whether the pod belongs to a growth that was given up: never a rank of the gang."""
    allocation, plan = view.status.allocation, view.launched_plan
    if allocation is None or plan is None or view.shrinking:
        return False
    of_growth = allocation.first_newcomer and pod.rank >= allocation.first_newcomer
    return bool(of_growth) and pod.name not in allocation.pods and plan.rank_of(pod.name) is None


def settling(context: ReconcileContext) -> bool:
    """Whether a rank has just ended because of another one, whose end has not been observed yet."""
    quiet = context.view.lease.quiet_seconds if context.view.lease is not None else 0.0
    return quiet < context.settings.exit_seconds and any(
        pod.alive and pod.node_ready for pod in context.view.gang
    )


def describe(pod: PodView) -> str:
    """A pod's end, as text."""
    code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
    said = pod.message.message if pod.message is not None else pod.detail
    reason = pod.message.reason if pod.message is not None else pod.reason
    return f"pod {pod.name} ended{code}" + (f" ({reason})" if reason else "") + (f": {said}" if said else "")


def _lost(context: ReconcileContext, gang: list[PodView]) -> Failure | None:
    for pod in gang:
        if pod.leaving and pod.alive:
            return Cause.POD_LOST, f"pod {pod.name} is being deleted by someone else"
        if pod.phase != "Failed" or pod.lost_peer:
            continue
        if not pod.node_ready:
            return Cause.NODE_LOST, f"node {pod.node} is lost; {describe(pod)}"
        return Cause.POD_LOST, describe(pod)
    dead = sorted({pod.node for pod in gang if pod.node and not pod.node_ready})
    lease = context.view.lease
    if dead and (lease is None or lease.quiet_seconds > context.settings.exit_seconds):
        return Cause.NODE_LOST, f"node {', '.join(dead)} is not ready and the job is silent"
    return None


def _silent(context: ReconcileContext, *, started: bool) -> Failure | None:
    view, settings = context.view, context.settings
    quiet = view.lease.quiet_seconds if view.lease is not None else 0.0
    if started:
        if quiet > settings.heartbeat_seconds and any(pod.alive for pod in view.kept):
            return Cause.HUNG, f"the lease was not renewed for {quiet:.0f} s while pods run"
        return None
    assert view.plan_written is not None
    since = seconds_since(context, view.plan_written)
    if since > settings.start_seconds:
        return Cause.HUNG, f"no acknowledgement of the plan within {settings.start_seconds:g} s"
    return None
