"""Which step a job's pass takes."""

import dataclasses

import pytest
from ballast_operator.settings import JobSettings
from ballast_operator.steps.context import DeletePod, Surroundings, WritePlan
from ballast_operator.steps.decide import decide, rbac_forbidden, refused
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack, Directive
from ballast_policies.protocol.cause import Cause

from tests.operator.steps.contexts import (
    NOW,
    PODS,
    a_running_view,
    after,
    an_idle_view,
    conditions,
    keep,
    place,
    release,
    with_ending,
    without_pods,
)
from tests.operator.views.builders import a_plan, a_spec


def decided(view, *, assignment=None, seconds=1.0):
    return decide(
        view, assignment=assignment, around=Surroundings(), now=after(seconds), settings=JobSettings()
    )


def ending(result):
    allocation = result.status.allocation
    return None if allocation is None or allocation.ending is None else allocation.ending.cause


def test_pods_of_a_job_that_is_being_deleted_do_not_wait_for_a_finalizer_of_somebody_else():
    """They are deleted, once, and get the time to save; the status stays as it was."""
    view = dataclasses.replace(a_running_view(), deleting=True)
    result = decided(view, assignment=release())
    assert result.status == view.status
    assert result.actions == tuple(DeletePod(pod.name, pod.uid) for pod in view.pods)
    leaving = tuple(dataclasses.replace(pod, leaving=True) for pod in view.pods)
    assert decided(dataclasses.replace(view, pods=leaving), assignment=release()).actions == ()


def test_pods_that_a_deletion_is_to_leave_are_left():
    """By ``kubectl delete --cascade=orphan``."""
    view = dataclasses.replace(a_running_view(), deleting=True, orphans=True)
    assert decided(view, assignment=release()).actions == ()


def test_a_spec_that_cannot_be_used_is_reported_on_the_job():
    """Admitted is False with the field's message."""
    result = decided(an_idle_view(spec=None, spec_problem="spec.totalSteps: missing"))
    assert conditions(result)["Admitted"] == (False, "Misconfigured")
    assert result.status.condition("Admitted").message == "spec.totalSteps: missing"


def test_a_job_without_gpus_is_launched_where_the_allocator_places_it():
    """The launch is written into the status first."""
    result = decided(an_idle_view(), assignment=place())
    assert result.status.allocation.pods == PODS
    assert result.actions == ()


@pytest.mark.parametrize(
    ("changes", "assignment", "want"),
    [
        ({"lease": LeaseView(ack=Ack(epoch=1, step=0), finished_step=100)}, None, Cause.COMPLETED),
        ({"spec": a_spec(suspend=True)}, None, Cause.SUSPENDED),
        ({}, release(why="others are owed more"), Cause.PREEMPTED),
        ({}, release(launches=0), None),
        ({}, keep(), None),
    ],
    ids=["all steps done", "suspended", "released", "released before this launch", "kept"],
)
def test_a_running_gang_ends_when_it_is_done_suspended_or_released(changes, assignment, want):
    """An assignment that answers an earlier launch changes nothing."""
    assert ending(decided(a_running_view(**changes), assignment=assignment)) == want


def test_a_shrink_is_finished_before_the_gpus_are_taken_back():
    """The allocator's release waits until the released pods are accounted for."""
    plan = a_plan(PODS[:2], epoch=2, directive=Directive.SHRINK)
    assert ending(decided(a_running_view(plan=plan), assignment=release())) is None


def test_a_launch_that_is_ending_is_ended_whatever_the_allocator_wants():
    """Its plan becomes checkpointAndStop."""
    result = decided(with_ending(a_running_view(), Cause.PREEMPTED), assignment=keep())
    (action,) = result.actions
    assert isinstance(action, WritePlan) and action.plan.directive is Directive.CHECKPOINT_AND_STOP


def test_an_object_that_the_api_server_refuses_ends_the_launch():
    """A user error: it counts toward backoffLimit."""
    result = refused(without_pods(a_running_view()), "quota", now=NOW, settings=JobSettings())
    assert ending(result) is Cause.USER_ERROR
    assert "quota" in result.status.allocation.ending.message


def test_a_missing_right_is_waited_for_and_ends_nothing():
    """Running says which right, and what grants it."""
    result = rbac_forbidden(a_running_view(), "cannot create pods", now=NOW)
    assert ending(result) is None and result.requeue_after_seconds == 10.0
    assert "cannot create pods. To fix:" in result.status.condition("Running").message
