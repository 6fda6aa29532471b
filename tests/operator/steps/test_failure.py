"""A failed launch is told apart by cause; a launch ends once, its pods before its GPUs."""

import dataclasses

import pytest
from ballast_operator.api.training_job import FailurePolicy
from ballast_operator.steps.decide import take_step
from ballast_operator.steps.stopping import begin_termination, describe
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract.messages import Ack, ExitCode, ExitReason, TerminationMessage
from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.observed import Cause

from tests.operator.steps.contexts import (
    NOW,
    PODS,
    a_context,
    a_pod,
    a_report,
    a_running_view,
    after,
    conditions,
    with_ending,
    with_pod,
)
from tests.operator.views.builders import a_plan, a_spec

FAILED = TerminationMessage(reason=ExitReason.FAILED, message="ValueError: boom")
STOPPED = TerminationMessage(reason=ExitReason.STOPPED, message="told to stop; the state is saved")
QUIET = LeaseView(ack=Ack(epoch=1, step=0), quiet_seconds=61.0)
AN_END = {"phase": "Failed", "exit_code": 1}


def peer_lost(rank, *, ended_seconds=None, **lease):
    view = a_running_view(lease=LeaseView(ack=Ack(epoch=1, step=0), **lease))
    how = {"exit_code": int(ExitCode.PEER_LOST), "ended_seconds": ended_seconds}
    return with_pod(view, rank, phase="Failed", **how)


CASES = {
    "every rank trains": (a_running_view(), None),
    "the model raises": (with_pod(a_running_view(), 2, **AN_END, message=FAILED), Cause.USER_ERROR),
    "out of memory": (with_pod(a_running_view(), 2, phase="Failed", reason="OOMKilled"), Cause.USER_ERROR),
    "its node restarted": (
        with_pod(a_running_view(), 2, phase="Failed", exit_code=255, reason="Unknown"),
        Cause.POD_LOST,
    ),
    "evicted": (with_pod(a_running_view(), 2, **AN_END, disrupted=True), Cause.POD_LOST),
    "deleted by someone else": (with_pod(a_running_view(), 2, leaving=True), Cause.POD_LOST),
    "gone without a trace": (
        dataclasses.replace(a_running_view(), pods=a_running_view().pods[:3]),
        Cause.POD_LOST,
    ),
    "its node died": (
        with_pod(a_running_view(), 2, **AN_END, disrupted=True, node_ready=False),
        Cause.NODE_LOST,
    ),
    "its node is silent and so is the job": (
        with_pod(a_running_view(lease=QUIET), 2, node_ready=False),
        Cause.NODE_LOST,
    ),
    "pods run and the lease is not renewed": (a_running_view(lease=QUIET), Cause.HUNG),
    "a rank lost its peer, the other's end is not seen yet": (
        with_pod(a_running_view(), 2, phase="Failed", exit_code=int(ExitCode.PEER_LOST)),
        None,
    ),
    "a rank lost its peer, and the next renewal may still come": (peer_lost(2, quiet_seconds=29.0), None),
    "a rank lost its peer, and no renewal comes": (peer_lost(2, quiet_seconds=31.0), Cause.PEER_LOST),
    "a rank lost its peer, and the lease is given up": (
        peer_lost(2, quiet_seconds=11.0, released=True),
        Cause.PEER_LOST,
    ),
    "the rank that renews lost its peer": (peer_lost(0, quiet_seconds=11.0), Cause.PEER_LOST),
    "the rank that renews lost its peer a moment ago": (
        peer_lost(0, quiet_seconds=25.0, ended_seconds=3.0),
        None,
    ),
    "the lease says that it lasts longer": (
        a_running_view(lease=dataclasses.replace(QUIET, duration_seconds=90.0)),
        None,
    ),
    "the lease says that it lasts for years": (
        a_running_view(lease=dataclasses.replace(QUIET, duration_seconds=1e9, quiet_seconds=601.0)),
        Cause.HUNG,
    ),
    "a pod that the shrink released ends": (
        with_pod(
            a_running_view(plan=a_plan(PODS[:2], epoch=2, directive=Directive.SHRINK), epoch=2),
            3,
            **AN_END,
        ),
        None,
    ),
    "a pod that is still to join fails": (
        dataclasses.replace(
            a_running_view(plan=a_plan(PODS[:3])),
            status=a_running_view().status.replace(
                allocation=a_running_view().status.allocation.replace(joining=(PODS[3],), first_newcomer=3)
            ),
            pods=(*a_running_view().pods[:3], a_pod(PODS[3], 3, **AN_END)),
        ),
        None,
    ),
}


def cause(context):
    ending = take_step(context).status.allocation.ending
    return None if ending is None else ending.cause


@pytest.mark.parametrize("told", [False, True])
def test_a_rank_that_was_told_to_go_does_not_fail_the_job_by_its_exit_code(told):
    """SIGTERM has many a script exit with 1, when another rank's end has ended the launch."""
    view = with_pod(a_running_view(), 2, phase="Failed", exit_code=9)
    view = with_pod(view, 1, phase="Failed", exit_code=1, leaving=told)
    spec = a_spec(failure_policy=FailurePolicy(fail_on=(1,)))
    view = dataclasses.replace(with_ending(view, Cause.USER_ERROR), spec=spec)
    view = dataclasses.replace(view, pods=tuple(pod for pod in view.pods if pod.rank in (1, 2)))
    assert (take_step(a_context(view)).status.finished_at is None) == told


@pytest.mark.parametrize(("view", "want"), CASES.values(), ids=CASES.keys())
def test_a_launch_fails_by(view, want):
    """None: it has not failed, or the first cause is still waited for."""
    assert cause(a_context(view)) == want


TO_STOP = {"phase": "Failed", "exit_code": 75, "message": STOPPED}
LOW = {"reason": "Evicted", "detail": "The node was low on resource: memory."}


@pytest.mark.parametrize(
    ("last", "cause", "words"),
    [
        ({**TO_STOP, **LOW}, Cause.POD_LOST, f"ended with exit code 75 (Evicted): {LOW['detail']}"),
        ({"phase": "Failed", **LOW}, Cause.POD_LOST, f"{PODS[3]} ended (Evicted): {LOW['detail']}"),
        ({"leaving": True}, Cause.POD_LOST, f"pod {PODS[3]} is being deleted by someone else"),
        ({"node_ready": False}, Cause.NODE_LOST, "is not ready"),
        ({}, None, ""),
        (TO_STOP, Cause.POD_LOST, f"pod {PODS[0]} ended with exit code 75"),
    ],
    ids=["evicted", "evicted unsaved", "deleted", "node dead", "not seen yet", "nobody else"],
)
@pytest.mark.parametrize("reason", [ExitReason.STOPPED, ExitReason.STOPPED_UNSAVED])
def test_of_ranks_that_stop_together_the_one_that_was_told_to_is_the_cause(last, cause, words, reason):
    """All save and stop where one is told to; the first alone was not told why, and may be seen first."""
    view, said = a_running_view(), STOPPED.replace(reason=reason)
    for rank in range(3):
        view = with_pod(view, rank, **{**TO_STOP, "message": said})
    ending = take_step(a_context(with_pod(view, 3, **last))).status.allocation.ending
    assert (ending.cause, words in ending.message) == (cause, True) if cause else ending is None


def test_an_end_is_described_by_pod_exit_code_reason_and_message():
    """What the trainer said comes before what the kubelet says."""
    pod = a_pod("job-1-2", 2, **AN_END, message=FAILED, reason="Error")
    assert describe(pod) == f"pod job-1-2 ended with exit code 1 ({ExitReason.FAILED}): ValueError: boom"


def test_a_pod_that_was_killed_for_its_memory_is_told_so_and_not_by_its_last_line():
    """The kernel kills it between two lines of its log."""
    pod = a_pod("job-1-2", 2, phase="Failed", exit_code=137, reason="OOMKilled", detail="INFO step 3 done")
    assert describe(pod) == (
        "pod job-1-2 was killed for its memory (OOMKilled): it used more than its container's limit. "
        "To fix: raise resources.limits.memory in spec.template, or use more stages"
    )


@pytest.mark.parametrize(
    ("cause", "restarts", "pause"),
    [
        (Cause.USER_ERROR, {"UserError": 1}, 2.0),
        (Cause.NODE_LOST, {"NodeLost": 1}, 2.0),
        (Cause.PREEMPTED, {"Preempted": 1}, None),
        (Cause.SUSPENDED, {}, None),
        (Cause.COMPLETED, {}, None),
    ],
)
def test_a_restart_is_counted_in_the_write_that_ends_the_launch(cause, restarts, pause):
    """Failures pause before the next launch; what the operator asked for does not."""
    status = begin_termination(a_context(), cause, "why").status
    assert dict(status.restarts) == restarts
    assert status.next_launch_at == (None if pause is None else after(1 + pause))


@pytest.mark.parametrize(("earlier", "pause"), [(0, 2.0), (1, 4.0), (3, 16.0), (20, 300.0)])
def test_the_pause_before_a_restart_doubles_up_to_its_limit(earlier, pause):
    view = a_running_view()
    view = dataclasses.replace(view, status=view.status.replace(restarts={"UserError": earlier}))
    status = begin_termination(a_context(view), Cause.USER_ERROR, "why").status
    assert status.next_launch_at == after(1 + pause)


def test_a_gang_that_ran_well_restarts_after_the_shortest_pause():
    """Ten minutes of training forgive earlier failures."""
    view = a_running_view()
    view = dataclasses.replace(view, status=view.status.replace(restarts={"UserError": 9}))
    status = begin_termination(a_context(view, seconds=601), Cause.USER_ERROR, "why").status
    assert status.next_launch_at == after(603)


def test_a_change_of_size_under_way_is_aborted_with_the_launch():
    """Its condition does not stay at Repacking."""
    context = a_context()
    status = context.view.status.with_condition(
        "Repacked", False, "Repacking", "releasing", now=NOW, generation=1
    )
    view = dataclasses.replace(context.view, status=status)
    assert conditions(begin_termination(a_context(view), Cause.HUNG, "why"))["Repacked"] == (False, "Hung")


def test_a_failed_gang_is_deleted_without_saving():
    """The pod at fault stays for its log."""
    view = with_pod(a_running_view(), 2, phase="Failed", exit_code=1)
    actions = take_step(a_context(with_ending(view, Cause.USER_ERROR))).actions
    assert [action.name for action in actions] == [PODS[0], PODS[1], PODS[3]]


def test_pods_on_a_dead_node_are_deleted_without_grace():
    """Only after exit_seconds: the node may come back."""
    view = with_ending(with_pod(a_running_view(), 2, node_ready=False), Cause.NODE_LOST)
    assert take_step(a_context(view, seconds=1)).actions[2].grace_seconds is None
    assert take_step(a_context(view, seconds=11)).actions[2].grace_seconds == 0


def test_a_job_that_its_callback_ended_succeeds_with_the_reason():
    """Progress reads what was trained, by the last report; the condition says that it was the callback."""
    report = a_report(step=40, validation_loss=0.5)
    lease = LeaseView(
        ack=Ack(epoch=1, step=0), finished_step=40, end_reason="the loss is low enough", report=report
    )
    running = a_running_view(lease=lease)
    ending = take_step(a_context(running)).status.allocation.ending
    said = "the callback ended the training after 40 of 100 steps: the loss is low enough"
    assert (ending.cause, ending.message) == (Cause.COMPLETED, said)
    ended = tuple(dataclasses.replace(pod, phase="Succeeded") for pod in running.pods)
    view = dataclasses.replace(with_ending(running, Cause.COMPLETED, said), pods=ended)
    result = take_step(a_context(view))
    assert conditions(result)["Succeeded"] == (True, "EndedByCallback")
    assert result.status.condition("Succeeded").message == said
    last = result.status.progress
    assert (last.step, last.percent, last.validation_loss) == (40, 40, 0.5)
