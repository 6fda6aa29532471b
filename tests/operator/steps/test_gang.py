"""A launch: all pods of the gang, then its plan."""

import dataclasses

import pytest
from ballast_operator.steps.context import Apply, CreatePod, WritePlan
from ballast_operator.steps.decide import take_step
from ballast_policies.contract import Directive
from ballast_policies.protocol.cause import Cause

from tests.operator.steps.contexts import PODS, a_context, conditions, with_pod, without_pods
from tests.operator.views.builders import a_plan, a_spec, a_view


def launched(*, plan=None):
    return a_view(pods=PODS, plan=plan, spec=a_spec())


def lacking_rights(view):
    return dataclasses.replace(view, lacks_rights=True, lacks_account=True)


def test_a_launch_creates_what_pods_need_and_every_pod():
    """The service account before the four pods; lease, role and binding beside them."""
    result = take_step(a_context(lacking_rights(without_pods(launched()))))
    needed = [(action.kind.kind, action.beside) for action in result.actions if isinstance(action, Apply)]
    assert needed == [("ServiceAccount", False), ("Lease", True), ("Role", True), ("RoleBinding", True)]
    assert result.grants_rights
    pods = [action.body["metadata"]["name"] for action in result.actions if isinstance(action, CreatePod)]
    assert pods == list(PODS)
    assert conditions(result)["Running"] == (False, "PodsStarting")


def test_a_service_account_that_the_launch_has_made_is_not_made_again():
    """It was made while the launch's status was written; the rest is made beside the pods."""
    view = dataclasses.replace(lacking_rights(without_pods(launched())), lacks_account=False)
    needed = [a.kind.kind for a in take_step(a_context(view)).actions if isinstance(a, Apply)]
    assert needed == ["Lease", "Role", "RoleBinding"]


def test_a_complete_gang_that_may_lack_rights_is_given_them_before_its_plan():
    """The operator died before it made its role, or its successor does not know."""
    result = take_step(a_context(lacking_rights(launched(plan=a_plan(PODS, launch=7, epoch=4)))))
    assert [action.kind.kind for action in result.actions] == [
        "ServiceAccount",
        "Lease",
        "Role",
        "RoleBinding",
    ]
    assert (result.grants_rights, result.requeue_after_seconds) == (True, 0.0)


def test_a_pod_that_waits_is_named_with_its_reason():
    """Nothing is created again; the job is looked at when the time for the gang is over."""
    view = with_pod(
        launched(), 2, phase="Pending", address="", reason="ImagePullBackOff", detail="no such image"
    )
    result = take_step(a_context(view, seconds=20))
    assert (result.actions, result.requeue_after_seconds) == ((), 100.0)
    running = result.status.condition("Running")
    assert running.message == "3 of 4 pods run; job-1-2: ImagePullBackOff no such image"


def test_a_gang_that_is_not_complete_in_time_is_taken_back():
    """All or none: the launch ends as NotBound."""
    result = take_step(a_context(with_pod(launched(), 2, phase="Pending", address=""), seconds=121))
    assert result.status.allocation.ending.cause is Cause.NOT_BOUND
    assert "only 3 of 4 pods ran within 120 s" in result.status.allocation.ending.message


def not_running(reason, detail="", *, pulling=False):
    view = launched()
    for rank in range(4):
        view = with_pod(
            view, rank, phase="Pending", address="", reason=reason, detail=detail, pulling=pulling
        )
    return view


def test_a_gang_whose_images_are_pulled_is_given_longer():
    """Half an hour in place of two minutes, as long as nothing else is missing."""
    pulls = not_running("PullingImage", pulling=True)
    result = take_step(a_context(pulls, seconds=1000))
    assert (result.actions, result.requeue_after_seconds) == ((), 800.0)
    assert result.status.condition("Running").message == (
        "0 of 4 pods run; job-1-0, job-1-1, job-1-2, job-1-3: PullingImage"
    )
    assert take_step(a_context(pulls, seconds=1801)).status.allocation.ending.cause is Cause.NOT_BOUND
    other = with_pod(pulls, 3, reason="Unschedulable", pulling=False)
    assert take_step(a_context(other, seconds=121)).status.allocation.ending.cause is Cause.NOT_BOUND


@pytest.mark.parametrize(
    ("reason", "detail", "cause"),
    [
        ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root", "UserError"),
        ("ImagePullBackOff", "rpc error: code = NotFound desc = failed to pull", "UserError"),
        ("Unschedulable", '0/3 nodes are available: persistentvolumeclaim "nope" not found.', "UserError"),
        ("ErrImagePull", "rpc error: code = Unavailable desc = connection refused", "NotBound"),
        ("Unschedulable", "pod has unbound immediate PersistentVolumeClaims", "NotBound"),
        ("ContainerCreating", "", "NotBound"),
    ],
)
def test_a_launch_that_can_never_start_counts_as_the_users(reason, detail, cause):
    """What may pass by itself does not."""
    result = take_step(a_context(not_running(reason, detail), seconds=121))
    ending = result.status.allocation.ending
    assert (ending.cause, reason in ending.message) == (cause, True)


def test_a_complete_gang_gets_a_plan_with_every_address():
    """One epoch after the last launch's, eight layers over four ranks."""
    result = take_step(a_context(launched(plan=a_plan(PODS, launch=7, epoch=4))))
    (action,) = result.actions
    assert isinstance(action, WritePlan)
    plan = action.plan
    assert (plan.epoch, plan.launch, plan.directive) == (5, 1, Directive.RUN)
    assert [(rank.pod, rank.address) for rank in plan.ranks] == [
        (pod, f"127.0.1.{rank}") for rank, pod in enumerate(PODS)
    ]
    assert [stage.end_layer for stage in plan.stages] == [2, 4, 6, 8]
    assert conditions(result)["Running"] == (False, "RanksMeeting")
