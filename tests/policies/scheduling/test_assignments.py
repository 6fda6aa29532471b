"""What a decision wants of each job, and what people are told of it."""

import dataclasses

import pytest
from ballast_policies.allocation.problem import Job
from ballast_policies.protocol.observed import Action
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.values import PoolPart
from ballast_policies.scheduling.assignments import assign
from ballast_policies.scheduling.decision import Memory, SchedulingPolicy, decide
from ballast_policies.scheduling.refusals import JobFaults, Obstacle
from ballast_policies.scheduling.state import ClusterJob, TenantRooms

from tests.policies.scheduling.clusters import at, cluster, gang

FAIR = SchedulingPolicy(objective="max-min-fairness", round_seconds=60.0)
SIZES = ElasticGang(speeds={"v100": {1: 1.0, 2: 1.9, 3: 2.7}}, may_shrink=True, may_grow=True)


def decided(state, policy=FAIR, *, now=1000.0, round_began=True):
    """The assignments of the decision that begins a round."""
    memory = Memory(next_at=now if round_began else None)
    return assign(state, decide(state, memory, policy, now=now))


def test_an_elastic_gang_takes_the_gpus_that_nobody_else_could_use():
    """It stays where it is, and is told which configurations would have been next."""
    (one,) = decided(cluster(gang("one", elastic=SIZES, runs=at("n")))).values()
    assert (one.action, one.placement, one.extra_nodes) == (Action.KEEP, at("n"), ("n", "n"))
    assert (one.chosen, one.kept_ranks, one.reason) == ("1 x v100 of pool a", (), "")
    assert one.next_best


def test_a_gang_that_gets_gpus_of_another_pool_as_well_starts_again():
    """Its first ranks are where they were, but only gangs in several pools take part of another one."""
    parts = tuple(PoolPart(pool=pool, gpu_type="v100", gpus=1) for pool in "ab")
    one, over = gang("one", elastic=SIZES, runs=at("n")), at("n", "m")
    assert one.stays(over) and one.stays(at("n"))
    assert not one.stays(dataclasses.replace(over, parts=parts)) and not one.stays(None)


def test_a_tenant_at_its_limit_starts_a_job_once_its_shrinking_gang_has_given_gpus_back():
    """Until the pods are gone the tenant would have more than it may."""
    jobs = gang("old", elastic=SIZES, tenant="team", runs=at("n", "n", "n")), gang("new", tenant="team")
    rooms = {"gpus": {"team": 2}, "left": {"team": 0}}
    found = decided(cluster(*jobs, tenants=TenantRooms(**rooms)))
    assert found["old"].kept_ranks
    assert (found["new"].action, found["new"].reason) == (Action.RELEASE, Obstacle.TENANT_LIMIT)
    assert found["new"].why.startswith("other jobs of namespace team, which is at its limit, are giving GPUs")
    rooms["left"] = {"team": 1}
    found = decided(cluster(*jobs, tenants=TenantRooms(**rooms)))
    assert found["new"].action is Action.PLACE


def test_an_error_names_its_job():
    """So that whoever decides can leave that one out."""

    class Odd(ClusterJob):
        @property
        def left_out(self):
            raise KeyError("no such pool")

        @left_out.setter
        def left_out(self, value):
            pass

    odd = Odd(job=Job(name="odd", gpus=1, throughput={"v100": 1.0}))
    state = cluster(gang("fine"), odd)
    decision = decide(state, Memory(), FAIR, now=1000.0)
    with pytest.raises(JobFaults) as caught:
        assign(state, decision)
    assert set(caught.value.by_job) == {"odd"}
