"""Second jobs beside first ones on GPUs that may be shared."""

import dataclasses

import pytest
from ballast_policies.allocation.policy import Surplus
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.gangs import ElasticGang, SharedGpus, SharingJob
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Round, RoundSettings, RoundState
from ballast_policies.throughput.estimator import PairSpeeds

from tests.policies.rounds.played import at, job

GB = 1e9
NOTHING_YET = RoundState()
KNOWN = frozenset({"v100"})


def gpus(*names: str, pool: str = "a") -> tuple[Node, ...]:
    return tuple(Node(name=name, pool=pool, gpu_type="v100", gpus=1) for name in names)


def may_share(*names: str, nodes: tuple[Node, ...], speeds: dict[tuple[str, str], float] | None = None):
    """Each of a kind of its own, with 10 GB of a GPU's 32."""
    return SharedGpus(
        jobs={name: SharingJob(kind=name, memory=10 * GB, known_alone=KNOWN) for name in names},
        memory={node.name: 32 * GB for node in nodes},
        speeds=PairSpeeds({"v100": speeds} if speeds else {}),
    )


def decide(
    names: str,
    nodes: tuple[Node, ...],
    shared: SharedGpus,
    *,
    state: RoundState = NOTHING_YET,
    now: float = 1000.0,
    shares: dict[str, float] | None = None,
    elastic: dict[str, ElasticGang] | None = None,
    surplus: Surplus = Surplus.LEVEL,
    unable: str = "",
    **settings,
) -> Round:
    """``unable``: job that cannot use the GPUs."""
    jobs = [job(name, throughput={"v100": float(name != unable)}) for name in names]
    weights = {name: {"v100": (shares or {}).get(name, 1 / len(names))} for name in names}
    return decide_round(
        Question(
            now=now,
            shares=weights,
            jobs=jobs,
            nodes=nodes,
            state=state,
            settings=RoundSettings(round_seconds=100.0, **settings),
            shared=shared,
            elastic=elastic or {},
            surplus=surplus,
        )
    )


def running(**nodes: str) -> RoundState:
    return RoundState(
        running={name: at(node) for name, node in nodes.items()},
        running_since={name: 100.0 * number for number, name in enumerate(nodes)},
        received={name: {"v100": 100.0} for name in nodes},
    )


def test_a_job_that_would_wait_begins_beside_one_that_shares():
    """The third job waits: no GPU has more than two."""
    nodes = gpus("n")
    found = decide("abc", nodes, may_share("a", "b", "c", nodes=nodes))
    assert found.placements == {"a": at("n"), "b": at("n")}
    assert (found.started, found.waiting) == (("a", "b"), ("c",))
    assert {name: beside.partner for name, beside in found.colocations.items()} == {"a": "b", "b": "a"}
    assert "shares it with a, at 0.60 of its speed alone (estimated)" in found.reasons["b"]


@pytest.mark.parametrize(
    "case", ["one refuses", "memory", "together slower", "whole GPUs", "not known alone"]
)
def test_who_does_not_suit_waits(case: str):
    """Both agree, the memory is for both, together they do more than by turns, and that can be measured."""
    nodes = gpus("n")
    shared = may_share("a", "b", nodes=nodes)
    if case == "one refuses":
        shared = may_share("b", nodes=nodes)
    elif case == "memory":
        shared = dataclasses.replace(shared, memory={"n": 19 * GB})
    elif case == "together slower":
        shared = may_share("a", "b", nodes=nodes, speeds={("a", "b"): 0.5, ("b", "a"): 0.54})
    elif case == "whole GPUs":
        shared = dataclasses.replace(shared, memory={})
    elif case == "not known alone":
        new = SharingJob(kind="b", memory=10 * GB)
        shared = dataclasses.replace(shared, jobs={**shared.jobs, "b": new})
    assert set(decide("ab", nodes, shared).placements) == {"a"}


def test_a_waiting_job_gets_the_partner_with_which_both_do_most():
    """By measured speeds where there are, else by estimates from them."""
    nodes = gpus("n", "m")
    speeds = {("a", "c"): 0.5, ("c", "a"): 0.6, ("b", "c"): 0.9, ("c", "b"): 0.8}
    found = decide("abc", nodes, may_share("a", "b", "c", nodes=nodes, speeds=speeds))
    assert found.colocations["c"].partner == "b" and found.colocations["c"].measured
    assert found.placements["c"] == found.placements["b"]


def test_a_pair_continues_while_it_does_no_less_than_by_turns_and_its_roles_change_without_a_move():
    """The second job becomes the more urgent one: it has the GPU, and the first stays beside it."""
    nodes = gpus("n")
    state = dataclasses.replace(running(a="n", b="n"), received={"a": {"v100": 900.0}, "b": {"v100": 10.0}})
    measured = {("a", "b"): 0.5, ("b", "a"): 0.51}
    found = decide("ab", nodes, may_share("a", "b", nodes=nodes, speeds=measured), state=state)
    assert set(found.extended) == {"a", "b"} and not found.moved and not found.stopped
    worse = {("a", "b"): 0.5, ("b", "a"): 0.49}
    found = decide("ab", nodes, may_share("a", "b", nodes=nodes, speeds=worse), state=state)
    assert (found.extended, found.stopped) == (("b",), ("a",))
    assert "did 0.99 there of what one does alone" in found.reasons["a"]


def test_within_a_round_and_before_its_least_time_a_pair_is_not_parted():
    """Neither by what it does together nor for a free GPU; a young second job protects the first."""
    nodes = gpus("n", "m")
    state, slow = running(a="n", b="n"), {("a", "b"): 0.3, ("b", "a"): 0.3}
    shared = may_share("a", "b", nodes=nodes, speeds=slow)
    assert set(decide("ab", nodes, shared, state=state, within_round=True).extended) == {"a", "b"}
    assert set(decide("ab", nodes, shared, state=state, min_run_seconds=950.0).extended) == {"a", "b"}
    apart = decide("ab", nodes, shared, state=state)
    assert (apart.extended, apart.moved) == (("a",), ("b",))
    assert apart.placements["b"] == at("m")
    urgent = {"a": 0.01, "b": 0.01, "c": 1.0}
    one = may_share("a", "b", nodes=gpus("n"), speeds=slow)
    found = decide("abc", gpus("n"), one, state=state, shares=urgent, min_run_seconds=950.0)
    assert set(found.extended) == {"a", "b"}


def test_the_second_job_of_one_that_has_ended_has_the_gpu_alone():
    nodes = gpus("n")
    shared = may_share("b", "c", nodes=nodes)
    assert decide("b", nodes, shared, state=running(b="n")).extended == ("b",)
    found = decide("bc", nodes, shared, state=running(b="n"), within_round=True)
    assert (found.extended, found.started) == (("b",), ("c",))


def test_no_second_job_is_started_on_a_closed_node_or_where_it_does_not_tolerate_a_taint():
    """What runs there stays."""
    node = dataclasses.replace(gpus("n")[0], closed="cordoned")
    shared = may_share("a", "b", nodes=(node,))
    found = decide("ab", (node,), shared, state=running(a="n"))
    assert set(found.placements) == {"a"}
    found = decide("ab", (node,), shared, state=running(a="n", b="n"), within_round=True)
    assert set(found.extended) == {"a", "b"}


def test_a_job_whose_gpu_is_given_to_another_stays_beside_it():
    """That is no move."""
    nodes, shares = gpus("n"), {"a": 0.01, "b": 1.0}
    shared = may_share("a", "b", nodes=nodes)
    found = decide("ab", nodes, shared, state=running(a="n"), shares=shares, max_moves_per_hour=0)
    assert (found.extended, found.started) == (("a",), ("b",))
    assert found.colocations["a"].partner == "b"


def test_where_the_hour_has_few_moves_a_pair_stays_before_others():
    """To make way for one job, two would be stopped."""
    nodes, shares = gpus("n", "m"), {"d": 1.0, "e": 1.0}
    shared = may_share("a", "b", nodes=nodes)
    state = running(c="m", a="n", b="n")
    found = decide("abcde", nodes, shared, state=state, shares=shares, max_moves_per_hour=1)
    assert (set(found.extended), found.stopped) == ({"a", "b"}, ("c",))
    assert len(found.started) == 1


def test_a_pair_that_may_not_share_any_more_parts_whichever_of_the_two_it_is():
    """It keeps its GPU while the round goes on, and while the hour has no moves."""
    nodes, state = gpus("n"), running(a="n", b="n")
    for sharing in ("a", "b", ""):
        shared = may_share(*sharing, nodes=nodes)
        for held in ({"within_round": True}, {"max_moves_per_hour": 0}):
            assert set(decide("ab", nodes, shared, state=state, **held).extended) == {"a", "b"}
        found = decide("ab", nodes, shared, state=state)
        assert (found.extended, found.stopped) == (("a",), ("b",))
        assert "a has its GPU, and the two may not share it" in found.reasons["b"]


@pytest.mark.parametrize(
    "settings", [{}, {"max_moves_per_hour": 0}, {"within_round": True}, {"min_run_seconds": 5000.0}]
)
@pytest.mark.parametrize("surplus", [Surplus.LEVEL, Surplus.COMPLETION_TIME])
@pytest.mark.parametrize(("unable", "other"), ["ab", "ba"])
def test_a_job_that_cannot_use_the_type_of_its_gpu_any_more_leaves_the_other_alone(
    unable, other, surplus, settings
):
    """At once, whichever of the two it is, as one that has a GPU to itself does."""
    nodes, state = gpus("n"), running(a="n", b="n")
    shared = may_share("a", "b", nodes=nodes)
    found = decide("ab", nodes, shared, state=state, unable=unable, surplus=surplus, **settings)
    assert (found.extended, found.stopped, found.colocations) == ((other,), (unable,), {})


@pytest.mark.parametrize("settings", [{"max_moves_per_hour": 0}, {"within_round": True}])
def test_of_three_jobs_on_one_gpu_the_last_is_stopped(settings):
    """As where a node has lost GPUs: its pods cannot be there any more."""
    nodes = gpus("n")
    found = decide(
        "abc", nodes, may_share(*"abc", nodes=nodes), state=running(a="n", b="n", c="n"), **settings
    )
    assert (set(found.extended), found.stopped) == ({"a", "b"}, ("c",))


@pytest.mark.parametrize("first", "ab")
def test_a_job_that_may_have_more_gpus_since_it_shares_one_keeps_its_size_while_it_does(first):
    """Its pair parts before it grows, or moves to where it could grow."""
    nodes = (*gpus("n"), *gpus("m"), dataclasses.replace(gpus("p", pool="b")[0], gpus=4))
    gang = ElasticGang(
        speeds={"v100": {1: 1.0, 2: 1.9, 4: 3.6}}, may_shrink=True, may_grow=True, may_move=True
    )
    state = running(a="n", b="n")
    shared = may_share("a" if first == "b" else "b", nodes=nodes[:2])
    for settings in ({"within_round": True}, {"max_moves_per_hour": 0}):
        found = decide("ab", nodes, shared, state=state, elastic={first: gang}, **settings)
        assert set(found.extended) == {"a", "b"}
    alone = decide(first, nodes, shared, state=running(**{first: "n"}), elastic={first: gang})
    assert len(alone.placements[first].nodes) == 4


def test_a_job_stays_for_the_one_beside_it_and_says_so():
    """It has run long enough itself, or would stay in any case."""
    nodes, state = gpus("n", "m"), running(a="n", b="n")
    found = decide("ab", gpus("n"), may_share("a", "b", nodes=gpus("n")), state=state, min_run_seconds=950.0)
    assert (
        "it shares its GPU with b, which has trained 900 s, less than moves.minRunSeconds=950"
        in found.reasons["a"]
    )
    found = decide("ab", nodes, may_share("a", "b", nodes=nodes), state=state, max_moves_per_hour=0)
    assert "it shares its GPU with b, which would be stopped or moved" in found.reasons["a"]


def test_by_completion_time_a_pair_parts_that_does_less_than_by_turns():
    """Also where the hour's moves are limited."""
    nodes, slow = gpus("n"), {("a", "b"): 0.3, ("b", "a"): 0.3}
    shared, surplus = (
        may_share("a", "b", nodes=nodes, speeds=slow),
        Surplus.COMPLETION_TIME,
    )
    for most in (None, 0, 1):
        found = decide(
            "ab", nodes, shared, state=running(a="n", b="n"), surplus=surplus, max_moves_per_hour=most
        )
        assert found.stopped == (() if most == 0 else ("b",))
        assert found.reasons.keys() == {"a", "b"}
