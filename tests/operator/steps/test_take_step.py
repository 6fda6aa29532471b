"""A written plan waits for rank 0, up to a limit; moves that free GPUs ask for fresh pods."""

import dataclasses

from ballast_operator.steps.decide import take_step
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack
from ballast_policies.protocol.cause import Cause

from tests.operator.steps.contexts import (
    a_context,
    a_pod,
    a_running_view,
    place,
    without_pods,
)


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
