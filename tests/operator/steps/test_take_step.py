"""Which step a job's pass takes: it waits with a reason, is launched with all its pods, and gets its plan."""

import dataclasses

import pytest
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.settings import JobSettings
from ballast_operator.steps.context import (
    Apply,
    DeletePod,
    Surroundings,
    WritePlan,
    apply_allocator_conditions,
    with_condition,
)
from ballast_operator.steps.decide import decide, take_step
from ballast_operator.steps.gang import LOOK_AGAIN_SECONDS, decided
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract.messages import Ack
from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.observed import Cause
from ballast_policies.scheduling.refusals import Verdict

from tests.operator.steps.contexts import (
    PODS,
    a_context,
    a_pod,
    a_running_view,
    after,
    an_idle_view,
    conditions,
    keep,
    place,
    release,
    with_pod,
    without_pods,
)
from tests.operator.views.builders import a_config, a_plan, a_spec, a_view


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


def step_of(view, *, assignment=None, seconds=1.0):
    return decide(
        view, assignment=assignment, around=Surroundings(), now=after(seconds), settings=JobSettings()
    )


def ending(result):
    allocation = result.status.allocation
    return None if allocation is None or allocation.ending is None else allocation.ending.cause


def test_pods_of_a_job_that_is_being_deleted_do_not_wait_for_a_finalizer_of_somebody_else():
    """They are deleted, once, and get the time to save; the status stays as it was."""
    view = dataclasses.replace(a_running_view(), deleting=True)
    result = step_of(view, assignment=release())
    assert result.status == view.status
    assert result.actions == tuple(DeletePod(pod.name, pod.uid) for pod in view.pods)
    leaving = tuple(dataclasses.replace(pod, leaving=True) for pod in view.pods)
    assert step_of(dataclasses.replace(view, pods=leaving), assignment=release()).actions == ()


def test_pods_that_a_deletion_is_to_leave_are_left():
    """By ``kubectl delete --cascade=orphan``."""
    view = dataclasses.replace(a_running_view(), deleting=True, orphans=True)
    assert step_of(view, assignment=release()).actions == ()


ON_TIME = Verdict(JobCondition.ON_TIME, True, JobReason.DEADLINE_WITHIN_REACH, "kept")


def test_a_transition_time_moves_only_when_the_truth_of_a_condition_changes():
    """A new reason or message alone keeps it."""
    first = with_condition(
        a_context(seconds=1), a_context().view.status, "Running", False, "PodsStarting", "0 of 4"
    )
    later = a_context(seconds=2)
    same = with_condition(later, first, "Running", False, "RanksMeeting", "4 of 4").condition("Running")
    assert (same.last_transition_time, same.reason) == (after(1), "RanksMeeting")
    flipped = with_condition(later, first, "Running", True, "AllRanksTrain", "").condition("Running")
    assert flipped.last_transition_time == after(2)


def test_the_allocators_conditions_are_set_and_dropped_with_its_assignment():
    """Before the first assignment they stay as they are; other conditions always do."""
    status = apply_allocator_conditions(a_context(assignment=keep(advice=(ON_TIME,))))
    assert status.is_true(JobCondition.ON_TIME)
    status = with_condition(a_context(), status, "Running", True, "AllRanksTrain", "")
    view = a_running_view(status=status)
    assert apply_allocator_conditions(a_context(view)).is_true(JobCondition.ON_TIME)
    dropped = apply_allocator_conditions(a_context(view, assignment=keep()))
    assert [condition.type for condition in dropped.conditions] == ["Running"]


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


@pytest.mark.parametrize(("alone", "cause"), [(True, "NotBound"), (False, "UserError")])
def test_ranks_of_a_script_that_wait_for_what_the_operator_writes_are_not_the_users_fault(alone, cause):
    """It could not write the address of rank 0, which runs, in time: an API server was away, or it was."""
    script = a_spec(config=a_config(model=None, repack={"enabled": False}))
    view = not_running("CreateContainerConfigError", "couldn't find key launch-1 in configmap job-rendezvous")
    running = launched().pods[:1] if alone else view.pods[:1]
    view = dataclasses.replace(view, spec=script, pods=(*running, *view.pods[1:]))
    assert take_step(a_context(view, seconds=121)).status.allocation.ending.cause == cause


def test_a_script_runs_with_its_plans_writing_and_is_looked_at_again_at_once():
    """Nothing that it says asks for the next pass: it was starting until the time for a start was over."""
    script = a_spec(config=a_config(model=None, repack={"enabled": False}))
    view = dataclasses.replace(launched(), spec=script)
    result = take_step(a_context(view))
    (action,) = result.actions
    assert result.requeue_after_seconds == 0.0
    view = dataclasses.replace(view, plan=action.plan, status=result.status)
    assert conditions(take_step(a_context(view)))["Running"] == (True, "AllRanksTrain")


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


WAITS = {
    "no assignment yet": ({}, {"assignment": None}, "Pending"),
    "the assignment answers another launch": ({}, {"assignment": place(launches=5)}, "Pending"),
    "the allocator keeps a gang that has ended since": ({}, {"assignment": keep(launches=0)}, "Pending"),
    "no GPUs this round": (
        {},
        {"assignment": release(launches=0, reason=JobReason.WAITING_FOR_CAPACITY)},
        "WaitingForCapacity",
    ),
    "its GPUs are not free yet": (
        {},
        {"assignment": place(), "shortage": "0 of 4"},
        "WaitingForReleasedPods",
    ),
    "suspended": ({}, {"assignment": place(), "spec": {"suspend": True}}, "Suspended"),
    "pausing after a failure": ({"next_launch_at": after(31)}, {"assignment": place()}, "BackingOff"),
}


@pytest.mark.parametrize(("status", "context", "want"), WAITS.values(), ids=WAITS.keys())
def test_a_job_waits_with_the_reason(status, context, want):
    view = an_idle_view()
    view = dataclasses.replace(view, status=view.status.replace(**status))
    result = take_step(a_context(view, **context))
    assert result.status.allocation is None
    assert conditions(result)["Admitted"] == (False, want)


@pytest.mark.parametrize(
    ("age", "writes", "again"),
    [
        (0.0, False, 10.0),
        (9.0, False, 1.0),
        (10.0, True, LOOK_AGAIN_SECONDS),
        (-1.0, True, LOOK_AGAIN_SECONDS),
    ],
)
def test_a_new_job_is_not_told_that_there_is_no_decision_yet(age, writes, again):
    """The decision, which it asks for, writes its first status; one that is late is not waited for."""
    view = an_idle_view(created=after(1 - age))
    result = take_step(a_context(view, assignment=None))
    assert result.allocate
    assert result.write_later is not writes
    assert ("Admitted" in conditions(result)) is writes
    assert result.requeue_after_seconds == again


def test_a_job_that_waits_again_is_told_at_once():
    """Its status says something else, which no longer holds."""
    view = an_idle_view(created=after(0), status=an_idle_view().status.replace(next_launch_at=after(9)))
    result = take_step(a_context(view, assignment=place()))
    assert not result.write_later
    assert conditions(result)["Admitted"] == (False, "BackingOff")


def test_a_job_that_pauses_names_its_last_failure():
    """The reason is read where the wait is read."""
    status = an_idle_view().status.replace(next_launch_at=after(31))
    status = status.with_condition("Running", False, "UserError", "no layer 9", now=after(0), generation=1)
    result = take_step(a_context(an_idle_view(status=status), assignment=place()))
    (admitted,) = [c for c in result.status.conditions if c.type == "Admitted"]
    assert "failed 0 of at most 4 times; last: no layer 9; the next launch is not before" in admitted.message


def test_why_the_last_launch_ended_is_kept_while_the_job_waits():
    """It is worth more than "see condition Admitted"."""
    view = an_idle_view()
    status = view.status.with_condition(
        "Running", False, "UserError", "ValueError: boom", now=after(0), generation=1
    )
    view = dataclasses.replace(view, status=status)
    waiting = release(launches=0, reason=JobReason.WAITING_FOR_CAPACITY)
    running = take_step(a_context(view, assignment=waiting)).status.condition("Running")
    assert running.message == "ValueError: boom"


def test_a_decision_that_another_round_repeats_is_not_written_again():
    """Only the round's name differs."""
    first = decided(an_idle_view().status, place(plan_id="round-1"))
    assert (first.last_decision.chosen, first.last_decision.gpu_type) == ("4 x v100 of pool v100", "v100")
    assert decided(first, place(plan_id="round-2")) is first
    assert decided(first, place(plan_id="round-2", why="another")).last_decision.plan_id == "round-2"
