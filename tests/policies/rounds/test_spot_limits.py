"""Limits of spot machines for a cluster: random clusters and rounds in a row."""

import dataclasses
from collections import Counter

import pytest
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.grants import grant_gpus
from ballast_policies.rounds.question import Question, SpotLimits
from ballast_policies.rounds.spot_limits import launches, within_spot_limits
from ballast_policies.rounds.values import Node, Placement, PoolPart, RoundSettings

from tests.policies.rounds.played import at, job, one_round

SPOT = frozenset({"s", "t", "u"})


def node(name, gpus, pool="s", zone=""):
    return Node(name=name, pool=pool, gpu_type="v100", gpus=gpus, zone=zone)


def decide(jobs, nodes, limits, *, running=None, elastic=None, shares=None, within_round=False, **options):
    return one_round(
        nodes,
        jobs,
        now=100.0,
        shares=shares or {one.name: {"v100": 1.0} for one in jobs},
        running=running,
        settings=RoundSettings(round_seconds=60.0, within_round=within_round),
        elastic=elastic or {},
        spot=limits,
        **options,
    )


def in_use(placements):
    used = Counter()
    for placement in placements.values():
        used[placement.pool] += len(placement.nodes)
    return used


def test_gangs_that_exceed_the_share_run_on_other_machines():
    """Ten gangs, three tenths on demand: seven run on spot machines and three beside."""
    nodes = [node(f"s{at}", 2) for at in range(5)] + [node("d", 8, "d")]
    jobs = [job(f"j{at}") for at in range(10)]
    limits = SpotLimits(pools=SPOT, on_demand_share=0.3)
    cheaper = {
        "shares": {one.name: {"spot": 1.0} for one in jobs},
        "columns": {"s": "spot", "d": "on demand"},
    }
    wide = decide(jobs, nodes, dataclasses.replace(limits, on_demand_share=0.0), **cheaper)
    decided = decide(jobs, nodes, limits, **cheaper)
    assert in_use(wide.placements) == {"s": 10}
    assert in_use(decided.placements) == {"s": 7, "d": 3}
    assert len(decided.blocked_by_spot_limit) == 3
    assert all("onDemandShare=0.3" in why for why in decided.blocked_by_spot_limit.values())


def test_without_other_machines_nothing_starts_on_spot_machines():
    """And each job says which limit keeps it."""
    jobs = [job(f"j{at}", 2) for at in range(3)]
    decided = decide(jobs, [node("n", 6)], SpotLimits(pools=SPOT, on_demand_share=0.1))
    assert not decided.placements
    assert set(decided.blocked_by_spot_limit) == {one.name for one in jobs}
    assert all("kept off spot machines by spec.spot.onDemandShare=0.1" in w for w in decided.reasons.values())


@pytest.mark.parametrize("limits", [{"on_demand_share": 1.0}, {"most_in_one_pool": 0.2}])
def test_what_runs_is_not_stopped_where_more_is_held_than_the_limits_leave(limits):
    """A limit that was lowered: gangs stay, the waiting one is more urgent and does not start."""
    nodes = [node("a", 4), node("b", 4, "t")]
    running = {f"j{number}": at("a", "a", pool="s") for number in range(2)}
    jobs = [job("j0", 2), job("j1", 2), job("new", 2, weight=9.0)]
    shares = {"j0": {"v100": 0.1}, "j1": {"v100": 0.1}, "new": {"v100": 1.0}}
    decided = decide(jobs, nodes, SpotLimits(pools=SPOT, **limits), running=running, shares=shares)
    assert {name: decided.placements[name] for name in running} == running
    assert decided.placements.get("new", Placement(gpu_type="", pool="t", nodes=())).pool == "t"


def test_gangs_are_spread_over_the_pools():
    """Of equal gangs no pool has more than one above its half."""
    nodes = [node("a", 8), node("b", 8, "t")]
    decided = decide(
        [job(f"j{at}", 2) for at in range(4)], nodes, SpotLimits(pools=SPOT, most_in_one_pool=0.5)
    )
    assert in_use(decided.placements) == {"s": 4, "t": 4}
    assert not decided.blocked_by_spot_limit


def test_the_only_gang_on_spot_machines_may_start_and_grow():
    """A part of nothing would let none be the first."""
    limits = SpotLimits(pools=SPOT, most_in_one_pool=0.5)
    gang = ElasticGang(speeds={"v100": {1: 1.0, 2: 1.9, 3: 2.7}}, may_shrink=True, may_grow=True)
    first = decide([job("j")], [node("a", 1)], limits, elastic={"j": gang})
    more = decide([job("j")], [node("a", 3)], limits, elastic={"j": gang}, running=first.placements)
    assert first.placements["j"].nodes == ("a",)
    assert more.placements["j"].nodes == ("a", "a", "a")


def test_gangs_are_spread_over_the_zones_of_a_pool():
    """As over pools; a node without a zone is another place."""
    nodes = [node("a", 8, zone="a"), node("b", 8, zone="b")]
    limits = SpotLimits(pools=SPOT, most_in_one_pool=0.5)
    decided = decide([job(f"j{at}", 2) for at in range(4)], nodes, limits)
    on = Counter(name for placement in decided.placements.values() for name in placement.nodes)
    assert on == {"a": 4, "b": 4}
    assert not decided.blocked_by_spot_limit
    alone = decide([job(f"j{at}", 2) for at in range(4)], nodes[:1], limits)
    assert len(alone.placements) == 1
    assert "pool s in zone a has 2 of 2 spot GPUs in use" in next(iter(alone.blocked_by_spot_limit.values()))


def test_a_gang_of_several_pools_counts_in_each_zone_that_it_is_in():
    """Two nodes of one pool in two zones, and a third one of another pool."""
    nodes = [node("a", 2, zone="a"), node("b", 2, zone="b"), node("t", 2, "t", "b"), node("d", 2, "d")]
    parts = (
        PoolPart(pool="s", gpu_type="v100", gpus=3),
        PoolPart(pool="t", gpu_type="v100", gpus=2),
        PoolPart(pool="d", gpu_type="v100", gpus=1),
    )
    names = ("a", "a", "b", "t", "t", "d")
    gang = Placement(gpu_type="v100", pool="s", nodes=names, parts=parts)
    found = launches({"j": gang}, {}, SPOT, {one.name: one.place for one in nodes})
    assert {launch.place: launch.nodes for launch in found} == {
        "s in zone a": ("a", "a"),
        "s in zone b": ("b",),
        "t in zone b": ("t", "t"),
    }


def test_where_no_other_gpus_are_left_the_limit_is_found_at_once():
    """One decision without the limit, one with it: what is kept off cannot run elsewhere."""
    nodes = [node("d", 8, pool="d"), *(node(f"s{number}", 8) for number in range(8))]
    jobs = [job(f"j{number}") for number in range(72)]
    asked = []

    def decide_once(question):
        asked.append(question)
        return grant_gpus(question)

    question = Question(
        now=0.0,
        shares={one.name: {"v100": 1.0} for one in jobs},
        jobs=jobs,
        nodes=nodes,
        spot=SpotLimits(pools=SPOT, on_demand_share=0.5),
    )
    decided = within_spot_limits(decide_once, question)
    assert in_use(decided.placements) == {"d": 8, "s": 8}
    assert len(asked) == 2
