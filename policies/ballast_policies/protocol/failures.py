"""Failures after which a gang cannot continue, told apart by cause."""

from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.cause import Cause
from ballast_policies.protocol.moves import State, Why
from ballast_policies.protocol.observed import Deadline, Failure, Observed, OfferKind, Phase, Pod

SeenFailure = tuple[Cause, Why, tuple[str, ...]]
"""Cause, what was seen, and the pods it was seen on."""


def seen_failure(seen: Observed) -> SeenFailure | None:
    """Why the gang cannot continue, or None.

    A rank that dies takes others with it, and their ends may be seen first. Where only ranks that lost a
    peer have ended, the first cause is waited for (:attr:`Observed.settling`).
    """
    if seen.script:
        return _script_failure(seen)
    gang, plan = _responsible(seen), seen.gang_plan
    for pod in gang:
        if pod.failure is Failure.AT_FAULT:
            return Cause.USER_ERROR, Why.POD_FAILED, (pod.name,)
    lost = _lost(seen, gang)
    if lost is not None or plan is None:
        return lost
    present = {pod.name for pod in seen.gang_pods}
    missing = tuple(name for name in plan.pods if name not in present)
    if missing:
        return Cause.POD_LOST, Why.POD_MISSING, missing
    peers = tuple(pod.name for pod in gang if pod.failure is Failure.PEER_LOST)
    if peers and not seen.settling:
        return Cause.PEER_LOST, Why.POD_FAILED, peers[:1]
    if seen.ranks and all(pod.phase is Phase.SUCCEEDED for pod in seen.ranks) and Deadline.QUIET in seen.over:
        return Cause.USER_ERROR, Why.EXITED_EARLY, ()
    late = not seen.reached and Deadline.ACKNOWLEDGEMENT in seen.over
    if seen.reached or plan.directive is not Directive.RUN:
        # A change of size that is late has a cause of its own.
        silent = Deadline.HEARTBEAT in seen.over and any(pod.alive for pod in seen.ranks)
        return (Cause.HUNG, Why.NOT_RENEWED, ()) if silent and not late else None
    return (Cause.HUNG, Why.NOT_STARTED, ()) if late else None


def _script_failure(seen: Observed) -> SeenFailure | None:
    """Of a job that runs its template's own command: its pods alone tell.

    A rank that loses a peer ends with an error, as one that is wrong does. So an error is taken for the
    job's own only once a lost pod or node would have been seen.
    """
    gang, plan = list(seen.gang_pods), seen.gang_plan
    lost = _lost(seen, [pod for pod in gang if pod.failure is not Failure.AT_FAULT])
    if lost is not None:
        return lost
    present = {pod.name for pod in gang}
    missing = tuple(name for name in plan.pods if name not in present) if plan is not None else ()
    if missing:
        return Cause.POD_LOST, Why.POD_MISSING, missing
    others_run = any(pod.alive for pod in gang)
    for failure, cause in ((Failure.AT_FAULT, Cause.USER_ERROR), (Failure.PEER_LOST, Cause.PEER_LOST)):
        ended = tuple(pod.name for pod in gang if pod.failure is failure)
        if ended and not (others_run and Deadline.SETTLE not in seen.over):
            return cause, Why.POD_FAILED, ended[:1]
    silent = Deadline.HEARTBEAT in seen.over and any(pod.alive for pod in seen.ranks)
    return (Cause.HUNG, Why.NOT_RENEWED, ()) if silent else None


def _responsible(seen: Observed) -> list[Pod]:
    """Pods whose end is a failure of the gang.

    Not those that are still to join, and not those that a shrink releases (before its acknowledgement only
    a failure of theirs counts).
    """
    gang, plan = seen.gang, seen.gang_plan
    assert gang is not None
    if plan is None:
        return list(seen.gang_pods)
    shrinking = plan.directive is Directive.SHRINK
    found = []
    for pod in seen.gang_pods:
        named = pod.name in plan.pods
        leaves = shrinking and not named and (seen.reached or pod.phase is not Phase.FAILED)
        joins = not named and pod.name in gang.joining
        if not leaves and not joins:
            found.append(pod)
    return found


def _lost(seen: Observed, gang: list[Pod]) -> SeenFailure | None:
    for pod in gang:
        if pod.leaving and pod.alive and not pod.leaves:
            return (Cause.POD_LOST if pod.node_ready else Cause.NODE_LOST), Why.POD_DELETED, (pod.name,)
        if pod.phase is Phase.FAILED and pod.failure is not Failure.PEER_LOST:
            return (Cause.POD_LOST if pod.node_ready else Cause.NODE_LOST), Why.POD_FAILED, (pod.name,)
    dead = tuple(pod.name for pod in gang if not pod.node_ready)
    if dead and Deadline.QUIET in seen.over:
        return Cause.NODE_LOST, Why.NODE_SILENT, dead
    return None


def leaving_nodes(seen: Observed, state: State) -> SeenFailure | None:
    """Why a gang that needs nodes which are about to go has to end now; None: it continues, or none goes.

    With survivors it shrinks onto them, live. Otherwise it saves as soon as it is given other GPUs, and at
    the latest when there is just the time.
    """
    gang, offer, leaving = seen.gang, seen.offer, seen.leaving
    if gang is None or not leaving:
        return None
    late = Deadline.NOTICE in seen.over or state is State.STARTING
    placed = offer is not None and offer.launch == gang.launch and offer.kind is OfferKind.PLACE
    moves = placed and not seen.survivors and state not in (State.SHRINKING, State.GROWING)
    return (Cause.NODE_LEAVING, Why.NODE_LEAVES, leaving) if late or moves else None
