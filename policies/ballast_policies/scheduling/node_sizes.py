"""How many nodes a gang needs, by the sizes of the nodes."""

import dataclasses
from collections.abc import Iterable, Mapping

from ballast_policies.rounds.values import Node

_Asked = tuple[str, int, int, frozenset[str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeSizes:
    """The nodes of all pools, as if no gang ran on them.

    Attributes:
        pools: GPU type -> its pools.
        nodes: pool -> (group of nodes, GPUs of each), the largest first; without closed ones.
    """

    pools: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    nodes: Mapping[str, tuple[tuple[str, int], ...]] = dataclasses.field(default_factory=dict)
    _in_pool: dict[_Asked, int | None] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    _of_type: dict[_Asked, int | None] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> "NodeSizes":
        """The sizes of ``nodes``."""
        pools: dict[str, dict[str, None]] = {}
        found: dict[str, list[tuple[str, int]]] = {}
        for node in nodes:
            pools.setdefault(node.gpu_type, {})[node.pool] = None
            if not node.closed and node.gpus > 0:
                found.setdefault(node.pool, []).append((node.group, node.gpus))
        return cls(
            pools={gpu_type: tuple(names) for gpu_type, names in pools.items()},
            nodes={
                pool: tuple(sorted(has, key=lambda one: one[1], reverse=True)) for pool, has in found.items()
            },
        )

    def fewest(
        self, gpu_type: str, gpus: int, *, per_pod: int = 1, barred: frozenset[str] = frozenset()
    ) -> int | None:
        """Nodes that hold a gang in the pool of the type that needs fewest; None: no pool holds it.

        Args:
            gpu_type: of the pools.
            gpus: of the gang.
            per_pod: GPUs of each of its pods, all on one node.
            barred: groups of nodes (``Node.group``) that it must not be started on.
        """
        asked = gpu_type, gpus, per_pod, barred
        if asked not in self._of_type:
            pools = self.pools.get(gpu_type, ())
            counts = (self.in_pool(pool, gpus, per_pod=per_pod, barred=barred) for pool in pools)
            self._of_type[asked] = min((count for count in counts if count is not None), default=None)
        return self._of_type[asked]

    def in_pool(
        self, pool: str, gpus: int, *, per_pod: int = 1, barred: frozenset[str] = frozenset()
    ) -> int | None:
        """As :meth:`fewest`, of one pool."""
        asked = pool, gpus, per_pod, barred
        if asked not in self._in_pool:
            self._in_pool[asked] = self._count(*asked)
        return self._in_pool[asked]

    def _count(self, pool: str, gpus: int, per_pod: int, barred: frozenset[str]) -> int | None:
        left, count = gpus, 0
        for group, has in self.nodes.get(pool, ()):
            if left <= 0:
                break
            if group not in barred and has >= per_pod:
                left -= has // per_pod * per_pod
                count += 1
        return count if left <= 0 else None
