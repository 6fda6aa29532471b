"""Rounds hand out whole gangs on real nodes, never too much, and do not disturb running gangs needlessly."""

from collections import Counter

import pytest
from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.values import Node, RoundSettings
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.rounds.played import TYPES, one_round, play, solve


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
def test_an_extended_grant_keeps_its_nodes(cluster):
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


@pytest.mark.slow
@given(cluster=clusters())
def test_moves_stay_within_the_hourly_limit(cluster):
    """At most two jobs are disturbed in the first hour."""
    settings = RoundSettings(round_seconds=60.0, max_moves_per_hour=2)
    assert sum(len(d.stopped) + len(d.moved) for _, _, d in play(*cluster, 20, settings)) <= 2


@given(cluster=clusters(), lost=st.integers(0, 4))
def test_a_node_that_has_lost_gpus_is_not_overfilled_even_by_young_jobs(cluster, lost):
    """Hysteresis never hands out GPUs that are gone."""
    nodes, jobs = cluster
    settings = RoundSettings(min_run_seconds=1e6, max_moves_per_hour=0)
    first = one_round(nodes, jobs, now=0.0, settings=settings)
    fewer = [Node(name=n.name, pool=n.pool, gpu_type=n.gpu_type, gpus=max(0, n.gpus - lost)) for n in nodes]
    second = one_round(fewer, jobs, now=60.0, running=first.placements, settings=settings)
    used = Counter(name for placement in second.placements.values() for name in placement.nodes)
    assert all(used[node.name] <= node.gpus for node in fewer)
