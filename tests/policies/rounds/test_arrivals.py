"""What new jobs are given between two decisions is what nobody else could use, and what a decision allows."""

import dataclasses
from collections import Counter

import pytest
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.rounds import (
    ElasticGang,
    Node,
    Placement,
    Question,
    RoundSettings,
    RoundState,
    decide_round,
)
from ballast_policies.rounds.arrivals import Idle, left_by, place_arrival
from hypothesis import given
from hypothesis import strategies as st

TYPES = ("v100", "p100", "k80")
POOLS = {"a": "v100", "b": "p100", "c": "k80", "d": "v100"}
SPEEDS = st.sampled_from([0.0, 0.0, 1.0, 3.0])
POLICIES = ("max-min-fairness", "fifo", "makespan", "max-throughput", "isolated")


@st.composite
def jobs(draw, prefix: str, most: int):
    return [
        Job(
            name=f"{prefix}-{i}",
            gpus=draw(st.integers(1, 4)),
            throughput={kind: draw(SPEEDS) for kind in TYPES},
        )
        for i in range(draw(st.integers(0, most)))
    ]


@st.composite
def clusters(draw):
    nodes = [
        Node(
            name=f"{pool}-{i}",
            pool=pool,
            gpu_type=kind,
            gpus=draw(st.integers(0, 4)),
            taints=draw(st.sampled_from(["", "t"])),
            closed=draw(st.sampled_from(["", "", "", "cordoned"])),
            coming=draw(st.sampled_from([False, False, False, True])),
        )
        for pool, kind in POOLS.items()
        for i in range(draw(st.integers(1, 3)))
    ]
    policy = draw(st.sampled_from(POLICIES))
    return policy, nodes, draw(jobs("old", 6)), draw(jobs("new", 4))


def shares_by(policy, nodes, wanting):
    capacity = {kind: sum(node.gpus for node in nodes if node.gpu_type == kind) for kind in TYPES}
    problem = Problem(gpu_types=TYPES, capacity=capacity, jobs=tuple(wanting))
    return allocate(policy, problem).allocation if wanting else {}


def decide(nodes, wanting, running, barred, shares):
    """A decision within a round, in which gangs that run stay."""
    return decide_round(
        Question(
            now=0.0,
            shares=shares,
            jobs=wanting,
            nodes=nodes,
            state=RoundState(running=running, running_since=dict.fromkeys(running, 0.0)),
            settings=RoundSettings(within_round=True),
            not_tolerated=barred,
        )
    )


def given_to(idle, news, barred):
    """The new jobs in their order, each with what is given to it: (placements, types that others want)."""
    found, contested = {}, set()
    for job in news:
        placement = place_arrival(
            idle, job, not_tolerated=barred.get(job.name, frozenset()), contested=contested
        )
        if placement is None:
            contested.update(kind for kind, rate in job.throughput.items() if rate > 0)
        else:
            found[job.name], idle = placement, idle.without([placement])
    return found


def barred_jobs(draw_from, names):
    return {name: frozenset({"t"}) for name in names if draw_from.draw(st.booleans())}


@given(cluster=clusters(), data=st.data())
def test_a_new_job_is_given_whole_gangs_of_free_gpus_where_it_may_be_started(cluster, data):
    """On one pool of its fastest type, on open nodes that exist, and no GPU twice."""
    policy, nodes, old, new = cluster
    barred = barred_jobs(data, [job.name for job in (*old, *new)])
    before = decide(nodes, old, {}, barred, shares_by(policy, nodes, old))
    found = given_to(left_by(before, jobs=old, nodes=nodes), new, barred)
    where, has = {node.name: node for node in nodes}, {node.name: node.gpus for node in nodes}
    used = Counter(n for at in (*before.placements.values(), *found.values()) for n in at.nodes)
    assert all(used[name] <= has[name] for name in used)
    for job in new:
        if (at := found.get(job.name)) is None:
            continue
        there = [where[name] for name in at.nodes]
        assert len(there) == job.gpus
        assert {node.pool for node in there} == {at.pool}
        assert job.throughput[at.gpu_type] == max(job.throughput.values()) > 0
        assert not any(node.closed or node.coming for node in there)
        assert not any(node.taints in barred.get(job.name, ()) for node in there)


@given(cluster=clusters(), data=st.data())
def test_no_job_that_came_before_gets_less_in_the_next_decision(cluster, data):
    """Whoever waits when a new job is given GPUs, gets what it would have got without that."""
    policy, nodes, old, new = cluster
    barred = barred_jobs(data, [job.name for job in (*old, *new)])
    before = decide(nodes, old, {}, barred, shares_by(policy, nodes, old))
    found = given_to(left_by(before, jobs=old, nodes=nodes), new, barred)
    if not found:
        return
    last = max(number for number, job in enumerate(new) if job.name in found)
    earlier, shares = [*old, *new[:last]], shares_by(policy, nodes, [*old, *new[: last + 1]])
    held = {**before.placements, **found}
    without = decide(
        nodes, earlier, {name: at for name, at in held.items() if name != new[last].name}, barred, shares
    )
    after = decide(nodes, [*earlier, new[last]], held, barred, shares)
    assert after.placements.keys() == {*without.placements, new[last].name}
    assert all(after.placements[name] == at for name, at in held.items())


@given(cluster=clusters(), data=st.data())
def test_what_is_given_is_given_by_the_next_decision_as_well(cluster, data):
    """To the first new job: it gets GPUs there, too, whatever the policy."""
    policy, nodes, old, new = cluster
    barred = barred_jobs(data, [job.name for job in (*old, *new)])
    before = decide(nodes, old, {}, barred, shares_by(policy, nodes, old))
    found = given_to(left_by(before, jobs=old, nodes=nodes), new[:1], barred)
    if not found:
        return
    wanting = [*old, *new[:1]]
    after = decide(nodes, wanting, before.placements, barred, shares_by(policy, nodes, wanting))
    assert found.keys() <= after.placements.keys()


def node(name: str, gpus: int, *, kind: str = "v100", **fields) -> Node:
    return Node(name=name, pool=kind, gpu_type=kind, gpus=gpus, **fields)


def job(name: str, gpus: int, **speeds: float) -> Job:
    return Job(name=name, gpus=gpus, throughput=speeds or {"v100": 1.0})


def left(decided_jobs, nodes, **how) -> Idle:
    decided = decide(nodes, decided_jobs, {}, {}, shares_by("fifo", nodes, decided_jobs))
    return left_by(decided, jobs=decided_jobs, nodes=nodes, **how)


def test_gpus_that_a_waiting_job_could_use_are_not_given():
    """Though it needs more of them than are free now."""
    nodes = [node("n", 4), node("k", 4, kind="k80")]
    idle = left([job("runs", 3), job("waits", 2)], nodes)
    assert place_arrival(idle, job("new", 1)) is None
    assert place_arrival(idle, job("new", 1, k80=1.0)) == Placement(gpu_type="k80", pool="k80", nodes=("k",))
    assert place_arrival(idle, job("new", 1, k80=1.0), contested={"k80"}) is None


def test_a_new_job_does_not_settle_for_a_slower_type():
    """Whether it should is for the policy to say."""
    idle = left([job("runs", 4)], [node("n", 4), node("k", 4, kind="k80")])
    assert place_arrival(idle, job("new", 1, v100=2.0, k80=1.0)) is None


@pytest.mark.parametrize(("largest", "free"), [(4, False), (2, True)])
def test_gpus_into_which_a_gang_may_grow_are_not_given(largest, free):
    """One that has its largest size wants no more."""
    gang = ElasticGang(speeds={"v100": {size: float(size) for size in range(2, largest + 1)}})
    idle = left([job("grows", 2)], [node("n", 4)], elastic={"grows": gang})
    assert (place_arrival(idle, job("new", 1)) is not None) is free


def test_the_gpus_of_a_pod_are_on_one_node():
    """Two nodes with three free GPUs are no room for a pod of four."""
    idle = left([], [node("one", 3), node("two", 3)])
    assert place_arrival(idle, job("new", 4), gpus_per_pod=4) is None
    assert place_arrival(idle, job("new", 4), gpus_per_pod=2).nodes == ("one", "one", "two", "two")
    assert place_arrival(dataclasses.replace(idle, nodes=()), job("new", 1)) is None
