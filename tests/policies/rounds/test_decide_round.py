"""Rounds hand out whole gangs on real nodes, never too much, and do not disturb running gangs needlessly."""

from collections import Counter

import pytest
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.rounds import (
    Node,
    Placement,
    RoundSettings,
    RoundState,
    decide_round,
)
from hypothesis import given
from hypothesis import strategies as st

TYPES = ("v100", "p100", "k80")


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


def solve(nodes, jobs):
    capacity = {kind: sum(node.gpus for node in nodes if node.gpu_type == kind) for kind in TYPES}
    return allocate("max-min-fairness", Problem(gpu_types=TYPES, capacity=capacity, jobs=tuple(jobs)))


def play(nodes, jobs, rounds, settings=None):
    """The rounds in a row, as the allocator plays them, with the state each began with."""
    settings = settings or RoundSettings(round_seconds=60.0)
    allocation, state, now = solve(nodes, jobs), RoundState(), 0.0
    for _ in range(rounds):
        decided = decide_round(
            now=now, shares=allocation.allocation, jobs=jobs, nodes=nodes, state=state, settings=settings
        )
        yield now, state, decided
        received = {job: dict(row) for job, row in state.received.items()}
        for job, placement in decided.placements.items():
            row = received.setdefault(job, {})
            row[placement.gpu_type] = row.get(placement.gpu_type, 0.0) + settings.round_seconds
        changed = len(decided.moved) + len(decided.stopped)
        state = RoundState(
            received=received,
            running=decided.placements,
            running_since={
                job: state.running_since[job] if job in decided.extended else now
                for job in decided.placements
            },
            moves=(*state.moves, *([now] * changed)),
        )
        now += settings.round_seconds


@given(cluster=clusters())
def test_no_node_hands_out_more_gpus_than_it_has(cluster):
    """Whatever the shares, and in every round."""
    nodes, jobs = cluster
    have = {node.name: node.gpus for node in nodes}
    for _, _, decided in play(nodes, jobs, 6):
        used = Counter(name for placement in decided.placements.values() for name in placement.nodes)
        assert all(used[name] <= have[name] for name in used)


@given(cluster=clusters())
def test_a_gang_runs_whole_on_one_pool_of_a_type_that_it_can_use(cluster):
    """All ranks or none."""
    nodes, jobs = cluster
    where = {node.name: node for node in nodes}
    for _, _, decided in play(nodes, jobs, 4):
        for job in jobs:
            placement = decided.placements.get(job.name)
            if placement is not None:
                assert len(placement.nodes) == job.gpus
                assert {where[name].pool for name in placement.nodes} == {placement.pool}
                assert job.throughput[placement.gpu_type] > 0


@given(cluster=clusters())
def test_an_extended_lease_keeps_its_nodes(cluster):
    """Extended means: the same pool and exactly the same nodes."""
    for _, state, decided in play(*cluster, 5):
        for job in decided.extended:
            assert decided.placements[job] == state.running[job]


@given(cluster=clusters())
def test_no_gpus_idle_that_a_waiting_gang_could_use(cluster):
    """Work conservation: no pool has room for a gang that does not run."""
    nodes, jobs = cluster
    for _, _, decided in play(nodes, jobs, 3):
        used = Counter(name for placement in decided.placements.values() for name in placement.nodes)
        for job in jobs:
            if job.name in decided.placements:
                continue
            for pool in {node.pool for node in nodes}:
                members = [n for n in nodes if n.pool == pool and job.throughput[n.gpu_type] > 0]
                assert sum(n.gpus - used[n.name] for n in members) < job.gpus


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
    for job in jobs:
        wanted = [kind for kind, share in allocation.allocation[job.name].items() if share > 0.05]
        if any(room[pool, kind] >= job.gpus for pool, kind in room if kind in wanted):
            assert job.name in served


@given(cluster=clusters())
def test_the_same_input_gives_the_same_round(cluster):
    """Decisions can be replayed."""
    first = [decided for _, _, decided in play(*cluster, 3)]
    assert first == [decided for _, _, decided in play(*cluster, 3)]


@given(cluster=clusters())
def test_a_young_gang_is_left_alone(cluster):
    """Nothing is stopped or moved before it ran for min_run_seconds."""
    settings = RoundSettings(round_seconds=60.0, min_run_seconds=150.0)
    for now, state, decided in play(*cluster, 6, settings):
        for job in (*decided.stopped, *decided.moved):
            assert now - state.running_since[job] >= 150.0


@given(cluster=clusters())
def test_moves_stay_within_the_hourly_limit(cluster):
    """At most two jobs are disturbed in the first hour."""
    settings = RoundSettings(round_seconds=60.0, max_moves_per_hour=2)
    assert sum(len(d.stopped) + len(d.moved) for _, _, d in play(*cluster, 20, settings)) <= 2


def one_pool(gpus, *sizes):
    nodes = [Node(name=f"n{i}", pool="a", gpu_type="v100", gpus=g) for i, g in enumerate(gpus)]
    jobs = [Job(name=f"job-{i}", gpus=g, throughput={"v100": 1.0}) for i, g in enumerate(sizes)]
    return nodes, jobs


def test_two_jobs_that_do_not_fit_together_take_turns():
    """Each gets half of the rounds."""
    nodes, jobs = one_pool([4], 4, 4)
    turns = Counter(job for _, _, decided in play(nodes, jobs, 20) for job in decided.placements)
    assert turns == {"job-0": 10, "job-1": 10}


def test_a_gang_is_packed_on_the_tightest_node_that_holds_it_whole():
    """Two GPUs go to the node with two free, not to the one with four."""
    nodes, jobs = one_pool([4, 2], 2)
    (_, _, decided), *_ = play(nodes, jobs, 1)
    assert decided.placements["job-0"] == Placement(gpu_type="v100", pool="a", nodes=("n1", "n1"))


def test_a_waiting_gang_is_told_what_is_missing():
    """The reason has the numbers."""
    nodes, jobs = one_pool([2, 1], 3, 2)
    (_, _, decided), *_ = play(nodes, jobs, 1)
    (waiting,) = decided.waiting
    assert "GPUs of one pool" in decided.reasons[waiting]
    assert "of 3 v100 free in pool a" in decided.reasons[waiting]


def test_a_gang_on_a_node_that_has_gone_is_placed_again():
    """A lost node does not hold on to its gang."""
    nodes, jobs = one_pool([2, 2], 2)
    gone = Placement(gpu_type="v100", pool="a", nodes=("lost", "lost"))
    decided = decide_round(
        now=10.0,
        shares=solve(nodes, jobs).allocation,
        jobs=jobs,
        nodes=nodes,
        state=RoundState(running={"job-0": gone}, running_since={"job-0": 0.0}),
        settings=RoundSettings(min_run_seconds=1000.0, max_moves_per_hour=0),
    )
    assert decided.moved == ("job-0",)
    assert set(decided.placements["job-0"].nodes) <= {"n0", "n1"}


@pytest.mark.parametrize("kept", [("n0", "n0", "n1", "n1")])
def test_a_gang_that_shrank_is_placed_at_its_new_size(kept):
    """After a repack the old placement no longer fits the gang, so the caller passes the new one."""
    nodes, jobs = one_pool([2, 2], 2)
    old = Placement(gpu_type="v100", pool="a", nodes=kept)
    decided = decide_round(
        now=10.0,
        shares=solve(nodes, jobs).allocation,
        jobs=jobs,
        nodes=nodes,
        state=RoundState(running={"job-0": old}, running_since={"job-0": 0.0}),
        settings=RoundSettings(),
    )
    assert len(decided.placements["job-0"].nodes) == 2


def test_what_comes_free_is_kept_for_a_large_gang_that_waits_for_young_ones():
    """A gang of four is served once the youngest that ran may be stopped; nothing new starts before it."""
    nodes = [Node(name="n0", pool="a", gpu_type="v100", gpus=4)]
    settings = RoundSettings(round_seconds=30.0, min_run_seconds=100.0)
    jobs = [Job(name=f"one-{i}", gpus=1, throughput={"v100": 1.0}) for i in range(6)]
    jobs.append(Job(name="large", gpus=4, throughput={"v100": 1.0}))
    at = Placement(gpu_type="v100", pool="a", nodes=("n0",))
    state = RoundState(
        received={f"one-{i}": {"v100": 1000.0} for i in range(6)},
        running={f"one-{i}": at for i in range(4)},
        running_since={f"one-{i}": 30.0 * i for i in range(4)},
    )
    allocation = solve(nodes, jobs)
    for now in (91.0, 121.0, 151.0, 181.0, 211.0):
        decided = decide_round(
            now=now, shares=allocation.allocation, jobs=jobs, nodes=nodes, state=state, settings=settings
        )
        if "large" in decided.placements:
            break
        assert decided.started == ()
        state = RoundState(
            received=state.received,
            running=decided.placements,
            running_since={job: state.running_since[job] for job in decided.placements},
        )
    assert now == 211.0
    assert set(decided.placements) == {"large"}


def test_a_waiting_gang_is_told_for_whom_free_gpus_are_kept():
    """The reason names the gang that goes first."""
    nodes, jobs = one_pool([4], 1, 1, 3)
    at = Placement(gpu_type="v100", pool="a", nodes=("n0",))
    decided = decide_round(
        now=10.0,
        shares=solve(nodes, jobs).allocation,
        jobs=[*jobs[:2], Job(name="job-2", gpus=4, throughput={"v100": 1.0})],
        nodes=nodes,
        state=RoundState(
            received={"job-0": {"v100": 900.0}, "job-1": {"v100": 900.0}},
            running={"job-0": at},
            running_since={"job-0": 0.0},
        ),
        settings=RoundSettings(round_seconds=30.0, min_run_seconds=100.0),
    )
    assert set(decided.placements) == {"job-0"}
    assert "3 of 4 v100 free in pool a, kept for job-2" in decided.reasons["job-1"]


@given(cluster=clusters(), lost=st.integers(0, 4))
def test_a_node_that_has_lost_gpus_is_not_overfilled_even_by_young_jobs(cluster, lost):
    """Hysteresis never hands out GPUs that are gone."""
    nodes, jobs = cluster
    settings = RoundSettings(min_run_seconds=1e6, max_moves_per_hour=0)
    first = decide_round(
        now=0.0,
        shares=solve(nodes, jobs).allocation,
        jobs=jobs,
        nodes=nodes,
        state=RoundState(),
        settings=settings,
    )
    fewer = [Node(name=n.name, pool=n.pool, gpu_type=n.gpu_type, gpus=max(0, n.gpus - lost)) for n in nodes]
    second = decide_round(
        now=60.0,
        shares=solve(fewer, jobs).allocation,
        jobs=jobs,
        nodes=fewer,
        state=RoundState(running=first.placements, running_since=dict.fromkeys(first.placements, 0.0)),
        settings=settings,
    )
    used = Counter(name for placement in second.placements.values() for name in placement.nodes)
    assert all(used[node.name] <= node.gpus for node in fewer)


def test_a_gang_that_stays_keeps_its_nodes_though_a_more_urgent_one_would_fit_them_better():
    """No gang is moved only to pack another more tightly."""
    nodes, jobs = one_pool([2, 2], 2, 2)
    running = {"job-1": Placement(gpu_type="v100", pool="a", nodes=("n0", "n0"))}
    decided = decide_round(
        now=60.0,
        shares=solve(nodes, jobs).allocation,
        jobs=jobs,
        nodes=nodes,
        state=RoundState(received={"job-1": {"v100": 60.0}}, running=running, running_since={"job-1": 0.0}),
        settings=RoundSettings(),
    )
    assert decided.extended == ("job-1",)
    assert decided.placements["job-0"].nodes == ("n1", "n1")
