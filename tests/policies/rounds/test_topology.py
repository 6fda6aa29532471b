"""Racks and blocks in rounds: what a gang requires holds always, and what nobody asks for costs nothing."""

from collections import Counter

import pytest
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.ledger import pack
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import (
    NodeRequest,
    RoundSettings,
    RoundState,
    TopologyRequest,
    domains_of,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.rounds.played import at, job
from tests.policies.rounds.played import node as plain_node

LEVELS = ("block", "rack")
BLOCK, RACK = TopologyRequest("block", 0, required=True), TopologyRequest("rack", 1, required=True)
NEAR = TopologyRequest("rack", 1, required=False)


def node(name, gpus, block="", rack="", **options):
    labels = {"block": block, "rack": rack}
    return plain_node(name, gpus, domains=domains_of(name, labels, LEVELS), **options)


def racks(*gpus):
    """A block with a rack for each entry, of two nodes with so many GPUs."""
    return [node(f"{rack}-{i}", has, "b", f"r{rack}") for rack, has in enumerate(gpus) for i in range(2)]


def question(nodes, jobs, **options):
    shares = options.pop("shares", None) or {job.name: {"v100": 1.0} for job in jobs}
    return Question(now=options.pop("now", 0.0), shares=shares, jobs=jobs, nodes=nodes, **options)


def of_domains(asked):
    return {name: NodeRequest(topology=request) for name, request in asked.items()}


def domains(placement, nodes, level):
    at = {one.name: one.domain(level) for one in nodes}
    return {at[name] for name in placement.nodes}


@st.composite
def clusters(draw):
    label = st.sampled_from(["", "1", "2"])
    return [
        node(
            f"n{i}",
            draw(st.integers(0, 6)),
            draw(label),
            draw(label),
            taints=draw(st.sampled_from(["", "", "t"])),
        )
        for i in range(draw(st.integers(1, 7)))
    ]


@given(clusters(), st.integers(1, 12), st.sampled_from([1, 1, 2]))
def test_domains_are_preferred_where_that_costs_no_node(nodes, gpus, per_pod):
    """Unasked: as many nodes as without a topology, in no more domains. Preferred: in one that has room."""
    free = {one.name: one.gpus for one in nodes}
    plain = pack(gpus, [node(one.name, one.gpus) for one in nodes], free, per_pod)
    unasked, near = (pack(gpus, nodes, free, per_pod, asked) for asked in (None, NEAR))
    if plain is None:
        assert unasked is None and near is None
        return
    of = {one.name: one.domains for one in nodes}

    def blocks_and_racks(names):
        return tuple(len({of[name][level] for name in names}) for level in (0, 1))

    assert len(set(unasked)) == len(set(plain))
    assert blocks_and_racks(unasked) <= blocks_and_racks(plain)
    assert blocks_and_racks(near) <= blocks_and_racks(unasked)
    room = Counter()
    for one in nodes:
        room[one.domains[1]] += one.gpus // per_pod * per_pod
    if max(room.values()) >= gpus:
        assert blocks_and_racks(near) == (1, 1)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.lists(st.integers(1, 6), max_size=6))
def test_one_domain_is_none(sizes, gangs):
    """Where all nodes are in one domain, every decision is as without a topology."""
    jobs = [job(f"job-{i}", gpus) for i, gpus in enumerate(gangs)]
    inside = [node(f"n{i}", gpus, "b", "r") for i, gpus in enumerate(sizes)]
    without = [plain_node(one.name, one.gpus) for one in inside]
    asked = {one.name: (RACK, NEAR, BLOCK)[i % 3] for i, one in enumerate(jobs[1:])}
    found = decide_round(question(inside, jobs, asks=of_domains(asked))).placements
    assert found == decide_round(question(without, jobs)).placements


@pytest.mark.parametrize(
    ("nodes", "gpus", "asked", "want"),
    [
        pytest.param(racks(2, 4, 3), 5, None, {"r2"}, id="the tightest rack on two nodes"),
        pytest.param([*racks(3, 2), node("z", 4, "c", "r")], 4, RACK, {"r"}, id="one node"),
        pytest.param(racks(3, 2, 2), 8, NEAR, {"r0", "r1"}, id="fewest racks"),
        pytest.param(
            [*racks(2), node("x", 4)], 6, NEAR, {"r0", "node:x"}, id="no label: a domain of its own"
        ),
        pytest.param([*racks(2), node("x", 4)], 6, RACK, None, id="no rack holds it"),
    ],
)
def test_which_domain(nodes, gpus, asked, want):
    found = pack(gpus, nodes, {one.name: one.gpus for one in nodes}, 1, asked)
    names = {one.name: one.domains[1].rpartition("/")[2] for one in nodes}
    assert (None if found is None else {names[name] for name in found}) == want


def test_an_elastic_gang_starts_where_it_can_grow_and_grows_inside():
    """A rack that just holds its least size is no good to a gang that may grow, nor is a second rack."""
    nodes = racks(2, 4, 1)
    sizes = {size: float(size) for size in range(2, 13)}
    asked = {"wide": TopologyRequest("rack", 1, required=True, most=12)}
    gang = ElasticGang(speeds={"v100": sizes})
    decided = decide_round(question(nodes, [job("wide", 2)], asks=of_domains(asked), elastic={"wide": gang}))
    placed = decided.placements["wide"]
    assert domains(placed, nodes, 1) == {"b/r1"} and len(placed.nodes) == 8
    assert decided.reasons["wide"].endswith("in domain b/r1 of rack")


def test_nodes_of_no_level_are_domains_of_their_own():
    """As those that a forecast adds: beside labelled ones, at any level."""
    nodes = [*racks(2), plain_node("added", 2)]
    free = {one.name: one.gpus for one in nodes}
    assert set(pack(6, nodes, free)) == set(free) and pack(6, nodes, free, 1, RACK) is None
    gang = ElasticGang(speeds={"v100": {size: float(size) for size in range(1, 7)}})
    decided = decide_round(
        question(nodes, [job("wide", 1)], asks=of_domains({"wide": BLOCK}), elastic={"wide": gang})
    )
    assert len(domains(decided.placements["wide"], nodes, 0)) == 1


def test_what_is_free_is_told_by_domain():
    """The reason names the level, and the domain with most room."""
    decided = decide_round(question(racks(2, 3), [job("wide", 8)], asks=of_domains({"wide": RACK})))
    assert decided.reasons["wide"] == (
        "waits for 8 GPUs of one pool within one domain of rack: "
        "10 of 10 v100 free in pool a, at most 6 of them in one domain, b/r1"
    )


def test_less_urgent_gangs_move_out_of_a_domain():
    """Of the racks with small gangs the one whose gang is owed less; who is not in the way stays."""
    nodes = racks(2, 2)
    small = [job("one", 1), job("two", 2), job("three", 1)]
    running = {"one": at("0-0"), "two": at("1-0", "1-0"), "three": at("0-1")}
    state = RoundState(
        running=running,
        running_since=dict.fromkeys(running, 0.0),
        received={"one": {"v100": 600.0}, "two": {"v100": 700.0}, "three": {"v100": 900.0}},
    )
    decided = decide_round(
        question(nodes, [*small, job("wide", 4)], now=900.0, state=state, asks=of_domains({"wide": RACK}))
    )
    assert domains(decided.placements["wide"], nodes, 1) == {"b/r1"}
    assert decided.extended == ("one", "three") and decided.moved == ("two",)


def test_who_moves_out_of_a_domain_goes_to_no_node_that_it_does_not_tolerate():
    """The only GPU that is left is on a node with a taint: the gang is stopped."""
    nodes = [*racks(2), node("tainted", 1, "b", "r1", taints="t")]
    running = {"small": at("0-0")}
    state = RoundState(running=running, running_since={"small": 0.0}, received={"small": {"v100": 900.0}})
    asks = {"wide": NodeRequest(topology=RACK), "small": NodeRequest(frozenset("t"))}
    decided = decide_round(
        question(nodes, [job("small", 1), job("wide", 4)], now=900.0, state=state, asks=asks)
    )
    assert (decided.started, decided.stopped) == (("wide",), ("small",))


def test_a_domain_is_kept_for_a_gang_that_waits_for_protected_ones():
    """Each rack has a gang that must not be disturbed yet: small ones get what is free in one rack alone."""
    nodes, small = racks(2, 2), [job(f"small-{i}", 1) for i in range(6)]
    running = {name: at(name) for name in ("0-0", "1-0")}
    jobs = [job("wide", 4), *(job(name, 1) for name in running), *small]
    state = RoundState(
        running=running, running_since=dict.fromkeys(running, 50.0), promised={"wide": {"v100": 60.0}}
    )
    settings = RoundSettings(round_seconds=60.0, min_run_seconds=120.0)
    decided = decide_round(
        question(nodes, jobs, now=60.0, state=state, settings=settings, asks=of_domains({"wide": RACK}))
    )
    started = [domains(decided.placements[name], nodes, 1) for name in decided.started]
    assert started == [{"b/r1"}] * 3
    assert decided.reasons["small-5"].endswith("3 of 8 v100 free in pool a, kept for wide")


def test_no_more_of_a_node_is_kept_than_the_gang_would_get_there():
    """Four GPUs of one node and one of the other: a small gang has the second of the other."""
    nodes = [node("0-0", 2, "b", "r0"), node("0-1", 4, "b", "r0"), node("1-0", 1, "b", "r1")]
    jobs = [job("wide", 5), job("young", 2), *(job(f"small-{i}", 1) for i in range(3))]
    state = RoundState(
        running={"young": at("0-1", "0-1")},
        running_since={"young": 50.0},
        promised={"wide": {"v100": 60.0}},
    )
    settings = RoundSettings(round_seconds=60.0, min_run_seconds=120.0)
    decided = decide_round(
        question(nodes, jobs, now=60.0, state=state, settings=settings, asks=of_domains({"wide": RACK}))
    )
    assert {decided.placements[name].nodes for name in decided.started} == {("0-0",), ("1-0",)}


@pytest.mark.parametrize("gpus", [4, 8], ids=["one rack", "all that there is"])
def test_a_wide_gang_is_served_in_a_stream_of_small_ones(gpus):
    """Each round brings small gangs that must not be disturbed while they last: what comes free is kept."""
    nodes, wide, asked = racks(2, 2), job("wide", gpus), {"wide": RACK} if gpus == 4 else {}
    settings = RoundSettings(round_seconds=60.0, min_run_seconds=180.0)
    state, arrived, had = RoundState(), dict[str, float](), Counter()
    jobs = []
    for number in range(12):
        now = 60.0 * number
        jobs = [one for one in jobs if one is wide or had[one.name] < 60 + 60 * (int(one.name[-1]) % 2)]
        jobs += [job(f"small-{number}-{i}", 1) for i in range(8)]
        jobs += [wide] if number == 1 else []
        names = [one.name for one in jobs]
        arrived |= {name: now for name in names if name not in arrived}
        running = {name: at for name, at in state.running.items() if name in names}
        state = RoundState(
            running=running,
            running_since={name: now - had[name] for name in running},
            received={name: {"v100": had[name]} for name in names},
            promised={name: {"v100": now - arrived[name]} for name in names},
        )
        decided = decide_round(
            question(nodes, jobs, now=now, state=state, settings=settings, asks=of_domains(asked))
        )
        if wide.name in decided.placements:
            break
        had.update(dict.fromkeys(decided.placements, 60.0))
        state = RoundState(running=decided.placements)
    assert wide.name in decided.placements, decided.reasons[wide.name]
    assert number > 1
