"""Kinds of faults: by name, a function of the episode and a number that chooses victim and length."""

from collections.abc import Callable

from tests.chaos.processes.cluster import NAMESPACE, NODES, REPLICAS
from tests.chaos.processes.episode import Episode

Apply = Callable[[Episode, int], None]
KINDS: dict[str, Apply] = {}
"""Name -> what it does. It may be refused by an API server that is away: then nothing has happened."""

CORE = f"/api/v1/namespaces/{NAMESPACE}"


def kind(name: str) -> Callable[[Apply], Apply]:
    def register(apply: Apply) -> Apply:
        KINDS[name] = apply
        return apply

    return register


def node_of(number: int) -> str:
    return sorted(NODES)[number % len(NODES)]


def replica_of(number: int) -> str:
    return REPLICAS[number % len(REPLICAS)]


def seconds_of(number: int, longest: int) -> float:
    """1 to ``longest``."""
    return 1.0 + (number // 10) % longest
