"""Limits of spot machines for a cluster: random clusters and rounds in a row."""

from collections import Counter

from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.grants import grant_gpus
from ballast_policies.rounds.question import Question, SpotLimits
from ballast_policies.rounds.spot_limits import launches, within_spot_limits
from ballast_policies.rounds.values import Node, Placement, PoolPart, RoundSettings

from tests.policies.rounds.played import job, one_round

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


def test_the_only_gang_on_spot_machines_may_start_and_grow():
    """A part of nothing would let none be the first."""
    limits = SpotLimits(pools=SPOT, most_in_one_pool=0.5)
    gang = ElasticGang(speeds={"v100": {1: 1.0, 2: 1.9, 3: 2.7}}, may_shrink=True, may_grow=True)
    first = decide([job("j")], [node("a", 1)], limits, elastic={"j": gang})
    more = decide([job("j")], [node("a", 3)], limits, elastic={"j": gang}, running=first.placements)
    assert first.placements["j"].nodes == ("a",)
    assert more.placements["j"].nodes == ("a", "a", "a")


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
