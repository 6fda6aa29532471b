"""A launch: all pods of the gang, then its plan."""

import dataclasses

import pytest
from ballast_operator.steps.context import Apply, WritePlan
from ballast_operator.steps.decide import take_step
from ballast_policies.contract import Directive

from tests.operator.steps.contexts import PODS, a_context, conditions, with_pod, without_pods
from tests.operator.views.builders import a_plan, a_spec, a_view


def launched(*, plan=None):
    return a_view(pods=PODS, plan=plan, spec=a_spec())


def lacking_rights(view):
    return dataclasses.replace(view, lacks_rights=True, lacks_account=True)


def test_a_service_account_that_the_launch_has_made_is_not_made_again():
    """It was made while the launch's status was written; the rest is made beside the pods."""
    view = dataclasses.replace(lacking_rights(without_pods(launched())), lacks_account=False)
    needed = [a.kind.kind for a in take_step(a_context(view)).actions if isinstance(a, Apply)]
    assert needed == ["Lease", "Role", "RoleBinding"]


def test_a_pod_that_waits_is_named_with_its_reason():
    """Nothing is created again; the job is looked at when the time for the gang is over."""
    view = with_pod(
        launched(), 2, phase="Pending", address="", reason="ImagePullBackOff", detail="no such image"
    )
    result = take_step(a_context(view, seconds=20))
    assert (result.actions, result.requeue_after_seconds) == ((), 100.0)
    running = result.status.condition("Running")
    assert running.message == "3 of 4 pods run; job-1-2: ImagePullBackOff no such image"


def not_running(reason, detail="", *, pulling=False):
    view = launched()
    for rank in range(4):
        view = with_pod(
            view, rank, phase="Pending", address="", reason=reason, detail=detail, pulling=pulling
        )
    return view


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
