"""Domains of nodes above the node, as racks and blocks, and what a gang asks of them.

A level is a label of nodes, levels go from the widest to the narrowest, and a domain is the nodes with the
same values of its level and of all wider ones, as in Kueue's Topology
(https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/). A node is the narrowest domain.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ballast_policies.rounds.values import Node, own_domain


@dataclasses.dataclass(frozen=True, slots=True)
class TopologyRequest:
    """What a gang asks of the topology.

    Attributes:
        label: of the level.
        level: its number, 0: the widest.
        required: all ranks are in one domain of it; otherwise in as few as possible.
        most: GPUs that the gang may grow to.
    """

    label: str
    level: int
    required: bool
    most: int = 0


def domains_of(name: str, labels: Mapping[str, str], levels: Sequence[str]) -> tuple[str, ...]:
    """The domain of a node at each level; a node without the label is one of its own.

    Args:
        name: of the node.
        labels: of the node.
        levels: their labels, the widest first.
    """
    found: list[str] = []
    for label in levels:
        outer = f"{found[-1]}/" if found else ""
        found.append(f"{outer}{labels.get(label) or own_domain(name)}")
    return tuple(found)


def by_domain(nodes: Iterable[Node], level: int) -> dict[str, list[Node]]:
    """Domain of the level -> its nodes."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.domain(level), []).append(node)
    return found


def largest_domain(
    nodes: Iterable[Node], free: Mapping[str, int], asked: TopologyRequest, gpus_per_pod: int = 1
) -> tuple[int, str]:
    """(GPUs for whole pods of the domain that has most, its name); ``free``: node -> GPUs."""
    rooms = (
        (sum(free[node.name] // gpus_per_pod * gpus_per_pod for node in within), name)
        for name, within in by_domain(nodes, asked.level).items()
    )
    return max(rooms, key=lambda room: (room[0], room[1]), default=(0, "none"))


def told(nodes: Iterable[Node], asked: TopologyRequest) -> str:
    """Where a gang on ``nodes`` is, as text."""
    found = by_domain(nodes, asked.level)
    if len(found) == 1:
        return f"in domain {next(iter(found))} of {asked.label}"
    return f"over {len(found)} domains of {asked.label}"


def beside(nodes: Iterable[Node], base: Iterable[Node], asked: TopologyRequest | None) -> list[Node]:
    """``nodes`` that a gang on ``base`` may grow onto, those first that share most of its domains.

    One that requires a level stays in the domain that it is in; in several domains it does not grow.
    """
    base, found = list(base), list(nodes)
    if asked is not None and asked.required:
        own = {node.domain(asked.level) for node in base}
        found = [node for node in found if own == {node.domain(asked.level)}]
    near = {name for node in base for name in node.domains}
    found.sort(key=lambda node: -sum(name in near for name in node.domains))
    return found
