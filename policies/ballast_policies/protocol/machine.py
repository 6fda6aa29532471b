"""The machine: which state a job is in, and the next move in each of them."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from ballast_policies.contract.messages import pod_name
from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.moves import (
    AbandonGrowth,
    BeginGrowth,
    CreatePods,
    Decision,
    DeleteJob,
    End,
    GiveUp,
    Launch,
    Move,
    RecordGrowth,
    RecordShrink,
    RefuseProposal,
    Release,
    State,
    Succeed,
    Wait,
    WaitFor,
    Why,
    WritePlan,
    named_pods_error,
)
from ballast_policies.protocol.observed import (
    Action,
    Cause,
    Deadline,
    Failure,
    Gang,
    Observed,
    Phase,
    Pod,
    ProposedShrink,
    WrittenPlan,
)

SeenFailure = tuple[Cause, Why, tuple[str, ...]]
"""Cause, what was seen, and the pods it was seen on."""


def seen_failure(seen: Observed) -> SeenFailure | None:
    """Failure that keeps the gang from continuing, or None.

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
    if seen.ranks and all(pod.phase is Phase.SUCCEEDED for pod in seen.ranks):
        if seen.steps_added:
            return Cause.STEPS_ADDED, Why.STEPS_ADDED, ()
        if Deadline.QUIET in seen.over:
            return Cause.USER_ERROR, Why.EXITED_EARLY, ()
    late = not seen.reached and Deadline.ACKNOWLEDGEMENT in seen.over
    if seen.reached or plan.directive is not Directive.RUN:
        # A change of size that is late has a cause of its own.
        silent = Deadline.HEARTBEAT in seen.over and any(pod.alive for pod in seen.ranks)
        return (Cause.HUNG, Why.NOT_RENEWED, ()) if silent and not late else None
    return (Cause.HUNG, Why.NOT_STARTED, ()) if late else None


def _script_failure(seen: Observed) -> SeenFailure | None:
    """Failure of a job that runs its template's own command: its pods alone tell.

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
    a failure of theirs counts; with copies of their layers one by the job's own fault).
    """
    gang, plan = seen.gang, seen.gang_plan
    assert gang is not None
    if plan is None:
        return list(seen.gang_pods)
    shrinking = plan.directive is Directive.SHRINK
    found = []
    for pod in seen.gang_pods:
        named = pod.name in plan.pods
        whole = pod.phase is not Phase.FAILED or (seen.copies and pod.failure is not Failure.AT_FAULT)
        leaves = shrinking and not named and (seen.reached or whole)
        joins = not named and pod.name in gang.joining
        if not leaves and not joins:
            found.append(pod)
    return found


def _lost(seen: Observed, gang: list[Pod]) -> SeenFailure | None:
    """A pod or node that was lost; where one rank is told to stop, all do, and that one is the cause."""

    def failed(pod: Pod) -> SeenFailure:
        return (Cause.POD_LOST if pod.node_ready else Cause.NODE_LOST), Why.POD_FAILED, (pod.name,)

    for pod in gang:
        if pod.leaving and pod.alive and not pod.leaves:
            return (Cause.POD_LOST if pod.node_ready else Cause.NODE_LOST), Why.POD_DELETED, (pod.name,)
        if pod.phase is Phase.FAILED and pod.failure not in (Failure.PEER_LOST, Failure.STOPPED):
            return failed(pod)
    stopped = [pod for pod in gang if pod.failure is Failure.STOPPED]
    dead = tuple(pod.name for pod in gang if not pod.node_ready)
    if dead and (stopped or Deadline.QUIET in seen.over):
        return Cause.NODE_LOST, Why.NODE_SILENT, dead
    return failed(stopped[0]) if stopped and not seen.settling else None


def lost_in_place(seen: Observed, state: State) -> SeenFailure | None:
    """The loss after which the ranks that are left train on, from their copies; None: there is none.

    As a shrink that nobody has asked for: they go on under the plan without the lost pods. Not while a plan
    is not acknowledged, unless all that it leaves out are lost, too; and not where a rank has saved and
    stopped.
    """
    plan = seen.gang_plan
    meets = seen.reached and state in (State.TRAINING, State.JOINING)
    again = state is State.SHRINKING and not any(pod.answers for pod in seen.released)
    if not seen.copies or plan is None or not (meets or again):
        return None
    failure = seen_failure(seen)
    if failure is None or failure[0] not in (Cause.POD_LOST, Cause.NODE_LOST):
        return None
    stopped = any(pod.failure is Failure.STOPPED for pod in seen.ranks)
    return failure if not stopped and _are_left(seen, plan, failure[2]) else None


def leaving_nodes(seen: Observed, state: State) -> SeenFailure | None:
    """Reason that a gang on nodes about to go has to end now; None: it continues, or none goes.

    With survivors it shrinks onto them, live. Otherwise it saves as soon as it is given other GPUs, and at
    the latest when there is just the time.
    """
    gang, offer, leaving = seen.gang, seen.offer, seen.leaving
    if gang is None or not leaving:
        return None
    late = (Deadline.NOTICE in seen.over and not _may_be_lost(seen, state)) or state is State.STARTING
    placed = offer is not None and offer.launch == gang.launch and offer.kind is Action.PLACE
    moves = placed and not seen.survivors and state not in (State.SHRINKING, State.GROWING)
    return (Cause.NODE_LEAVING, Why.NODE_LEAVES, leaving) if late or moves else None


def _may_be_lost(seen: Observed, state: State) -> bool:
    """True if the others go on in place without the pods that go, should these end before they have left."""
    plan = seen.gang_plan
    if not seen.copies or plan is None:
        return False
    if state is State.SHRINKING:
        return not set(seen.leaving) & set(plan.pods)
    return seen.reached and state in (State.TRAINING, State.JOINING) and _are_left(seen, plan, seen.leaving)


def state_of(seen: Observed) -> State:
    """The state a job is in."""
    gang, plan = seen.gang, seen.gang_plan
    if seen.ended:
        return State.ENDED
    if gang is None:
        return State.WAITING
    if gang.ending is not None:
        return State.COMPLETING if seen.done or gang.ending is Cause.COMPLETED else State.STOPPING
    if plan is None:
        return State.STARTING
    if gang.joining:
        return State.GROWING if gang.joining[0] in plan.pods else State.JOINING
    if plan.directive is Directive.SHRINK and len(plan.pods) < len(gang.pods):
        return State.SHRINKING
    return State.TRAINING


def next_move(seen: Observed) -> Decision:
    """The next move of a job; nothing but ``seen`` is read, and nothing is remembered."""
    state = state_of(seen)
    interruption = _interruption(seen, state)
    made = MOVES[state](seen) if interruption is None else interruption
    decision = made if isinstance(made, Decision) else Decision(state, made)
    abandoned = _deleting(
        state, seen, tuple(pod for pod in seen.abandoned if pod.name not in decision.delete)
    )
    return dataclasses.replace(
        decision, delete=(*abandoned.delete, *decision.delete), force=abandoned.force | decision.force
    )


def _interruption(seen: Observed, state: State) -> End | None:
    """Reason that a launch that is not ending yet has to end, whatever is under way."""
    gang, offer = seen.gang, seen.offer
    if gang is None or gang.ending is not None or state is State.ENDED:
        return None
    if seen.done:
        # A shrink that rank 0 has acknowledged was done before the job was: it is recorded first.
        recorded_first = state is State.SHRINKING and seen.reached
        return None if recorded_first else end(seen, Cause.COMPLETED, Why.DONE)
    if seen.suspended:
        return end(seen, Cause.SUSPENDED, Why.SUSPENDED)
    leaving = leaving_nodes(seen, state)
    if leaving is not None:
        return end(seen, *leaving)
    taken_back = offer is not None and offer.launch == gang.launch and offer.kind is not Action.KEEP
    if seen.leaving and not seen.survivors:
        taken_back = False  # no other job can use these GPUs: it trains until the time is up
    # A change of size that the plan announces is finished first, unless a released pod does not end.
    hangs = state is State.SHRINKING and seen.reached and Deadline.EXIT in seen.over
    if taken_back and (hangs or state not in (State.SHRINKING, State.GROWING)):
        return end(seen, Cause.PREEMPTED, Why.TAKEN_BACK)
    failure = seen_failure(seen)
    return None if failure is None or lost_in_place(seen, state) else end(seen, *failure)


def end(seen: Observed, cause: Cause, why: Why, pods: tuple[str, ...] = ()) -> End:
    """The move that ends the gang's launch."""
    assert seen.gang is not None
    return End(dataclasses.replace(seen.gang, ending=cause), cause, why, pods)


def _waiting(seen: Observed) -> Move:
    offer = seen.offer
    if seen.abandoned:
        return Wait(WaitFor.OLD_PODS)
    if seen.suspended:
        return GiveUp() if seen.fails else Wait(WaitFor.RESUME)
    if Deadline.PAUSE not in seen.over:
        return Wait(WaitFor.PAUSE, Deadline.PAUSE)
    if offer is None or offer.launch != seen.launches or offer.kind is Action.KEEP:
        return Wait(WaitFor.DECISION)
    if offer.kind is Action.RELEASE or not offer.size:
        return Wait(WaitFor.GPUS)
    if not seen.gpus_free:
        return Wait(WaitFor.FREE_GPUS)
    launch = seen.launches + 1
    return Launch(Gang(launch, tuple(pod_name(seen.job, launch, number) for number in range(offer.size))))


def _starting(seen: Observed) -> Move:
    gang = seen.gang
    assert gang is not None
    pods = {pod.name: pod for pod in seen.gang_pods}
    if all(name in pods and seen.may_start(pods[name]) for name in gang.pods):
        return WritePlan(seen.next_epoch, Directive.RUN, gang.pods)
    if Deadline.BIND in seen.over:
        # What is wrong with the job does not pass: it counts, so that the job fails in the end.
        broken = tuple(pod.name for pod in pods.values() if pod.broken)
        cause = Cause.USER_ERROR if broken else Cause.NOT_BOUND
        return end(seen, cause, Why.NOT_RUNNING_IN_TIME, broken)
    if not pods and not seen.gpus_free:
        # A leader that has just lost its lease may have written this launch while another was written.
        return end(seen, Cause.NOT_BOUND, Why.GPUS_TAKEN)
    if seen.script and pods and gang.pods[0] not in pods:
        # The others have been told the address of a rank 0 that is gone.
        return end(seen, Cause.POD_LOST, Why.POD_MISSING, gang.pods[:1])
    return _make_missing(gang.pods, pods)


def _make_missing(wanted: Iterable[str], there: Mapping[str, Pod]) -> CreatePods | Wait:
    missing = tuple(name for name in wanted if name not in there)
    return CreatePods(missing) if missing else Wait(WaitFor.PODS, Deadline.BIND)


def _training(seen: Observed) -> Move:
    gang, plan, proposal = seen.gang, seen.gang_plan, seen.proposal
    assert gang is not None and plan is not None
    if not seen.reached:
        return Wait(WaitFor.TRAINER)
    if lost_in_place(seen, State.TRAINING):
        return WritePlan(seen.next_epoch, Directive.SHRINK, seen.survivors)
    if seen.leaving:
        return _shrink_for_drain(seen, plan)
    is_open = proposal is not None and proposal.epoch == plan.epoch and not seen.script
    if is_open and proposal is not None and _splits(plan, proposal):
        return WritePlan(seen.next_epoch, Directive.SHRINK, proposal.kept)
    kept = _asked_to_keep(seen, gang, plan)
    if kept:
        return WritePlan(seen.next_epoch, Directive.SHRINK, kept)
    if _may_grow(seen, gang, plan):
        assert seen.offer is not None
        first = max(pod.number for pod in seen.gang_pods) + 1
        new = tuple(pod_name(seen.job, gang.launch, first + i) for i in range(seen.offer.size))
        larger = Gang(gang.launch, (*gang.pods, *new), joining=new, first_newcomer=first)
        return BeginGrowth(larger)
    return RefuseProposal() if is_open else Wait(WaitFor.TRAINER)


def _splits(plan: WrittenPlan, proposal: ProposedShrink) -> bool:
    """True if the proposal is one that the job wants, and splits the pods of the plan."""
    return proposal.wanted and not named_pods_error(plan.pods, proposal.kept, proposal.released)


def _may_grow(seen: Observed, gang: Gang, plan: WrittenPlan) -> bool:
    """True if the allocator offers GPUs to this very gang, and it is in a state to take them."""
    offer = seen.offer
    if offer is None or offer.kind is not Action.KEEP or offer.launch != gang.launch:
        return False
    offered = not seen.script and offer.size > 0 and offer.same_placement and seen.gpus_free
    # A rank that has ended still counts as the gang's, but no longer as a pod on its node.
    whole = set(plan.pods) == set(gang.pods) == {pod.name for pod in seen.gang_pods if pod.alive}
    return offered and whole and not seen.abandoned


def _shrinking(seen: Observed) -> Move | Decision:
    gang, plan = seen.gang, seen.gang_plan
    assert gang is not None and plan is not None
    if not seen.reached and lost_in_place(seen, State.SHRINKING):
        return WritePlan(seen.next_epoch, Directive.SHRINK, seen.survivors)
    late = _unacknowledged(seen, Cause.SHRINK_TIMEOUT)
    if late is not None:
        return late
    if seen.released:
        return _deleting(State.SHRINKING, seen, seen.released)
    smaller = dataclasses.replace(gang, pods=plan.pods)
    released = tuple(name for name in gang.pods if name not in plan.pods)
    return RecordShrink(smaller, released)


def _joining(seen: Observed) -> Move:
    gang, plan = seen.gang, seen.gang_plan
    assert gang is not None and plan is not None
    without = dataclasses.replace(
        gang, pods=tuple(name for name in gang.pods if name not in gang.joining), joining=()
    )
    lost = lost_in_place(seen, State.JOINING)
    if lost is not None:
        return AbandonGrowth(without, lost[1], lost[2][0])
    new = {pod.name: pod for pod in seen.gang_pods if pod.name in gang.joining}
    for pod in new.values():
        if not pod.alive or pod.leaving:
            why = Why.POD_DELETED if pod.alive else Why.POD_FAILED
            return AbandonGrowth(without, why, pod.name)
    for pod in seen.gang_pods:
        if pod.leaves:
            return AbandonGrowth(without, Why.NODE_LEAVES, pod.name)
    if all(name in new and new[name].ready for name in gang.joining):
        grown = (*plan.pods, *gang.joining)
        return WritePlan(seen.next_epoch, Directive.GROW, grown)
    if Deadline.BIND in seen.over:
        return AbandonGrowth(without, Why.NOT_RUNNING_IN_TIME)
    return _make_missing(gang.joining, new)


def _growing(seen: Observed) -> Move:
    gang, plan = seen.gang, seen.gang_plan
    assert gang is not None and plan is not None
    late = _unacknowledged(seen, Cause.GROW_TIMEOUT)
    joined = dataclasses.replace(gang, pods=plan.pods, joining=())
    return late if late is not None else RecordGrowth(joined)


def _unacknowledged(seen: Observed, cause: Cause) -> Move | None:
    """While rank 0 has not acknowledged the plan: wait, or end the launch."""
    if seen.reached:
        return None
    if Deadline.ACKNOWLEDGEMENT in seen.over:
        return end(seen, cause, Why.NOT_ACKNOWLEDGED)
    return Wait(WaitFor.ACKNOWLEDGEMENT, Deadline.ACKNOWLEDGEMENT)


def _stopping(seen: Observed) -> Move | Decision:
    gang, plan = seen.gang, seen.gang_plan
    assert gang is not None and gang.ending is not None
    failed = any(pod.phase is Phase.FAILED and pod.failure is not Failure.STOPPED for pod in seen.ranks)
    saves = gang.ending.saves_first and plan is not None and Deadline.SAVE not in seen.over and not failed
    # Of a launch that has not begun to train there is nothing to save.
    unstarted = plan is not None and plan.directive is Directive.RUN and not seen.reached
    saves = saves and seen.listens and not unstarted
    if saves and plan is not None and any(pod.alive for pod in seen.ranks):
        if plan.directive is Directive.CHECKPOINT_AND_STOP:
            return Wait(WaitFor.SAVE, Deadline.SAVE)
        return WritePlan(seen.next_epoch, Directive.CHECKPOINT_AND_STOP, plan.pods)
    # A pod at fault has ended and holds no GPU: it stays for its log until the next launch ends.
    left = tuple(
        pod for pod in seen.pods if not (pod.launch == gang.launch and pod.failure is Failure.AT_FAULT)
    )
    if left:
        return _deleting(State.STOPPING, seen, left)
    return Release(failed=gang.ending.counts and not seen.tries_left)


def _completing(seen: Observed) -> Move | Decision:
    """Pods exit by themselves and are kept for their logs; those that do not exit are deleted."""
    alive = tuple(pod for pod in seen.pods if pod.alive)
    if not alive:
        return Succeed()
    if Deadline.EXIT in seen.over:
        return _deleting(State.COMPLETING, seen, alive)
    return Wait(WaitFor.EXIT, Deadline.EXIT)


def _deleting(state: State, seen: Observed, pods: tuple[Pod, ...]) -> Decision:
    """Delete these pods and wait; those on a dead node without grace, since its kubelet cannot confirm it."""
    overdue = Deadline.EXIT in seen.over
    force = frozenset(pod.name for pod in pods if overdue and not pod.node_ready)
    delete = tuple(pod.name for pod in pods if pod.name in force or not pod.leaving)
    return Decision(state, Wait(WaitFor.EXIT), delete, force)


def _ended(seen: Observed) -> Move:
    return DeleteJob() if Deadline.KEPT in seen.over else Wait(WaitFor.READERS, Deadline.KEPT)


MOVES: Mapping[State, Callable[[Observed], Move | Decision]] = {
    State.WAITING: _waiting,
    State.STARTING: _starting,
    State.TRAINING: _training,
    State.SHRINKING: _shrinking,
    State.JOINING: _joining,
    State.GROWING: _growing,
    State.STOPPING: _stopping,
    State.COMPLETING: _completing,
    State.ENDED: _ended,
}
"""State -> what is done in it."""


def _shrink_for_drain(seen: Observed, plan: WrittenPlan) -> Move:
    """Shrink onto the survivors, if rank 0 is one of them; else train on while there is time."""
    if plan.pods[0] in seen.survivors and _are_left(seen, plan, seen.leaving):
        return WritePlan(seen.next_epoch, Directive.SHRINK, seen.survivors)
    return Wait(WaitFor.TRAINER, Deadline.NOTICE)


def _are_left(seen: Observed, plan: WrittenPlan, going: Collection[str]) -> bool:
    """True if the gang can train on with its survivors, and ``going`` are none of them."""
    kept, first = seen.survivors, plan.pods[0]
    # Rank 0 leads a change of size, and is another process only where its own is gone.
    led = first in kept[:1] or not any(pod.name == first and pod.answers for pod in seen.gang_pods)
    smaller = bool(kept) and led and set(kept) <= set(plan.pods) - set(going)
    return smaller and len(set(kept)) == len(kept) and not seen.script


def _asked_to_keep(seen: Observed, gang: Gang, plan: WrittenPlan) -> tuple[str, ...]:
    """Pods that the allocator asks this very gang to continue with; empty: it asks for no shrink."""
    offer = seen.offer
    if offer is None or offer.kind is not Action.KEEP or offer.launch != gang.launch:
        return ()
    if seen.script or not offer.keep or not offer.same_placement or set(plan.pods) != set(gang.pods):
        return ()
    kept = set(offer.keep)
    smaller = kept < set(plan.pods) and len(kept) == len(offer.keep) and offer.keep[0] == plan.pods[0]
    return offer.keep if smaller else ()
