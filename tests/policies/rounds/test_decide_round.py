"""Rounds of a few gangs on a few nodes: who runs where, who waits, and what it is told."""

import dataclasses
import math

import pytest
from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.draft import Explained
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.ledger import pack
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, NodeRequest, Placement, RoundSettings, RoundState
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.rounds.played import TYPES, at, job, node, one_round, play, solve


def one_pool(gpus, *sizes):
    return [node(f"n{i}", g) for i, g in enumerate(gpus)], [job(f"job-{i}", g) for i, g in enumerate(sizes)]


def test_a_gang_is_packed_on_the_tightest_node_that_holds_it_whole():
    """Two GPUs go to the node with two free, not to the one with four."""
    nodes, jobs = one_pool([4, 2], 2)
    (_, _, decided), *_ = play(nodes, jobs, 1)
    assert decided.placements["job-0"] == at("n1", "n1")


def test_a_waiting_gang_is_told_what_is_missing():
    nodes, jobs = one_pool([2, 1], 3, 2)
    (_, _, decided), *_ = play(nodes, jobs, 1)
    (waiting,) = decided.waiting
    assert "GPUs of one pool" in decided.reasons[waiting]
    assert "of 3 v100 free in pool a" in decided.reasons[waiting]


YOUNG = RoundSettings(min_run_seconds=1000.0, max_moves_per_hour=0)


@pytest.mark.parametrize("pool, kind", [("b", "v100"), ("a", "k80")])
def test_a_gang_whose_pool_has_another_name_or_type_holds_nothing_there(pool, kind):
    """It is placed again, even one that may not be stopped yet; the round goes on for the others."""
    nodes, jobs = one_pool([2, 2], 2, 2)
    old = Placement(gpu_type=kind, pool=pool, nodes=("n0", "n0"))
    decided = one_round(nodes, jobs, running={"job-0": old}, settings=YOUNG)
    assert (decided.moved, decided.started) == (("job-0",), ("job-1",))


def test_a_gang_on_a_node_that_has_gone_is_placed_again():
    """A lost node does not hold on to its gang."""
    nodes, jobs = one_pool([2, 2], 2)
    gone = at("lost", "lost")
    decided = one_round(nodes, jobs, running={"job-0": gone}, settings=YOUNG)
    assert decided.moved == ("job-0",)
    assert set(decided.placements["job-0"].nodes) <= {"n0", "n1"}


def test_a_gang_that_shrank_is_placed_at_its_new_size():
    """After a repack the old placement no longer fits the gang, so the caller passes the new one."""
    nodes, jobs = one_pool([2, 2], 2)
    old = at("n0", "n0", "n1", "n1")
    decided = one_round(nodes, jobs, running={"job-0": old})
    assert len(decided.placements["job-0"].nodes) == 2


def test_a_waiting_gang_is_told_for_whom_free_gpus_are_kept():
    """The reason names the gang that goes first."""
    nodes, jobs = one_pool([4], 1, 1, 3)
    decided = one_round(
        nodes,
        [*jobs[:2], job("job-2", 4)],
        shares=solve(nodes, jobs).allocation,
        received={"job-0": {"v100": 900.0}, "job-1": {"v100": 900.0}},
        running={"job-0": at("n0")},
        settings=RoundSettings(round_seconds=30.0, min_run_seconds=100.0),
    )
    assert set(decided.placements) == {"job-0"}
    assert "3 of 4 v100 free in pool a, kept for job-2" in decided.reasons["job-1"]


def test_a_gang_that_stays_keeps_its_nodes_though_a_more_urgent_one_would_fit_them_better():
    """No gang is moved only to pack another more tightly."""
    nodes, jobs = one_pool([2, 2], 2, 2)
    running = {"job-1": at("n0", "n0")}
    decided = one_round(nodes, jobs, now=60.0, received={"job-1": {"v100": 60.0}}, running=running)
    assert decided.extended == ("job-1",)
    assert decided.placements["job-0"].nodes == ("n1", "n1")


NODES = (
    node("a-0", 4),
    node("a-1", 4, taints="team=x:NoSchedule"),
    Node(name="b-0", pool="b", gpu_type="k80", gpus=8),
)

JOBS = st.builds(
    Job,
    name=st.just(""),
    gpus=st.integers(1, 3),
    throughput=st.dictionaries(st.sampled_from(["v100", "k80", "h100"]), st.sampled_from([0.0, 1.0, 2.0])),
)


@given(
    asked=st.lists(
        st.tuples(
            JOBS, st.sampled_from([frozenset(), frozenset({"team=x:NoSchedule"})]), st.sampled_from([1, 2])
        )
    ),
    free=st.fixed_dictionaries({node.name: st.integers(0, node.gpus) for node in NODES}),
    kept_for=st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["j0", "j1"])),
)
def test_a_text_found_for_another_job_is_the_job_s_own(asked, free, kept_for):
    """Whatever was asked before: also of the job for which a pool's free GPUs are kept."""
    jobs = [dataclasses.replace(job, name=f"j{at}") for at, (job, _, _) in enumerate(asked)]
    asks = {job.name: NodeRequest(text, each) for job, (_, text, each) in zip(jobs, asked, strict=True)}
    question = Question(now=0.0, shares={}, jobs=jobs, nodes=NODES, asks=asks)
    others = {
        node.name: Placement(
            gpu_type=node.gpu_type, pool=node.pool, nodes=(node.name,) * (node.gpus - free[node.name])
        )
        for node in NODES
    }
    explained = Explained(question, others, kept_for)
    for one in jobs:
        assert explained.waiting(one) == Explained(question, others, kept_for).waiting(one)


@pytest.mark.parametrize(
    ("free", "each", "want"),
    [
        ({"x": 4, "y": 4}, 2, ("x",) * 4),
        ({"x": 3, "y": 4}, 4, ("y",) * 4),
        ({"x": 3, "y": 3}, 2, ("x", "x", "y", "y")),
        ({"x": 3, "y": 1}, 2, None),
        ({"x": 5, "y": 4}, 4, ("y",) * 4),
    ],
)
def test_four_gpus_in_pods(free, each, want):
    """On the node that holds the gang with the least to spare; never half a pod."""
    nodes = [node(name, gpus) for name, gpus in free.items()]
    assert pack(4, nodes, free, each) == want


def test_a_gang_that_runs_on_a_node_with_a_new_taint_stays():
    """Nothing is moved for a taint; what is started meanwhile goes elsewhere."""
    nodes = [node("plain", 2), node("tainted", 2, taints="a:NoSchedule")]
    asks = dict.fromkeys(("runs", "new"), NodeRequest(frozenset({"a:NoSchedule"})))
    jobs = [job("runs", 2), job("new", 2)]
    shares = {one.name: {"v100": 1.0} for one in jobs}
    decided = one_round(nodes, jobs, shares=shares, running={"runs": at("tainted", "tainted")}, asks=asks)
    assert decided.placements["runs"] == at("tainted", "tainted")
    assert decided.placements["new"].nodes == ("plain", "plain")


def test_a_gang_does_not_grow_onto_a_tainted_or_closed_node():
    """Free GPUs there are no GPUs for it."""
    nodes = (
        node("home", 3),
        node("tainted", 2, taints="a:NoSchedule"),
        node("leaving", 2, closed="is cordoned"),
    )
    gang = ElasticGang(speeds={"v100": {size: float(size) for size in (2, 3, 4, 5)}})
    decided = one_round(
        nodes,
        [job("runs", 2)],
        shares={"runs": {"v100": 1.0}},
        running={"runs": at("home", "home")},
        elastic={"runs": gang},
        asks={"runs": NodeRequest(frozenset({"a:NoSchedule"}))},
    )
    assert decided.placements["runs"].nodes == ("home", "home", "home")


@st.composite
def clusters(draw):
    nodes = [
        Node(name=f"{pool}-{i}", pool=pool, gpu_type=kind, gpus=draw(st.integers(0, 4)))
        for pool, kind in (("a", "v100"), ("b", "p100"), ("spot", "v100"))
        for i in range(draw(st.integers(1, 3)))
    ]
    jobs = [
        Job(
            name=f"job-{i}",
            gpus=draw(st.integers(1, 5)),
            throughput={kind: draw(st.sampled_from([0.0, 1.0, 3.0])) for kind in TYPES},
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    return nodes, jobs


@pytest.mark.slow
@given(cluster=clusters())
def test_every_gang_that_fits_somewhere_is_served_within_bounded_rounds(cluster):
    """No starvation: a share above 0 is realised within 60 rounds."""
    nodes, jobs = cluster
    allocation = solve(nodes, jobs)
    room = {
        (pool, kind): sum(n.gpus for n in nodes if n.pool == pool and n.gpu_type == kind)
        for pool in {n.pool for n in nodes}
        for kind in TYPES
    }
    served = set()
    for _, _, decided in play(nodes, jobs, 60):
        served |= set(decided.placements)
    for one in jobs:
        wanted = [kind for kind, share in allocation.allocation[one.name].items() if share > 0.05]
        if any(room[pool, kind] >= one.gpus for pool, kind in room if kind in wanted):
            assert one.name in served


def test_gangs_whose_node_is_gone_take_none_of_the_moves_of_the_hour():
    """They did not move by choice: the gang that the shares stop has the one move that there is."""
    settings = RoundSettings(max_moves_per_hour=1)
    found = one_round(
        [node("n0", 1), node("n1", 1)],
        [job("displaced"), job("old"), job("urgent")],
        shares={"displaced": {"v100": 0.9}, "old": {"v100": 0.0}, "urgent": {"v100": 0.9}},
        running={"displaced": at("gone"), "old": at("n0")},
        settings=settings,
    )
    assert (found.moved, found.stopped, found.started) == (("displaced",), ("old",), ("urgent",))
    assert (found.displaced, found.disturbed) == (("displaced",), 1)


def test_after_a_clock_was_set_back_gangs_are_moved_as_before():
    """What began, and moved, by the clock's old time a day later holds nothing in place for a day."""
    asked = Question(
        now=10.0,
        shares={"old": {"v100": 0.0}, "urgent": {"v100": 0.9}},
        jobs=[job("old"), job("urgent")],
        nodes=[node("n0", 1)],
        state=RoundState(running={"old": at("n0")}, running_since={"old": 86400.0}, moves=(86400.0,)),
        settings=RoundSettings(max_moves_per_hour=1, min_run_seconds=60.0),
    )
    assert decide_round(asked).started == ("urgent",)


def test_a_gang_that_waits_is_told_which_one_starts_where_it_could_run():
    """With since when; of several, the first."""
    state = RoundState(
        running={"first": at("n0"), "second": at("n0")},
        running_since={"first": 60.0, "second": 90.0},
        trains_from={"first": math.inf, "second": math.inf},
    )
    asked = Question(
        now=100.0,
        shares={},
        jobs=[job("first"), job("second"), job("behind")],
        nodes=[node("n0", 2)],
        state=state,
        settings=RoundSettings(within_round=True),
    )
    assert decide_round(asked).reasons["behind"] == (
        "waits for 1 GPU of one pool: 0 of 2 v100 free in pool a, first has been starting there since "
        "1970-01-01T00:01:00Z, and 1 more gang later"
    )
    since = dict.fromkeys(state.running, 1e12)  # on the clock of a simulation, after the year 9999
    late = dataclasses.replace(asked, now=1e12, state=dataclasses.replace(state, running_since=since))
    assert "first has been starting" in decide_round(late).reasons["behind"]
    trains = dataclasses.replace(state, trains_from={"first": 70.0, "second": 95.0})
    assert "starting" not in decide_round(dataclasses.replace(asked, state=trains)).reasons["behind"]
