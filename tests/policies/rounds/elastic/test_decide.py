"""Sizes of elastic gangs on random clusters and by hand, and no thrashing."""

import dataclasses
import itertools
from collections import Counter

import pytest
from ballast_policies.allocation.policy import Surplus
from ballast_policies.rounds.values import RoundSettings, extra_nodes, kept_ranks, stays
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.rounds.elastic.gangs import at, decide, gang, job, node, sizes_of
from tests.policies.rounds.played import one_round

BY_SHARES = [surplus for surplus in Surplus if surplus is not Surplus.COMPLETION_TIME]
"""Who runs is decided by shares; by completion time, with the sizes."""


@st.composite
def questions(draw):
    """Nodes of two pools, elastic gangs and fixed ones, some of which run somewhere."""
    nodes = [
        node(f"n{i}", draw(st.integers(0, 4)), draw(st.sampled_from("pq")))
        for i in range(draw(st.integers(1, 5)))
    ]
    free = {one.name: one.gpus for one in nodes}
    jobs, elastic, running = [], {}, {}
    for index in range(draw(st.integers(1, 6))):
        name, together = f"j{index}", draw(st.sampled_from((1, 1, 1, 2)))
        least = together * draw(st.integers(1, 2))
        most = least + together * draw(st.integers(0, 3))
        speeds = draw(st.lists(st.floats(0.1, 1.0), min_size=10, max_size=10))
        table = dict(enumerate(itertools.accumulate(speeds), start=1))
        if most > least:
            elastic[name] = gang(
                range(least, most + 1, together),
                speeds=table,
                together=together,
                may_shrink=draw(st.booleans()),
                may_grow=draw(st.booleans()),
            )
        jobs.append(job(name, least, weight=draw(st.sampled_from((1.0, 2.0))), steps_remaining=1e4))
        pool = draw(st.sampled_from(("p", "q", "")))
        places = [one.name for one in nodes if one.pool == pool for _ in range(free[one.name])]
        size = draw(st.sampled_from(range(least, most + 1, together)))
        if len(places) >= size:
            running[name] = at(*places[:size], pool=pool)
            for place in places[:size]:
                free[place] -= 1
    return jobs, nodes, elastic, running


@given(questions(), st.sampled_from(Surplus), st.booleans())
def test_sizes_are_allowed_within_the_nodes_and_reached_without_a_restart(question, surplus, within_round):
    """Nodes are not overfull, gangs have a size of theirs, and each change is a shrink or a growth."""
    jobs, nodes, elastic, running = question
    decided = decide(jobs, nodes, elastic, running=running, surplus=surplus, within_round=within_round)
    used = Counter(name for placement in decided.placements.values() for name in placement.nodes)
    assert all(used[one.name] <= one.gpus for one in nodes)
    for name, placement in decided.placements.items():
        if name in elastic:
            assert len(placement.nodes) in elastic[name].speeds["v100"]
    for name in decided.resized:
        one = elastic[name]
        assert decided.placements[name] != running[name]
        assert stays(running[name], decided.placements[name], one.together)
        more = len(decided.placements[name].nodes) > len(running[name].nodes)
        assert one.may_grow if more else one.may_shrink


@given(questions(), st.booleans())
def test_no_gpu_is_idle_that_a_gang_could_use(question, within_round):
    """Every step of size that a gang may still take is one that its pool has no room for."""
    jobs, nodes, elastic, running = question
    elastic = {n: dataclasses.replace(g, may_shrink=True, may_grow=True) for n, g in elastic.items()}
    decided = decide(jobs, nodes, elastic, running=running, within_round=within_round)
    used = Counter(name for placement in decided.placements.values() for name in placement.nodes)
    free = Counter()
    for one in nodes:
        free[one.pool] += one.gpus - used[one.name]
    for name, placement in decided.placements.items():
        if name not in elastic or (
            name in decided.resized and set(running[name].nodes) - set(placement.nodes)
        ):
            continue
        now, speeds = len(placement.nodes), elastic[name].speeds["v100"]
        larger = [size for size in speeds if size > now and speeds[size] > speeds[now] * 1.03]
        lost = name in decided.resized and now < len(running[name].nodes)
        assert lost or not larger or min(larger) - now > free[placement.pool]


@given(questions(), st.sampled_from(BY_SHARES))
def test_who_runs_is_decided_at_the_least_sizes(question, surplus):
    """A gang that waits at its least size is not kept out by another one's extra GPUs."""
    jobs, nodes, elastic, running = question
    elastic = {n: dataclasses.replace(g, may_shrink=True) for n, g in elastic.items()}
    reduced = {
        name: dataclasses.replace(place, nodes=place.nodes[: elastic[name].least])
        if name in elastic
        else place
        for name, place in running.items()
    }
    at_least = one_round(
        nodes,
        jobs,
        now=100.0,
        shares={one.name: {"v100": 1.0} for one in jobs},
        running=reduced,
        settings=RoundSettings(round_seconds=60.0),
    )
    decided = decide(jobs, nodes, elastic, running=running, surplus=surplus)
    assert decided.placements.keys() == at_least.placements.keys()


@given(questions(), st.sampled_from(Surplus))
def test_a_decision_that_is_carried_out_is_made_again(question, surplus):
    """Once every gang has the size that it was given, the next round changes nothing more, or little:
    after at most three rounds all is still."""
    jobs, nodes, elastic, running = question
    elastic = {n: dataclasses.replace(g, may_shrink=True, may_grow=True) for n, g in elastic.items()}
    decided = decide(jobs, nodes, elastic, running=running, surplus=surplus)
    for _ in range(3):
        last, decided = (
            decided,
            decide(jobs, nodes, elastic, running=decided.placements, surplus=surplus),
        )
    assert sizes_of(decided) == sizes_of(last)


def test_the_policy_says_who_is_served_first():
    """Two like jobs on four GPUs, the first with less left to do."""
    jobs = [job("x", steps_remaining=1000.0), job("y", steps_remaining=9000.0)]
    elastic = {"x": gang(range(1, 5)), "y": gang(range(1, 5))}
    found = {surplus: sizes_of(decide(jobs, [node("a", 4)], elastic, surplus=surplus)) for surplus in Surplus}
    assert found[Surplus.LEVEL] == found[Surplus.THROUGHPUT] == {"x": 2, "y": 2}
    assert found[Surplus.ARRIVAL] == found[Surplus.SHORTEST] == {"x": 3, "y": 1}
    assert found[Surplus.LONGEST] == {"x": 1, "y": 3}
    assert found[Surplus.COST] == {"x": 1, "y": 1}
    assert found[Surplus.COMPLETION_TIME] == {"x": 3, "y": 1}


def test_the_shortest_job_first_leaves_gpus_that_bring_it_little_to_longer_ones():
    """Else jobs end later on average than with equal parts."""
    jobs = [job("x", steps_remaining=1000.0), job("y", steps_remaining=4000.0)]
    elastic = {"x": gang((1, 2), speeds={1: 1.0, 2: 1.1}), "y": gang(range(1, 5))}
    decided = decide(jobs, [node("a", 4)], elastic, surplus=Surplus.SHORTEST)
    assert sizes_of(decided) == {"x": 1, "y": 3}


@pytest.mark.parametrize(("left", "stops"), [(40.0, True), (5.0, False)])
def test_by_completion_time_a_long_gang_waits_for_a_short_one_where_that_pays_its_restart(left, stops):
    """One GPU, where the long one runs: also of gangs of one size; within a round it is not stopped."""
    jobs = [job("long", steps_remaining=9000.0), job("short", steps_remaining=left)]
    running = {"long": at("a")}
    for within_round in (True, False):
        decided = decide(
            jobs,
            [node("a", 1)],
            {},
            running=running,
            surplus=Surplus.COMPLETION_TIME,
            within_round=within_round,
        )
        assert sizes_of(decided) == {"short" if stops and not within_round else "long": 1}
        assert "0 of 1 v100 free" in decided.reasons["long" if "short" in decided.placements else "short"]


def test_a_deadline_is_worth_its_price():
    """The gang is as large as its deadline needs, and no larger."""
    jobs = [job("x", steps_remaining=1000.0, deadline=500.0), job("y", steps_remaining=1000.0)]
    elastic = {"x": gang(range(1, 5)), "y": gang(range(1, 5))}
    decided = decide(jobs, [node("a", 8)], elastic, surplus=Surplus.COST)
    assert sizes_of(decided) == {"x": 3, "y": 1}


def test_a_heavier_job_has_more():
    """Twice the weight on six GPUs."""
    jobs = [job("x", weight=2.0), job("y")]
    elastic = {"x": gang(), "y": gang()}
    assert sizes_of(decide(jobs, [node("a", 6)], elastic)) == {"x": 4, "y": 2}


def test_a_gang_that_is_about_to_end_takes_no_gpus_for_it():
    """What it would save is less than the pause."""
    elastic = {"x": gang(pause_seconds=5.0)}
    running = {"x": at("a")}
    soon = decide([job("x", steps_remaining=8.0)], [node("a", 4)], elastic, running=running)
    later = decide([job("x", steps_remaining=800.0)], [node("a", 4)], elastic, running=running)
    assert (sizes_of(soon), sizes_of(later)) == ({"x": 1}, {"x": 4})


def test_gpus_pass_between_gangs_only_where_that_wins_more_than_the_pauses_cost():
    """Three and one become two and two, unless each change takes most of a round."""
    jobs, nodes = [job("x"), job("y")], [node("a", 4)]
    running = {"x": at("a", "a", "a"), "y": at("a")}
    cheap = decide(jobs, nodes, {"x": gang(), "y": gang()}, running=running)
    dear = {name: gang(pause_seconds=30.0) for name in "xy"}
    assert sizes_of(cheap) == {"x": 2, "y": 2}
    assert sizes_of(decide(jobs, nodes, dear, running=running)) == {"x": 3, "y": 1}
    within = decide(jobs, nodes, {"x": gang(), "y": gang()}, running=running, within_round=True)
    assert sizes_of(within) == {"x": 3, "y": 1}


def test_a_tenant_stays_within_its_room():
    """Its gangs share what it has; another one's takes the rest."""
    jobs, nodes = [job("x"), job("y"), job("z")], [node("a", 12)]
    elastic = {name: gang() for name in "xyz"}
    decided = decide(jobs, nodes, elastic, tenants={"x": "team", "y": "team"}, room={"team": 4})
    assert sizes_of(decided) == {"x": 2, "y": 2, "z": 8}


def test_the_ranks_that_stay_are_rank_0_and_whole_positions():
    """Those whose nodes are to be kept, in order."""
    assert kept_ranks("aabb", "ab") == (0, 2)
    assert kept_ranks("aabb", "aa") == (0, 1)
    assert kept_ranks("aabb", "bb") is None
    assert kept_ranks("aabb", "aac") is None
    assert kept_ranks("aabb", "aabb") == (0, 1, 2, 3)
    assert kept_ranks("aabbcc", "aacc", together=2) == (0, 1, 4, 5)
    assert kept_ranks("abab", "ab", together=2) == (0, 1)
    assert extra_nodes("aa", "aab") == ("b",)
    assert extra_nodes("aa", "aba") is None
