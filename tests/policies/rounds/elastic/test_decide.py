"""Sizes of elastic gangs by hand and against the best of all sizes, and no thrashing."""

import itertools

import pytest
from ballast_policies.allocation.policy import Surplus
from ballast_policies.rounds.values import extra_nodes, kept_ranks
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.rounds.elastic.gangs import decide, gang, sizes_of
from tests.policies.rounds.played import at, job, node


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


def test_by_completion_time_gangs_start_in_the_pools_that_were_chosen_for_them():
    """Of two pools of one type the first would hold either gang, and the second the small one alone."""
    jobs = [job("small", 4, steps_remaining=1000.0), job("large", 8, steps_remaining=1000.0)]
    nodes = [node("a", 8), node("b", 4, "b")]
    decided = decide(jobs, nodes, {}, surplus=Surplus.COMPLETION_TIME)
    assert {name: at.pool for name, at in decided.placements.items()} == {"small": "b", "large": "a"}


@pytest.mark.parametrize("surplus", Surplus)
def test_a_gang_whose_last_node_is_gone_goes_on_where_the_others_are(surplus):
    """Not in a pool that is no better, after a restart."""
    nodes, running = [node("a", 1, "first"), node("b", 1, "second")], {"x": at("b", "gone", pool="second")}
    decided = decide([job("x")], nodes, {"x": gang((1, 2))}, running=running, surplus=surplus)
    assert (decided.resized, decided.placements["x"].nodes) == (("x",), ("b",))


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
    soon = decide([job("x", steps_remaining=6.0)], [node("a", 4)], elastic, running=running)
    later = decide([job("x", steps_remaining=800.0)], [node("a", 4)], elastic, running=running)
    assert (sizes_of(soon), sizes_of(later)) == ({"x": 1}, {"x": 4})


def test_a_size_that_is_not_worth_the_restart_does_not_hide_a_larger_one_that_is():
    """Three GPUs save less than the restart costs, eight far more."""
    elastic = {"x": gang((2, 3, 8), speeds={2: 1.0, 3: 1.03, 8: 4.0}, live=False, restart_seconds=60.0)}
    jobs, running = [job("x", 2, steps_remaining=1500.0)], {"x": at("a", "a")}
    assert sizes_of(decide(jobs, [node("a", 8)], elastic, running=running)) == {"x": 8}


def test_a_gpu_that_a_gang_holds_and_cannot_use_is_another_ones():
    """It would need one GPU more than is free for the next size that is faster."""
    jobs, nodes = [job("x", 2), job("y")], [node("a", 2), node("b", 1), node("c", 1)]
    elastic = {
        "x": gang((2, 3, 4), speeds={2: 1.0, 3: 1.0, 4: 2.0}),
        "y": gang((1, 2), speeds={1: 1.0, 2: 2.0}),
    }
    running = {"x": at("a", "a", "b"), "y": at("c")}
    decided = decide(jobs, nodes, elastic, running=running, surplus=Surplus.COST)
    assert sizes_of(decided) == {"x": 2, "y": 2}


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


def test_a_gang_that_restarts_for_another_size_pays_for_it_and_is_moved():
    """It grows where that saves more than the restart, and not once the hour's moves are used up."""
    slow = gang((4, 8), speeds={4: 2.9, 8: 4.3}, live=False, pause_seconds=0.1, restart_seconds=100.0)
    running, nodes = {"x": at(*"aaaa")}, [node("a", 8)]
    for left, moves, size in ((10_000.0, 1, 8), (10_000.0, 0, 4), (500.0, 1, 4)):
        decided = decide(
            [job("x", gpus=4, steps_remaining=left)], nodes, {"x": slow}, running=running, most_moves=moves
        )
        assert sizes_of(decided) == {"x": size}
        assert (decided.moved, decided.resized) == ((("x",) if size == 8 else ()), ())
        if size == 8:
            assert "in place of 4 GPUs, after a restart of 100 s, since its degrees" in decided.reasons["x"]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, {"x": 4, "y": 4}),
        ({"within_round": True}, {"x": 8}),
        ({"most_moves": 0}, {"x": 8}),
        ({"min_run_seconds": 1000.0}, {"x": 8}),
    ],
)
def test_a_gang_that_restarts_for_another_size_makes_room_as_one_that_is_moved(options, sizes):
    """On its first GPUs, as another launch, at the end of a round and within its limits."""
    elastic = {"x": gang((4, 8), live=False)}
    jobs, running = [job("x", gpus=4), job("y", gpus=4)], {"x": at(*"aaaaaaaa")}
    decided = decide(jobs, [node("a", 8)], elastic, running=running, **options)
    assert sizes_of(decided) == sizes
    assert decided.moved == (("x",) if "y" in sizes else ())


@pytest.mark.parametrize("options", [{}, {"within_round": True}, {"most_moves": 0}, {"min_run_seconds": 1e3}])
def test_a_size_that_costs_such_a_gang_a_pause_alone_is_no_move(options):
    """It grows to it whatever limits moves, and gives whole positions of its pipeline back."""
    nodes, jobs = [node("a", 8)], [job("x", gpus=2, steps_remaining=200.0)]
    slow = {"live": False, "live_sizes": (4, 8), "together": 4, "per_pod": 1, "restart_seconds": 1e5}
    elastic = {"x": gang((2, 4, 8), speeds={2: 1.0, 4: 2.9, 8: 4.3}, pause_seconds=0.1, **slow)}
    grown = decide(jobs, nodes, elastic, running={"x": at(*"aaaa")}, **options)
    assert (sizes_of(grown), grown.resized, grown.moved) == ({"x": 8}, ("x",), ())
    assert "restart" not in grown.reasons["x"]
    jobs.append(job("y", gpus=4))
    shrunk = decide(jobs, nodes, elastic, running={"x": at(*"aaaaaaaa")}, **options)
    assert (sizes_of(shrunk), shrunk.resized, shrunk.moved) == ({"x": 4, "y": 4}, ("x",), ())


@pytest.mark.parametrize("options", [{"within_round": True}, {"most_moves": 0}, {"min_run_seconds": 1e3}])
def test_a_gang_that_must_not_restart_stays_though_its_least_size_would_cost_a_restart(options):
    """Of its sizes the least is not among those that cost a pause alone."""
    slow = {"live": False, "live_sizes": (2, 4), "together": 2, "per_pod": 1, "may_move": True}
    jobs, elastic = [job("x"), job("y")], {"x": gang((1, 2, 4), may_shrink=True, may_grow=True, **slow)}
    decided = decide(jobs, [node("a", 1), node("b", 4)], elastic, running={"x": at(*"bbbb")}, **options)
    assert (decided.moved, decided.stopped, decided.placements["x"].nodes[:2]) == ((), (), ("b", "b"))
    assert decided.started == ("y",)


def test_restarts_for_another_size_and_moves_of_others_are_within_the_same_limit():
    """To make room for the largest gang one restarts and another moves, or one is stopped."""
    slow = {"live": False, "may_shrink": True, "may_grow": True, "restart_seconds": 1.0}
    jobs, nodes = [job("z", gpus=4), job("x"), job("y")], [node("a", 5), node("b", 1, pool="b")]
    running = {"x": at(*"aaaa"), "y": at("a")}
    for most, changed in ((1, ((), ("x",))), (2, (("x", "y"), ()))):
        decided = decide(jobs, nodes, {"x": gang((1, 4), **slow)}, running=running, most_moves=most)
        assert (decided.moved, decided.stopped) == changed


def brute_force(tables, gpus):
    """All divisions of the GPUs in which every gang has one of its sizes."""
    return [sizes for sizes in itertools.product(*(sorted(table) for table in tables)) if sum(sizes) <= gpus]


@st.composite
def concave_gangs(draw):
    """Gangs of one pool whose speeds grow by less with each GPU; all fit at their least sizes."""
    tables = []
    for _ in range(draw(st.integers(2, 4))):
        steps = sorted(draw(st.lists(st.floats(0.1, 1.0), min_size=4, max_size=4)), reverse=True)
        tables.append(dict(enumerate(itertools.accumulate(steps), start=1)))
    return tables, draw(st.integers(len(tables), 12))


@given(concave_gangs())
def test_the_least_level_is_the_best_that_brute_force_finds(case):
    """By fairness, where more GPUs always help, and by less each time."""
    tables, gpus = case
    elastic = {f"j{i}": gang(table, speeds=table) for i, table in enumerate(tables)}
    decided = decide([job(name) for name in elastic], [node("a", gpus)], elastic)
    part = gpus / len(tables)
    units = [elastic[name].partition_speed("v100", part) for name in elastic]

    def least(sizes):
        return min(tables[i][size] / units[i] for i, size in enumerate(sizes))

    best = max(least(sizes) for sizes in brute_force(tables, gpus))
    found = sizes_of(decided)
    assert least([found[name] for name in elastic]) == pytest.approx(best)


@given(concave_gangs())
def test_the_sum_of_speeds_is_the_best_that_brute_force_finds(case):
    """By throughput."""
    tables, gpus = case
    elastic = {f"j{i}": gang(table, speeds=table) for i, table in enumerate(tables)}
    decided = decide([job(name) for name in elastic], [node("a", gpus)], elastic, surplus=Surplus.THROUGHPUT)
    best = max(sum(t[s] for t, s in zip(tables, sizes, strict=True)) for sizes in brute_force(tables, gpus))
    found = sizes_of(decided)
    total = sum(table[found[f"j{i}"]] for i, table in enumerate(tables))
    assert total >= best / 1.021  # steps of less than two percent are not taken
