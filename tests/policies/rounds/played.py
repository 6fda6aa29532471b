"""Rounds played in a row, each from the state that the one before has left."""

import dataclasses

from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.memory import RoundMemory
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement, RoundSettings, RoundState

TYPES = ("v100", "p100", "k80")


def node(name, gpus, pool="a", **fields):
    return Node(name=name, pool=pool, gpu_type="v100", gpus=gpus, **fields)


def job(name, gpus=1, **fields):
    return Job(name=name, gpus=gpus, **{"throughput": {"v100": 1.0}, **fields})


def at(*nodes, pool="a"):
    return Placement(gpu_type="v100", pool=pool, nodes=nodes)


def solve(nodes, jobs):
    capacity = {kind: sum(node.gpus for node in nodes if node.gpu_type == kind) for kind in TYPES}
    return allocate("max-min-fairness", Problem(gpu_types=TYPES, capacity=capacity, jobs=tuple(jobs)))


def one_round(nodes, jobs, *, now=10.0, shares=None, running=None, settings=None, **options):
    """A round in which gangs run since 0.0; ``options``: more of the question, or ``received`` GPU time."""
    running, received = running or {}, options.pop("received", {})
    return decide_round(
        Question(
            now=now,
            shares=solve(nodes, jobs).allocation if shares is None else shares,
            jobs=jobs,
            nodes=nodes,
            state=RoundState(received=received, running=running, running_since=dict.fromkeys(running, 0.0)),
            settings=settings or RoundSettings(),
            **options,
        )
    )


def play(nodes, jobs, rounds, settings=None, shares=None):
    """The rounds in a row, as the allocator plays them, with the state each began with.

    ``shares``: of a round's number, in place of max-min fairness.
    """
    settings = settings or RoundSettings(round_seconds=60.0)
    solved = None if shares else solve(nodes, jobs).allocation
    memory, state, now = RoundMemory(), RoundState(), 0.0
    for number in range(rounds):
        given = shares(number) if shares else solved
        decided = decide_round(
            Question(now=now, shares=given, jobs=jobs, nodes=nodes, state=state, settings=settings)
        )
        yield now, state, decided
        memory = dataclasses.replace(memory, shares=given).until(
            now + settings.round_seconds,
            given,
            running=decided.placements,
            round_seconds=settings.round_seconds,
        )
        changed = len(decided.moved) + len(decided.stopped)
        state = RoundState(
            received=memory.received,
            promised=memory.promised,
            running=decided.placements,
            running_since={
                job: state.running_since[job] if job in decided.extended else now
                for job in decided.placements
            },
            moves=(*state.moves, *([now] * changed)),
        )
        now += settings.round_seconds
