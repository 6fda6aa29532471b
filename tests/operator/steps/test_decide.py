"""Which step a job's pass takes."""

import dataclasses

from ballast_operator.settings import JobSettings
from ballast_operator.steps.context import DeletePod, Surroundings
from ballast_operator.steps.decide import decide, rbac_forbidden

from tests.operator.steps.contexts import (
    NOW,
    a_running_view,
    after,
    release,
)


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


def test_a_missing_right_is_waited_for_and_ends_nothing():
    """Running says which right, and what grants it."""
    result = rbac_forbidden(a_running_view(), "cannot create pods", now=NOW)
    assert ending(result) is None and result.requeue_after_seconds == 10.0
    assert "cannot create pods. To fix:" in result.status.condition("Running").message
