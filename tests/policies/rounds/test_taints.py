"""Rounds over nodes that not every job may be started on."""

from collections import Counter

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.values import Node, Placement
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.rounds.played import one_round

TAINTS = ("", "a:NoSchedule", "b=1:NoSchedule")


def node(name: str, gpus: int, **fields: str) -> Node:
    return Node(name=name, pool="p", gpu_type="v100", gpus=gpus, **fields)


def job(name: str, gpus: int) -> Job:
    return Job(name=name, gpus=gpus, throughput={"v100": 1.0})


def decide(jobs, nodes, *, not_tolerated=None, running=None, shares=None):
    shares = shares or {job.name: {"v100": 1.0} for job in jobs}
    return one_round(nodes, jobs, now=0.0, shares=shares, running=running, not_tolerated=not_tolerated or {})


def test_a_gang_that_runs_on_a_node_with_a_new_taint_stays():
    """Nothing is moved for a taint; what is started meanwhile goes elsewhere."""
    nodes = [node("plain", 2), node("tainted", 2, taints="a:NoSchedule")]
    at = Placement(gpu_type="v100", pool="p", nodes=("tainted", "tainted"))
    barred = dict.fromkeys(("runs", "new"), frozenset({"a:NoSchedule"}))
    decided = decide([job("runs", 2), job("new", 2)], nodes, not_tolerated=barred, running={"runs": at})
    assert decided.placements["runs"] == at
    assert decided.placements["new"].nodes == ("plain", "plain")


def test_a_gang_does_not_grow_onto_a_tainted_or_closed_node():
    """Free GPUs there are no GPUs for it."""
    nodes = (
        node("home", 3),
        node("tainted", 2, taints="a:NoSchedule"),
        node("leaving", 2, closed="is cordoned"),
    )
    at = Placement(gpu_type="v100", pool="p", nodes=("home", "home"))
    gang = ElasticGang(speeds={"v100": {size: float(size) for size in (2, 3, 4, 5)}})
    decided = one_round(
        nodes,
        [job("runs", 2)],
        shares={"runs": {"v100": 1.0}},
        running={"runs": at},
        elastic={"runs": gang},
        not_tolerated={"runs": frozenset({"a:NoSchedule"})},
    )
    assert decided.placements["runs"].nodes == ("home", "home", "home")


@st.composite
def questions(draw):
    """Nodes of two pools with taints, jobs that tolerate some, some of which run somewhere."""
    nodes = []
    for index in range(draw(st.integers(1, 6))):
        taints = draw(st.sampled_from(TAINTS))
        closed = draw(st.sampled_from(("", "", "", "is cordoned")))
        pool = draw(st.sampled_from(("p", "q")))
        gpus = draw(st.integers(0, 4))
        nodes.append(
            Node(name=f"n{index}", pool=pool, gpu_type="v100", gpus=gpus, taints=taints, closed=closed)
        )
    jobs, barred, running = [], {}, {}
    free = {n.name: n.gpus for n in nodes}
    for index in range(draw(st.integers(1, 6))):
        one = job(f"j{index}", draw(st.integers(1, 5)))
        jobs.append(one)
        barred[one.name] = frozenset(draw(st.sets(st.sampled_from(TAINTS[1:]))))
        pool = draw(st.sampled_from(("p", "q", "")))
        places = [n.name for n in nodes if n.pool == pool for _ in range(free[n.name])]
        if len(places) >= one.gpus:
            chosen = tuple(places[: one.gpus])
            for name in chosen:
                free[name] -= 1
            running[one.name] = Placement(gpu_type="v100", pool=pool, nodes=chosen)
    return jobs, nodes, barred, running


@given(questions())
def test_every_start_is_tolerated_whole_and_within_the_nodes(question):
    """No start on a barred or closed node, gangs whole, nodes not overfull, those that run keep theirs."""
    jobs, nodes, barred, running = question
    decided = decide(jobs, nodes, not_tolerated=barred, running=running)
    of = {n.name: n for n in nodes}
    used: Counter[str] = Counter()
    for one in jobs:
        at = decided.placements.get(one.name)
        if at is None:
            continue
        assert len(at.nodes) == one.gpus
        assert {of[name].pool for name in at.nodes} == {at.pool}
        used.update(at.nodes)
        if running.get(one.name) != at:
            assert not any(of[name].closed or of[name].taints in barred[one.name] for name in at.nodes)
    assert all(used[name] <= of[name].gpus for name in used)
