"""Ledger of the GPUs that are left while gangs are given theirs, and the nodes that a gang takes there.

As few nodes as possible, the tightest fit first, and large gangs before small ones.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement


def given_to_tenants(question: Question, placements: Mapping[str, Placement]) -> Counter[str]:
    """Tenant -> GPUs of its room that ``placements`` take: of a running gang, those beyond its least size."""
    given: Counter[str] = Counter()
    for name, at in placements.items() if question.room else ():
        tenant = question.tenants.get(name, "")
        if tenant in question.room:
            runs = name in question.state.running and name not in question.pending
            before = question.least(name, question.state.running[name]) if runs else ()
            given[tenant] += len(at.nodes) - len(before)
    return given


class Ledger:
    """GPUs left of each node, and of each tenant's limit.

    Attributes:
        left: node -> GPUs that no gang has.
        room: tenant -> GPUs that its gangs may be given, for tenants with a limit.
        nodes: name -> node.
        pools: pool -> its nodes.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        used: Iterable[Iterable[str]] = (),
        room: Mapping[str, int] | None = None,
    ) -> None:
        """Open the ledger.

        Args:
            nodes: of all pools.
            used: nodes of each gang that has its GPUs, one for each GPU.
            room: tenant -> GPUs, for tenants with a limit.
        """
        self.nodes = {node.name: node for node in nodes}
        self.left = {name: node.gpus for name, node in self.nodes.items()}
        self.room = dict(room or {})
        self.pools: dict[str, list[Node]] = {}
        for node in self.nodes.values():
            self.pools.setdefault(node.pool, []).append(node)
        for names in used:
            self.take(names)

    @classmethod
    def of(cls, question: Question, placements: Mapping[str, Placement]) -> Self:
        """What ``placements`` leave; a tenant's running gangs may have their least sizes besides its room."""
        given = given_to_tenants(question, placements)
        room = {tenant: most - given[tenant] for tenant, most in question.room.items()}
        return cls(question.nodes, (at.nodes for at in placements.values()), room)

    def holds(self, names: Iterable[str], tenant: str = "") -> bool:
        """Whether there is a GPU for each of the nodes, and room within the tenant's limit."""
        wanted = Counter(names)
        if tenant in self.room and self.room[tenant] < wanted.total():
            return False
        return all(self.left.get(name, 0) >= count for name, count in wanted.items())

    def grant(self, names: Iterable[str], tenant: str = "") -> bool:
        """Take the GPUs if they are there; whether they were."""
        names = tuple(names)
        if not self.holds(names, tenant):
            return False
        self.take(names, tenant)
        return True

    def take(self, names: Iterable[str], tenant: str = "") -> None:
        """Take GPUs, those of nodes that are gone and those beyond a limit as well."""
        self._book(names, tenant, -1)

    def undo(self, names: Iterable[str], tenant: str = "") -> None:
        """Give GPUs back."""
        self._book(names, tenant, 1)

    def _book(self, names: Iterable[str], tenant: str, change: int) -> None:
        count = 0
        for name in names:
            count += change
            if name in self.left:
                self.left[name] += change
        if tenant in self.room:
            self.room[tenant] += count

    def room_of(self, tenant: str) -> float:
        """GPUs that the tenant's gangs may be given; infinite: it has no limit."""
        return max(0, self.room[tenant]) if tenant in self.room else math.inf


def pack(
    gpus: int, members: Sequence[Node], free: Mapping[str, int], gpus_per_pod: int = 1
) -> tuple[str, ...] | None:
    """One node name per GPU from ``members`` (nodes of one pool), or None where they have no room.

    The node that holds the gang whole and has least to spare; else the nodes with the most room, so that the
    gang spreads over the fewest, and the tightest fit for what remains. The GPUs of a pod are on one node.
    Nodes that do not exist yet are taken only where those that do have no room.
    """
    there = [node for node in members if not node.provisionable]
    if len(there) < len(members) and (found := pack(gpus, there, free, gpus_per_pod)) is not None:
        return found
    left = {node.name: free[node.name] // gpus_per_pod for node in members}
    pods, rest = divmod(gpus, gpus_per_pod)
    if rest or sum(left.values()) < pods:
        return None
    chosen: list[str] = []
    while pods > 0:
        whole = [name for name, room in left.items() if room >= pods]
        name = (
            min(whole, key=lambda name: (left[name], free[name], name))
            if whole
            else min(left, key=lambda name: (-left[name], free[name], name))
        )
        here = min(pods, left.pop(name))
        chosen += [name] * here * gpus_per_pod
        pods -= here
    return tuple(chosen)


def in_whole_pods(nodes: Sequence[str], gpus_per_pod: int) -> bool:
    """Whether ``nodes``, one for each GPU, are those of pods with as many GPUs on one node each."""
    pods = [nodes[first : first + gpus_per_pod] for first in range(0, len(nodes), gpus_per_pod)]
    return all(len(pod) == gpus_per_pod and len(set(pod)) == 1 for pod in pods)


def assign_nodes(
    granted: Iterable[tuple[str, str, int]],
    ledger: Ledger,
    running: Mapping[str, Placement],
    splits: Mapping[str, Mapping[str, int]] | None = None,
    gpus_per_pod: Mapping[str, int] | None = None,
    *,
    by_urgency: bool = False,
) -> dict[str, Placement]:
    """Exact nodes for gangs that fit their pools by count.

    Left out are gangs whose pods find no node with as many free GPUs; a gang of pods with one GPU each always
    finds its nodes.

    Args:
        granted: (job, pool, gpus), the most urgent first.
        ledger: of all nodes; the gangs take their GPUs there.
        running: job -> where it runs now; a gang that stays in its pool keeps its nodes.
        splits: job -> group of nodes (``Node.group``) -> GPUs, for gangs that start or move; None: any nodes.
        gpus_per_pod: job -> GPUs of each of its pods, where it is not 1.
        by_urgency: gangs that start or move choose in the order of ``granted``, not the largest first.
    """
    splits, per_pod = splits or {}, gpus_per_pod or {}
    placements: dict[str, Placement] = {}
    movers = []
    for job, pool, gpus in granted:
        now = running.get(job)
        stays = job not in splits and now is not None and now.pool == pool and len(now.nodes) == gpus
        if stays and now is not None and ledger.grant(now.nodes):
            placements[job] = now
        else:
            movers.append((job, pool, gpus))
    # Large pods find no room behind small ones.
    if not by_urgency:
        movers.sort(key=lambda mover: (-per_pod.get(mover[0], 1), -mover[2]))
    for job, pool, gpus in movers:
        parts = [
            pack(count, members, ledger.left, per_pod.get(job, 1))
            for members, count in _groups(ledger.pools[pool], gpus, splits.get(job))
        ]
        assert None not in parts or job in per_pod, f"{job} was granted {gpus} GPUs that pool {pool} has not"
        chosen = tuple(name for part in parts if part is not None for name in part)
        if len(chosen) < gpus:
            continue
        ledger.take(chosen)
        placements[job] = Placement(gpu_type=ledger.pools[pool][0].gpu_type, pool=pool, nodes=chosen)
    return placements


def _groups(
    members: Sequence[Node], gpus: int, split: Mapping[str, int] | None
) -> list[tuple[Sequence[Node], int]]:
    """(nodes, GPUs to take of them); all at once where the gang's split is not given."""
    if split is None:
        return [(members, gpus)]
    return [([node for node in members if node.group == text], count) for text, count in split.items()]


def in_its_pools(placement: Placement, nodes: Mapping[str, Node]) -> bool:
    """Whether the placement's nodes are all there, each in the pool, of the type, that it names."""
    types = {part.pool: part.gpu_type for part in placement.by_pool}
    return all(
        (node := nodes.get(name)) is not None and (node.pool, node.gpu_type) == (pool, types[pool])
        for pool, names in placement.nodes_by_pool.items()
        for name in set(names)
    )
