"""Tenant limits of the ClusterPolicy: whom they keep out of the problem, and what these jobs are told."""

import dataclasses

import pytest
from ballast_operator.allocator.problem.admission import Admitted, admit_tenants
from ballast_operator.api.cluster_policy import EachNamespace, EntityShare, Tenants
from ballast_operator.api.job_allocation import Ending
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_policies.scheduling.gang_room import GangMemory

from tests.operator.views.builders import a_config, a_spec, a_view

PODS = ("job-1-0", "job-1-1")


def tenants(each=None, **namespaces):
    return Tenants.model_validate({"eachNamespace": each or {}, "namespaces": namespaces})


def waiting(name="w", namespace="team", **spec):
    return a_view(pods=(), plan=None, spec=a_spec(**spec), status=TrainingJobStatus(), key=(namespace, name))


def running(name="r", namespace="team", **spec):
    return a_view(pods=PODS, plan=None, spec=a_spec(**spec), key=(namespace, name))


def one(view, gpus=None, **of_it):
    of_it = {"sizes": (), "shrinks": False, "gpu_types": (), **of_it}
    memory = GangMemory(spec=view.spec, need=None, pools={}, types={})
    return Admitted(
        key=view.key, view=view, spec=view.spec, gpus=gpus or len(view.pods) or 4, memory=memory, **of_it
    )


def admitted(limits, *views):
    return admit_tenants(limits, [one(view) for view in views], views)


def test_a_namespace_has_its_own_limits_and_otherwise_those_of_each():
    """Field by field; 10,000 waiting jobs where nothing is said."""
    limits = tenants({"maxGpus": 8, "maxRunningJobs": 3}, vip={"maxGpus": 64})
    waiting_jobs = EachNamespace().max_waiting_jobs
    stated = {"maxRunningJobs": 3, "maxWaitingJobs": waiting_jobs}
    assert limits.of("vip").to_dict() == {"maxGpus": 64, **stated}
    assert limits.of("team").to_dict() == {"maxGpus": 8, **stated}
    assert Tenants().of("team").to_dict() == {"maxWaitingJobs": waiting_jobs}


@pytest.mark.parametrize(
    ("each", "said"),
    [
        ({"maxGpus": 1}, "needs 2 GPUs at least, and the jobs of namespace team may hold 1 at a time"),
        ({"maxRunningJobs": 0}, "may have 0 jobs with GPUs at a time"),
        ({"maxWaitingJobs": 0}, "the 0 oldest waiting jobs of namespace team take part"),
    ],
)
def test_each_limit_has_its_message(each, said):
    view = waiting(config=a_config(pipeline={"minStages": 2, "maxStages": 4}))
    _, (refused,), _ = admitted(tenants(each), view)
    message = refused.refusal.message
    assert said in message and "To fix: " in message
    assert f"tenants.eachNamespace.{next(iter(each))}=" in message


def test_a_job_that_its_namespace_and_its_team_never_let_have_a_type_is_not_told_to_wait():
    """One leaves it none of the first type, the other none of the second."""
    view = waiting(entity="vision", config=a_config(pipeline={"minStages": 4, "maxStages": 4}))
    teams = {"vision": EntityShare(max_gpus_by_type={"slow": 2})}
    limits, job = tenants(team={"maxGpusByType": {"fast": 2}}), one(view, 4, gpu_types=("fast", "slow"))
    _, (refused,), _ = admit_tenants(limits, [job], [view], teams)
    assert "may have 2 fast at a time, and the job needs 4. To fix: allow other" in refused.refusal.message


def test_what_a_namespace_has_left_counts_what_its_pods_hold_and_what_gangs_can_give_back():
    """Six GPUs, two gangs of two: two are left; one that may shrink to one leaves room for one more."""
    views = running("a"), running("b")
    _, _, rooms = admitted(tenants({"maxGpus": 6}), *views)
    assert (rooms.gpus, rooms.left) == ({"team": 2}, {"team": 2})
    _, _, rooms = admit_tenants(
        tenants({"maxGpus": 6}), [one(views[0], 1, shrinks=True), one(views[1])], views
    )
    assert (rooms.gpus, rooms.left) == ({"team": 3}, {"team": 2})
    assert admitted(Tenants(), running("a"))[2].gpus == {}


def test_gpus_of_a_launch_that_ends_are_room_for_the_next_one():
    """A gang that moves is launched again only without them: nobody else has to give GPUs back for that."""
    moves = running("moves")
    ending = {"cause": "Preempted", "since": "2026-01-01T00:00:00Z"}
    status = moves.status.replace(allocation=moves.status.allocation.replace(ending=Ending(**ending)))
    views = dataclasses.replace(moves, status=status), running("stays")
    _, _, rooms = admitted(tenants({"maxGpus": 6}), *views)
    assert (rooms.gpus, rooms.left) == ({"team": 4}, {"team": 2})


def test_gpus_of_a_suspended_job_count_until_its_pods_are_gone():
    """It wants none, and still has them."""
    view = waiting()
    (within,), _, _ = admit_tenants(tenants({"maxGpus": 4}), [one(view)], [view, running("suspended")])
    assert within.gpus == 2
