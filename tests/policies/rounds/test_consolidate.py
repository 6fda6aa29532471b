"""Spread gangs at the end of a round: together where that pays and no other job is touched."""

import dataclasses

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.decide import LEAST_GAIN, decide_round
from ballast_policies.rounds.gangs import SpreadGang
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, NodeRequest, Placement, RoundSettings, RoundState


def nodes_of(*gpus: int) -> list[Node]:
    return [Node(name=f"n{i}", pool="p", gpu_type="v100", gpus=has) for i, has in enumerate(gpus)]


def at(*nodes: int) -> Placement:
    return Placement(gpu_type="v100", pool="p", nodes=tuple(f"n{i}" for i in nodes))


def decide(nodes, running, spread, *, barred=None, moves=(), ended=(), **settings):
    """(round without, round with consolidation) of jobs that all run; the ``ended`` ones want no GPUs."""
    jobs = [
        Job(name=name, gpus=len(where.nodes), throughput={"v100": 1.0})
        for name, where in running.items()
        if name not in ended
    ]
    state = RoundState(running=running, running_since=dict.fromkeys(running, 0.0), moves=moves)
    rounds = RoundSettings(round_seconds=60.0, **settings)
    question = Question(
        now=600.0,
        shares={job.name: {"v100": 1.0} for job in jobs},
        jobs=jobs,
        nodes=nodes,
        state=state,
        settings=rounds,
        asks={name: NodeRequest(taints) for name, taints in (barred or {}).items()},
    )
    return decide_round(question), decide_round(dataclasses.replace(question, spread=spread))


def two_nodes(**changes) -> dict[str, SpreadGang]:
    values = {"at": at(1, 2), "fewest": 1, "speed": 2.0, "packed_speed": 4.0, **changes}
    return {"one": SpreadGang(**values)}


CASE = nodes_of(2, 1, 1), {"one": at(1, 2)}


def test_a_gang_moves_to_a_node_that_holds_it_with_both_speeds_in_the_reason():
    """It counts as moved, so that moves of the hour hold."""
    _, decided = decide(*CASE, two_nodes())
    assert decided.placements == {"one": at(0, 0)}
    assert (decided.moved, decided.extended) == (("one",), ())
    assert decided.reasons["one"] == (
        "moves from 2 nodes to 1 of pool p: 4 steps/s in place of 2, after a restart of 30 s"
    )


def test_a_gang_stays_where_it_must_or_where_it_would_win_too_little():
    """Too young, within a round, no moves left, it cannot save, its restart is too dear, a node is barred."""
    for changes, options in (
        ({}, {"min_run_seconds": 900.0}),
        ({}, {"within_round": True}),
        ({}, {"max_moves_per_hour": 1, "moves": (500.0,)}),
        ({"may_move": False}, {}),
        ({"restart_seconds": 590.0}, {}),
        ({"packed_speed": 2.0 * (1 + LEAST_GAIN)}, {}),
        ({"at": at(2, 1)}, {}),
    ):
        before, decided = decide(*CASE, two_nodes(**changes), **options)
        assert decided == before
    nodes = [Node(name="n0", pool="p", gpu_type="v100", gpus=2, taints="x"), *CASE[0][1:]]
    before, decided = decide(nodes, CASE[1], two_nodes(), barred={"one": frozenset({"x"})})
    assert decided == before


def test_nothing_that_another_gang_leaves_or_has_is_taken():
    """The whole node is of a gang that runs there, or has not left yet."""
    running = {"one": at(1, 2), "two": at(0)}
    for ended in ((), ("two",)):
        before, decided = decide(nodes_of(2, 1, 1), running, two_nodes(), ended=ended)
        assert decided == before


def test_a_gang_may_gather_on_a_node_of_its_own():
    """One rank is there already, and there is room for the other."""
    _, decided = decide(nodes_of(2, 1), {"one": at(0, 1)}, two_nodes(at=at(0, 1)))
    assert decided.placements == {"one": at(0, 0)}
