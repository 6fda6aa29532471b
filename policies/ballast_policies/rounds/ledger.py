"""Ledger of the GPUs that are left while gangs are given theirs, which every pass over a round asks."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
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
