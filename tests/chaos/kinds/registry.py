"""Kinds of faults, by name: each is a function of the simulation and a number that chooses the victim."""

from collections.abc import Callable

from tests.chaos.cluster import JOBS, ChaosSimulation

Apply = Callable[[ChaosSimulation, int], None]

KINDS: dict[str, Apply] = {}
"""Name -> what it does."""


def kind(name: str) -> Callable[[Apply], Apply]:
    def register(apply: Apply) -> Apply:
        KINDS[name] = apply
        return apply

    return register


def until(simulation: ChaosSimulation, number: int, longest: int) -> int:
    return simulation.number + 1 + number % longest


def job_of(number: int) -> str:
    return JOBS[number % len(JOBS)]
