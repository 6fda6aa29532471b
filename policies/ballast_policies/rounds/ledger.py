"""Ledger of the GPUs that are left while gangs are given theirs, and the nodes that a gang takes there.

As few nodes as possible, the tightest fit first, and large gangs before small ones.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement, TopologyRequest, by_domain


def given_to_tenants(question: Question, placements: Mapping[str, Placement]) -> Counter[str]:
    """Tenant -> GPUs of its room that ``placements`` take: of a running gang, those beyond its least size."""
    given: Counter[str] = Counter()
    for name, at in placements.items() if question.room else ():
        tenant = question.tenants.get(name, "")
        if tenant in question.room:
            before = question.least(name, question.state.running[name]) if question.trains(name) else ()
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
        """Ledger after ``placements``; running gangs have their least sizes besides their tenant's room."""
        given = given_to_tenants(question, placements)
        room = {tenant: most - given[tenant] for tenant, most in question.room.items()}
        return cls(question.nodes, (at.nodes for at in placements.values()), room)

    def holds(self, names: Iterable[str], tenant: str = "") -> bool:
        """True if there is a GPU for each of the nodes, and room within the tenant's limit."""
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
    gpus: int,
    members: Sequence[Node],
    free: Mapping[str, int],
    gpus_per_pod: int = 1,
    asked: TopologyRequest | None = None,
) -> tuple[str, ...] | None:
    """Node names, one per GPU, from ``members`` (nodes of one pool), or None where they have no room.

    On as few nodes as hold the gang (:func:`_on_fewest_nodes`), of these in as few domains as possible, the
    widest first, and where one domain holds it in the fullest. A gang that prefers a level has fewest domains
    down to it first, and one that requires it all nodes in one. Nodes that do not exist yet are taken only
    where those that do have no room.
    """
    there = [node for node in members if not node.provisionable]
    if len(there) < len(members) and (found := pack(gpus, there, free, gpus_per_pod, asked)) is not None:
        return found
    if asked is not None and asked.required:
        of_level = by_domain(members, asked.level)
        within = _best_domain(gpus // gpus_per_pod, of_level, free, gpus_per_pod, asked.most)
        return pack(gpus, within, free, gpus_per_pod)
    everywhere = _on_fewest_nodes(gpus, members, free, gpus_per_pod)
    if everywhere is None or len(set(everywhere)) == 1:
        return everywhere
    pods, depth = gpus // gpus_per_pod, max(len(node.domains) for node in members)
    if not depth:
        return everywhere
    ways: list[tuple[str, ...]] = []
    scopes: list[tuple[int, Sequence[Node]]] = [(-1, members)]
    for level in range(depth):
        best = _best_domain(pods, by_domain(members, level), free, gpus_per_pod)
        if best:
            scopes.insert(0, (level, best))
    for level, within in scopes:
        ways += filter(None, [_on_fewest_nodes(gpus, within, free, gpus_per_pod)])
        ways += [
            _over_domains(pods, by_domain(within, finer), free, gpus_per_pod)
            for finer in range(level + 1, depth)
        ]
    by_name = {node.name: node for node in members}

    def spread(way: tuple[str, ...]) -> tuple[int, ...]:
        nodes = set(way)
        counts = tuple(len({by_name[name].domain(level) for name in nodes}) for level in range(depth))
        first = counts[: asked.level + 1] if asked is not None else ()
        return (*first, len(nodes), *counts)

    return min(ways, key=spread)


def _on_fewest_nodes(
    gpus: int, members: Sequence[Node], free: Mapping[str, int], gpus_per_pod: int
) -> tuple[str, ...] | None:
    """The node that holds the gang whole and has least to spare.

    Else the nodes with the most room, so that the gang spreads over the fewest, and the tightest fit for what
    remains. The GPUs of a pod are on one node.
    """
    left = {node.name: free[node.name] // gpus_per_pod for node in members}
    pods, rest = divmod(gpus, gpus_per_pod)
    if rest or sum(left.values()) < pods:
        return None
    chosen: list[str] = []
    for name, here in _filled(pods, left, free):
        chosen += [name] * here * gpus_per_pod
    return tuple(chosen)


def _filled(pods: int, room: Mapping[str, int], spare: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """(name, pods there): the tightest room for all that are left, else the largest; ties: by ``spare``."""
    left = dict(room)
    while pods > 0:
        whole = [name for name, has in left.items() if has >= pods]
        name = (
            min(whole, key=lambda name: (left[name], spare[name], name))
            if whole
            else min(left, key=lambda name: (-left[name], spare[name], name))
        )
        here = min(pods, left.pop(name))
        yield name, here
        pods -= here


def _best_domain(
    pods: int,
    domains: Mapping[str, Sequence[Node]],
    free: Mapping[str, int],
    gpus_per_pod: int,
    most: int = 0,
) -> Sequence[Node]:
    """The nodes of the domain that holds all on fewest nodes, and has least to spare; empty: none does.

    ``most``: GPUs to which the gang may grow there; domains that lack least of them come first.
    """
    best: tuple[int, int, int, str] | None = None
    for name, nodes in domains.items():
        rooms = sorted((free[node.name] // gpus_per_pod for node in nodes), reverse=True)
        reached = list(itertools.accumulate(rooms))
        if reached[-1] >= pods:
            lacks = max(0, most - reached[-1] * gpus_per_pod)
            found = lacks, bisect.bisect_left(reached, pods), reached[-1], name
            best = found if best is None else min(best, found)
    return () if best is None else domains[best[-1]]


def _over_domains(
    pods: int, domains: Mapping[str, Sequence[Node]], free: Mapping[str, int], gpus_per_pod: int
) -> tuple[str, ...]:
    """Nodes on the fewest of the domains, which together have the room."""
    room = {name: sum(free[node.name] // gpus_per_pod for node in nodes) for name, nodes in domains.items()}
    chosen: list[str] = []
    for name, here in _filled(pods, room, room):
        chosen += _on_fewest_nodes(here * gpus_per_pod, domains[name], free, gpus_per_pod) or ()
    return tuple(chosen)


def in_whole_pods(nodes: Sequence[str], gpus_per_pod: int) -> bool:
    """True if ``nodes``, one for each GPU, are those of pods with as many GPUs on one node each."""
    pods = [nodes[first : first + gpus_per_pod] for first in range(0, len(nodes), gpus_per_pod)]
    return all(len(pod) == gpus_per_pod and len(set(pod)) == 1 for pod in pods)


def in_its_pools(placement: Placement, nodes: Mapping[str, Node]) -> bool:
    """True if the placement's nodes all exist, each in the pool and of the type that it names."""
    types = {part.pool: part.gpu_type for part in placement.by_pool}
    return all(
        (node := nodes.get(name)) is not None and (node.pool, node.gpu_type) == (pool, types[pool])
        for pool, names in placement.nodes_by_pool.items()
        for name in set(names)
    )
