"""GPUs that are free on each node, while they are given out one after the other."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from ballast_policies.rounds.values import Node, Placement


class FreeGpus:
    """What is left of each node; changed by :meth:`take`."""

    def __init__(self, nodes: Sequence[Node], placements: Iterable[Placement]) -> None:
        used: Counter[str] = Counter()
        for placement in placements:
            used.update(placement.nodes)
        self._left = {node.name: node.gpus - used[node.name] for node in nodes}
        self._nodes = {node.name: node for node in nodes}
        self._pools: dict[str, list[Node]] = {}
        for node in nodes:
            if self._left[node.name] > 0:
                self._pools.setdefault(node.pool, []).append(node)
        for members in self._pools.values():
            # The fullest first: whole nodes stay free for gangs that start. Nodes that do not exist yet last.
            members.sort(key=lambda node: (node.coming, self._left[node.name], node.name), reverse=True)

    def holds(self, names: Iterable[str]) -> bool:
        """Whether there is a GPU for each of the nodes."""
        wanted = Counter(names)
        return all(self._left.get(name, 0) >= count for name, count in wanted.items())

    def take(self, names: Iterable[str]) -> None:
        """They are no longer free."""
        for name in names:
            self._left[name] -= 1

    def give_back(self, names: Iterable[str]) -> None:
        """They are free again."""
        for name in names:
            self._left[name] += 1

    def find(
        self, gpus: int, pool: str, near: Iterable[str], barred: frozenset[str], per_pod: int = 1
    ) -> tuple[str, ...] | None:
        """One node of the pool for each of ``gpus`` GPUs, those ``near`` first; None: too few are left.

        Args:
            gpus: in whole pods.
            pool: where.
            near: nodes that are best.
            barred: groups of nodes (``Node.group``) that the gang must not be started on.
            per_pod: GPUs of a pod, all on one node.
        """
        members = self._pools.get(pool, [])
        while members and self._left[members[-1].name] <= 0:
            members.pop()
        close = dict.fromkeys(near)
        others = (node for node in reversed(members) if node.name not in close)
        found: list[str] = []
        for node in itertools.chain((self._nodes[name] for name in close), others):
            if len(found) == gpus:
                break
            left = self._left[node.name]
            if left >= per_pod and not node.closed and node.group not in barred:
                found += [node.name] * (min(left, gpus - len(found)) // per_pod * per_pod)
        return tuple(found) if len(found) == gpus else None
