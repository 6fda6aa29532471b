"""A launch ends: once, saved where that is wanted, its pods before its GPUs."""

import dataclasses

import pytest
from ballast_operator.steps.decide import take_step
from ballast_operator.steps.stopping import begin_termination
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack
from ballast_policies.protocol.cause import Cause

from tests.operator.steps.contexts import (
    NOW,
    PODS,
    a_context,
    a_running_view,
    after,
    conditions,
    with_ending,
    with_pod,
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
    """By restarts of the same cause."""
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
    """Progress reads what was trained; the condition says that it was the callback, and why."""
    lease = LeaseView(ack=Ack(epoch=1, step=0), finished_step=40, end_reason="the loss is low enough")
    running = a_running_view(lease=lease)
    ending = take_step(a_context(running)).status.allocation.ending
    said = "the callback ended the training after 40 of 100 steps: the loss is low enough"
    assert (ending.cause, ending.message) == (Cause.COMPLETED, said)
    ended = tuple(dataclasses.replace(pod, phase="Succeeded") for pod in running.pods)
    view = dataclasses.replace(with_ending(running, Cause.COMPLETED, said), pods=ended)
    result = take_step(a_context(view))
    assert conditions(result)["Succeeded"] == (True, "EndedByCallback")
    assert result.status.condition("Succeeded").message == said
    assert (result.status.progress.step, result.status.progress.percent) == (40, 40)
