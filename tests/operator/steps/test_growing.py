"""A running gang takes more GPUs."""

import dataclasses

import pytest
from ballast_operator.steps.context import CreatePod, DeletePod, WritePlan
from ballast_operator.steps.decide import take_step
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack, Directive
from ballast_policies.rounds import Placement

from tests.operator.steps.contexts import (
    NOW,
    PODS,
    a_context,
    a_pod,
    a_running_view,
    conditions,
    keep,
    release,
)
from tests.operator.views.builders import a_plan

NEW = ("job-1-4", "job-1-5")


def growing(*new_pods, plan=None, acknowledged=1):
    """The gang of four with two more pods in its status, and those of them that exist."""
    view = a_running_view(plan=plan, epoch=acknowledged)
    allocation = view.status.allocation
    allocation = allocation.with_pods(
        {**allocation.node_of, **dict.fromkeys(NEW, "m")},
        joining=NEW,
        joining_since=NOW,
        first_newcomer=4,
    )
    status = view.status.replace(allocation=allocation)
    return dataclasses.replace(view, status=status, pods=(*view.pods, *new_pods))


def ready(name, rank):
    return a_pod(name, rank, phase="Running", address=f"127.0.1.{rank}", node="m")


@pytest.mark.parametrize(
    ("assignment", "want"),
    [
        (keep(extra_nodes=("m",)), True),
        (keep(), False),
        (keep(extra_nodes=("m",), launches=0), False),
        (keep(extra_nodes=("m",), placement=Placement(gpu_type="v100", pool="v100", nodes=("n",))), False),
        (release(extra_nodes=("m",), launches=0), False),
    ],
    ids=["offered", "nothing offered", "an earlier launch", "another placement", "released"],
)
def test_a_gang_grows_when_gpus_are_offered_to_this_very_gang(assignment, want):
    """An offer to an earlier launch or another placement is out of date."""
    allocation = take_step(a_context(a_running_view(), assignment=assignment)).status.allocation
    assert bool(allocation.joining) is want


def test_a_gang_does_not_grow_while_the_offered_nodes_are_taken():
    """The shortage is what keeps it."""
    offer = keep(extra_nodes=("m",))
    context = a_context(a_running_view(), assignment=offer, shortage="0 of 1 GPUs are free")
    assert take_step(context).status.allocation.joining == ()


def test_a_growth_is_written_into_the_status_before_its_pods_exist():
    """New pods are numbered behind the old ones; nothing is created in the same pass."""
    result = take_step(a_context(a_running_view(), assignment=keep(extra_nodes=("m", "m"))))
    allocation = result.status.allocation
    assert (allocation.pods, allocation.gpus) == (PODS + NEW, 6)
    assert (allocation.joining, allocation.nodes[4:], allocation.first_newcomer) == (NEW, ("m", "m"), 4)
    assert result.actions == ()
    assert conditions(result)["Grown"] == (False, "Growing")


def test_missing_pods_of_a_growth_are_created():
    """Only those that do not exist yet."""
    result = take_step(a_context(growing(ready(NEW[0], 4)), seconds=20))
    (action,) = result.actions
    assert isinstance(action, CreatePod) and action.body["metadata"]["name"] == NEW[1]


def test_new_pods_join_by_a_plan_when_all_of_them_run():
    """The next epoch, with two more ranks."""
    result = take_step(a_context(growing(ready(NEW[0], 4), ready(NEW[1], 5))))
    (action,) = result.actions
    assert isinstance(action, WritePlan)
    assert (action.plan.epoch, action.plan.directive) == (2, Directive.GROW)
    assert [rank.pod for rank in action.plan.ranks] == [*PODS, *NEW]


def test_a_growth_is_done_when_rank_0_acknowledges_it():
    """Nothing is joining any more, and the GPUs are counted."""
    view = growing(ready(NEW[0], 4), ready(NEW[1], 5), plan=a_plan(PODS + NEW, epoch=2), acknowledged=2)
    result = take_step(a_context(view))
    assert (result.status.allocation.joining, result.status.allocation.gpus) == ((), 6)
    assert conditions(result)["Grown"] == (True, "RanksJoined")
    assert result.metric_increments == (("grown_gpus", "", 2),)


@pytest.mark.parametrize(
    ("pods", "seconds", "want_words"),
    [
        ((a_pod(NEW[0], 4, phase="Failed", exit_code=1),), 1, "pod job-1-4 ended with exit code 1"),
        ((a_pod(NEW[0], 4, phase="Running", leaving=True),), 1, "pod job-1-4 is deleted"),
        ((ready(NEW[0], 4),), 121, "only 1 of 2 pods ran within 120 s"),
    ],
    ids=["a new pod fails", "a new pod is deleted", "a new pod does not start in time"],
)
def test_a_growth_that_fails_leaves_the_gang_as_it_was(pods, seconds, want_words):
    """The four ranks train on; the message says what went wrong."""
    result = take_step(a_context(growing(*pods), seconds=seconds))
    assert (result.status.allocation.pods, result.status.allocation.ending) == (PODS, None)
    assert conditions(result)["Grown"] == (False, "GrowthGivenUp")
    assert want_words in result.status.condition("Grown").message


def test_pods_of_a_growth_that_failed_are_deleted():
    """By name and uid; those that are leaving are not deleted twice."""
    view = growing(ready(NEW[0], 4), a_pod(NEW[1], 5, leaving=True))
    status = view.status.replace(
        allocation=view.status.allocation.with_pods(dict.fromkeys(PODS, "n"), joining=())
    )
    view = dataclasses.replace(view, status=status, lease=LeaseView(ack=Ack(epoch=1, step=0)))
    assert take_step(a_context(view)).actions == (DeletePod(NEW[0], f"uid-{NEW[0]}"),)
