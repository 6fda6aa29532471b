"""A written plan waits for rank 0, up to a limit; moves that free GPUs ask for fresh pods."""

import dataclasses

from ballast_operator.steps.decide import take_step
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack, Directive
from ballast_policies.protocol.cause import Cause

from tests.operator.steps.contexts import (
    PODS,
    a_context,
    a_pod,
    a_running_view,
    place,
    with_ending,
    without_pods,
)
from tests.operator.views.builders import a_plan

SHRUNK = a_plan(PODS[:2], epoch=2, directive=Directive.SHRINK)


def shrinking(*, seconds):
    return a_context(a_running_view(plan=SHRUNK, lease=LeaseView(ack=Ack(epoch=1, step=0))), seconds=seconds)


def test_an_unacknowledged_plan_is_waited_for_until_the_limit():
    """The job is looked at again when the limit is reached, and not changed before."""
    result = take_step(shrinking(seconds=45))
    assert (result.actions, result.status.allocation.ending) == ((), None)
    assert result.requeue_after_seconds == 15.0


def test_a_plan_that_is_not_acknowledged_in_time_ends_the_launch():
    """By its own cause; the message has the change, the epoch and the limit."""
    ending = take_step(shrinking(seconds=61)).status.allocation.ending
    assert ending.cause is Cause.SHRINK_TIMEOUT
    assert "the shrink to 2 pods (epoch 2) was not acknowledged within 60 s" in ending.message


def test_gpus_are_freed_only_on_a_fresh_list_of_pods():
    """A release asks for it; a launch does not."""
    released = take_step(a_context(without_pods(with_ending(a_running_view(), Cause.PREEMPTED))))
    assert released.needs_fresh_view
    assert not take_step(a_context(a_running_view())).needs_fresh_view


def test_a_launch_whose_gpus_another_job_has_taken_is_given_up_before_a_pod_is_made():
    """Only a leader that has just lost its lease can have written it; with a pod made, it waits."""
    view = dataclasses.replace(without_pods(a_running_view()), plan=None, lease=None)
    ending = take_step(a_context(view, shortage="0 of 4 GPUs are free")).status.allocation.ending
    assert ending.cause is Cause.NOT_BOUND and "0 of 4 GPUs are free" in ending.message
    begun = dataclasses.replace(view, pods=a_running_view().pods[:1])
    assert take_step(a_context(begun, shortage="0 of 4 GPUs are free")).status.allocation.ending is None


def test_a_pod_of_an_earlier_launch_is_deleted_while_the_next_one_trains():
    """A creation that arrives late must not hold a GPU until the end."""
    late = dataclasses.replace(a_pod("job-0-7", 7), launch=0)
    view = a_running_view()
    result = take_step(a_context(dataclasses.replace(view, pods=(late, *view.pods)), assignment=place()))
    assert [action.name for action in result.actions] == ["job-0-7"]
    assert result.status.allocation.ending is None


def test_an_old_acknowledgement_is_not_taken_for_one_of_the_next_plan():
    """The plan's ConfigMap was deleted: the next epoch is above what rank 0 has acknowledged."""
    lease = LeaseView(ack=Ack(epoch=5, step=90))
    view = dataclasses.replace(a_running_view(lease=lease), plan=None)
    (action,) = take_step(a_context(view)).actions
    assert action.plan.epoch == 6
