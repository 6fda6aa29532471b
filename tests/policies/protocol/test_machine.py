"""The state machine holds its promises in every interleaving, and the checker notices when it does not."""

import dataclasses

import pytest
from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.machine import next_move
from ballast_policies.protocol.moves import Decision, End, Release, State
from ballast_policies.protocol.observed import (
    Action,
    Deadline,
    Gang,
    Observed,
    Offer,
    Phase,
    Pod,
    WrittenPlan,
)

from tests.policies.protocol.check import COPIES, SCRIPTS, SMALL, check
from tests.policies.protocol.search import ViolationError
from tests.policies.protocol.steps import Steps

LONG = {
    "all nodes announce that they go",
    "a node goes earlier than announced",
    "a node goes, and answers are lost",
    "a node goes as the gang is preempted",
    "a node goes as the job is suspended",
    "a script, and a leader is replaced with requests under way",
    "a script is preempted for another",
    "the node of a script goes",
    "a pod is lost, and another",
    "a pod is deleted, and its node goes",
    "a pod is lost for a job that waits",
    "a pod is lost as the leader is replaced",
    "a pod is lost as its node goes earlier than announced",
    "a pod is lost as the gang grows back",
    "a pod comes back as the leader is replaced",
    "a node is lost, and its pod is made once more",
    "a node is drained while another job waits",
    "a node goes during an asked shrink",
    "a node goes, and the trainer hangs",
    "preempted as the leader is replaced",
}
"""Half of the seconds of all; each has two things at once that other rows have, too."""


def each(bounds, **jobs):
    """Cases of these bounds; those in LONG are for the night."""
    return [
        pytest.param(bound, jobs, id=name, marks=pytest.mark.nightly if name in LONG else ())
        for name, bound in bounds.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "jobs"), [*each(SMALL), *each(SCRIPTS, script=True), *each(COPIES, copies=True)]
)
def test_every_interleaving_is_safe_and_ends(bound, jobs):
    """No GPU promised twice or free before its pod is gone, no job lost, launched twice, or stuck.

    Of scripts, whose pods alone tell how they are, and of gangs that go on in place without a lost pod, too.
    """
    check(bound, **jobs)


@pytest.mark.parametrize(("over", "ends"), [(frozenset(), False), (frozenset({Deadline.EXIT}), True)])
def test_a_released_pod_that_does_not_end_does_not_keep_the_gang_its_gpus(over, ends):
    """A shrink is finished before the gang is stopped for another; a kubelet that hangs never lets it."""
    plan = WrittenPlan(epoch=2, launch=1, directive=Directive.SHRINK, pods=("a-1-0",))
    pods = tuple(
        Pod(f"a-1-{number}", launch=1, number=number, phase=Phase.RUNNING, leaving=number == 1)
        for number in (0, 1)
    )
    seen = Observed(
        job="a",
        launches=1,
        gang=Gang(1, ("a-1-0", "a-1-1")),
        plan=plan,
        pods=pods,
        acknowledged=2,
        offer=Offer(Action.RELEASE, launch=1),
        over=over,
    )
    assert isinstance(next_move(seen).move, End) is ends


def released_at_once(seen: Observed) -> Decision:
    decision = next_move(seen)
    return Decision(State.STOPPING, Release()) if decision.state is State.STOPPING else decision


def changed(**changes):
    """The machine, blind to something."""
    return lambda seen: next_move(dataclasses.replace(seen, **changes))


def forgets_an_ending(seen: Observed) -> Decision:
    gang = dataclasses.replace(seen.gang, ending=None) if seen.gang is not None else None
    return next_move(dataclasses.replace(seen, gang=gang))


def takes_any_acknowledgement(seen: Observed) -> Decision:
    plan = seen.gang_plan
    return next_move(dataclasses.replace(seen, acknowledged=plan.epoch if plan is not None else 0))


def overlooks_old_pods(seen: Observed) -> Decision:
    if seen.gang is None:
        return next_move(dataclasses.replace(seen, pods=()))
    pods = tuple(pod for pod in seen.pods if pod.launch == seen.gang.launch)
    return next_move(dataclasses.replace(seen, pods=pods))


def never_late(seen: Observed) -> Decision:
    return next_move(dataclasses.replace(seen, over=frozenset({Deadline.PAUSE})))


def deletes_no_abandoned(seen: Observed) -> Decision:
    decision = next_move(seen)
    abandoned = {pod.name for pod in seen.abandoned}
    if decision.state is State.STOPPING:
        return decision
    return dataclasses.replace(
        decision, delete=tuple(name for name in decision.delete if name not in abandoned)
    )


def shrinks_onto_nodes_that_go(seen: Observed) -> Decision:
    plan = seen.gang_plan
    pods = tuple(dataclasses.replace(pod, leaves=pod.leaves and pod.number == 1) for pod in seen.pods)
    kept = plan.pods[:1] if seen.leaving and plan is not None and len(plan.pods) > 1 else ()
    return next_move(dataclasses.replace(seen, pods=pods, survivors=kept))


def leaves_rank_0_out(seen: Observed) -> Decision:
    pods = tuple(dataclasses.replace(pod, node_ready=pod.number > 0) for pod in seen.pods)
    return next_move(dataclasses.replace(seen, pods=pods, survivors=seen.survivors[1:]))


def takes_any_exit_for_the_end(seen: Observed) -> Decision:
    return next_move(
        dataclasses.replace(seen, pods=tuple(dataclasses.replace(p, leaving=False) for p in seen.pods))
    )


MISTAKES = {
    "a gang shrinks onto a node that goes": (
        Steps(shrinks_onto_nodes_that_go),
        ((2,), 2, {"notices": 2}),
        "which leave",
    ),
    "GPUs are released before the pods are gone": (
        Steps(released_at_once),
        ((2,), 2, {"preemptions": 1}),
        "are alive",
    ),
    "whether GPUs are free is not looked at": (
        Steps(changed(gpus_free=True)),
        ((1, 1), 1, {}),
        "are promised one of 1 GPUs",
    ),
    "a job that has ended is continued": (Steps(changed(ended=False)), ((1,), 1, {"crashes": 1}), "changes"),
    "an ending is taken back": (
        Steps(forgets_an_ending),
        ((2,), 2, {"preemptions": 1}),
        "without a written intent",
    ),
    "a shrink is not waited for": (Steps(takes_any_acknowledgement), ((2,), 2, {"shrinks": 1}), "before the"),
    "an asked shrink is not waited for": (
        Steps(takes_any_acknowledgement),
        ((2,), 2, {"asks": 1}),
        "before the",
    ),
    "pods of an earlier launch are overlooked": (
        Steps(overlooks_old_pods),
        ((1,), 1, {"crashes": 1, "in_flight": 1, "preemptions": 1}),
        "no end can be reached",
    ),
    "no deadline ever passes": (Steps(never_late), ((2,), 2, {"hangs": 1}), "no end can be reached"),
    "pods that arrive late are never deleted": (
        Steps(deletes_no_abandoned),
        ((1,), 1, {"crashes": 1, "in_flight": 1, "preemptions": 1}),
        "no end can be reached",
    ),
    "pods are not listed again before GPUs are freed": (
        Steps(fresh=False),
        ((2,), 2, {"lost_answers": 1, "preemptions": 1}),
        "are alive",
    ),
    "GPUs of a launch without an answer are not kept": (
        Steps(reserve=False),
        ((1, 1), 1, {"lost_answers": 1}),
        "are promised one of 1 GPUs",
    ),
    "that the last step is done is not looked at": (
        Steps(changed(finished=False)),
        ((1,), 1, {}),
        "done is launched",
    ),
    "a living rank 0 is left out, and trains on beside the others": (
        Steps(leaves_rank_0_out),
        ((3,), 3, {"kills": 1}),
        "which leads it",
        "copies",
    ),
    "a script's exit as it is deleted is taken for its end": (
        Steps(takes_any_exit_for_the_end),
        ((1,), 1, {"preemptions": 1}),
        "succeeds that is not done",
        "script",
    ),
}
"""Steps of a machine, what is explored, what is found, and of which jobs."""


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_machine_with_a_mistake_is_found_out(mistake):
    """Each guard is needed: without it the checker has a counterexample, with the way there."""
    steps, bound, words, *jobs = mistake
    with pytest.raises(ViolationError, match=words) as caught:
        check(bound, steps, most_states=200_000, **dict.fromkeys(jobs, True))
    assert "  1. " in str(caught.value)
