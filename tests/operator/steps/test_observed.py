"""What the state machine sees of a job."""

import math

import pytest
from ballast_operator.steps.observed import observed, seconds_left
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack
from ballast_policies.protocol.cause import Cause
from ballast_policies.protocol.observed import Deadline, OfferKind

from tests.operator.steps.contexts import (
    PODS,
    a_context,
    a_running_view,
    an_idle_view,
    keep,
    place,
    release,
    with_ending,
)


def test_a_running_gang_is_seen_with_its_plan_and_pods():
    """By launch, epoch and names."""
    seen = observed(a_context(a_running_view(epoch=1)))
    assert seen.gang is not None and seen.plan is not None
    assert (seen.gang.launch, seen.gang.pods, seen.gang.ending) == (1, PODS, None)
    assert (seen.plan.epoch, seen.plan.launch, seen.plan.pods) == (1, 1, PODS)
    assert seen.acknowledged == 1


def test_a_job_without_a_launch_has_no_gang():
    """Nor a plan, nor pods."""
    seen = observed(a_context(an_idle_view()))
    assert (seen.gang, seen.plan, seen.pods, seen.launches) == (None, None, (), 0)


def test_the_cause_of_an_ending_is_seen():
    """It decides whether the gang is asked to save."""
    seen = observed(a_context(with_ending(a_running_view(), Cause.PREEMPTED)))
    assert seen.gang is not None
    assert seen.gang.ending is Cause.PREEMPTED


@pytest.mark.parametrize(
    ("assignment", "kind"),
    [(keep(), OfferKind.KEEP), (release(), OfferKind.RELEASE)],
)
def test_a_decision_about_this_launch_is_an_offer(assignment, kind):
    """What the allocator decided for the gang that runs."""
    assert observed(a_context(a_running_view(), assignment=assignment)).offer.kind is kind


def test_a_decision_to_place_is_an_offer_to_a_job_that_waits():
    """And says whether the GPUs are free by now."""
    context = a_context(an_idle_view(), assignment=place(), shortage="node n has 0 of 1 GPUs free")
    seen = observed(context)
    assert seen.offer.kind is OfferKind.PLACE
    assert not seen.gpus_free


def test_a_silent_trainer_runs_out_of_its_heartbeat_deadline():
    """Not before, and never a job that holds nothing."""
    settings = a_context().settings
    for quiet, over in ((0.0, False), (settings.heartbeat_seconds + 1.0, True)):
        view = a_running_view(lease=LeaseView(ack=Ack(epoch=1, step=0), quiet_seconds=quiet))
        context = a_context(view)
        assert (seconds_left(context, Deadline.HEARTBEAT) <= 0) is over
        assert (Deadline.HEARTBEAT in observed(context).over) is over


def test_a_deadline_of_an_ending_is_not_set_while_none_is_under_way():
    """Infinite: it cannot pass."""
    assert seconds_left(a_context(a_running_view()), Deadline.SETTLE) == math.inf
