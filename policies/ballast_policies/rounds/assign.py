"""Exact nodes for gangs that were granted GPUs of their pools by count."""

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ballast_policies.rounds.ledger import Ledger, pack
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, NodeRequest, Placement, PoolPart

Granted = tuple[str, str, int]
"""Job, pool (of rank 0), GPUs."""

Splits = Mapping[str, Sequence[tuple[str, Mapping[str, int]]]]
"""Gang that starts or moves -> in the order of its ranks: pool, and its GPUs there by group of nodes
(``Node.group``)."""


def assign_nodes(
    granted: Iterable[Granted],
    ledger: Ledger,
    running: Mapping[str, Placement],
    splits: Splits,
    question: Question,
) -> dict[str, Placement]:
    """Exact nodes for gangs that fit their pools by count, the largest first.

    Left out are gangs whose pods find no node with as many free GPUs, and those that find no domain
    (:mod:`.values`); a gang of pods with one GPU each that requires none always finds its nodes.

    ``granted``: the most urgent first; ``running``: a gang that stays in its pool keeps its nodes;
    ``splits``: where nodes are told apart, and of gangs in several pools.
    """
    found = _Assignment(granted, ledger, running, splits, question)
    # Large pods find no room behind small ones.
    found.movers.sort(key=lambda at: (-found.asks(at).per_pod, -found.granted[at][2]))
    while found.movers:
        found.place(found.movers.pop(0))
    return found.placements


def assign_by_urgency(
    granted: Iterable[Granted],
    ledger: Ledger,
    running: Mapping[str, Placement],
    splits: Splits,
    question: Question,
    pinned: Collection[str] | None = None,
) -> tuple[dict[str, Placement], dict[str, str]]:
    """As :func:`assign_nodes`, the most urgent first: (job -> where it runs, pool -> job it is kept for).

    A gang that finds no domain, or no nodes for its pods, is given those of less urgent gangs, which move. If
    these must not be disturbed, what is free of the nodes that it would get without them is kept for it.

    ``pinned``: jobs that must not be disturbed; None: nothing is kept.
    """
    found = _Assignment(granted, ledger, running, splits, question)
    kept: dict[str, str] = {}
    while found.movers:
        at = found.movers.pop(0)
        if not found.place(at) and not found.make_room(at) and pinned:
            pools = found.pools(at)
            if not kept.keys() & pools and found.keep(at, pinned):
                kept |= dict.fromkeys(pools, found.granted[at][0])
    return found.placements, kept


class _Assignment:
    """The nodes of the gangs, as they are found.

    Attributes:
        granted: the gangs, the most urgent first.
        placements: job -> where it runs.
        movers: positions of the gangs that do not stay where they run, in order.
    """

    def __init__(
        self,
        granted: Iterable[Granted],
        ledger: Ledger,
        running: Mapping[str, Placement],
        splits: Splits,
        question: Question,
    ) -> None:
        """Let those that stay keep their nodes."""
        self.granted, self._ledger, self._splits, self._question = list(granted), ledger, splits, question
        self._tells_nodes_apart = any(asks.barred for asks in question.asks.values()) or any(
            node.closed for node in question.nodes
        )
        self.placements: dict[str, Placement] = {}
        self.movers: list[int] = []
        self._staying: list[int] = []
        seconds = question.second_jobs
        # A second job gets its GPU where the first has left it.
        for at, (job, pool, gpus) in sorted(enumerate(self.granted), key=lambda one: one[1][0] in seconds):
            now = running.get(job)
            if now and job in splits:
                own = [(pool, Counter(ledger.nodes[name].group for name in now.nodes))]
                now = now if splits[job] == own else None
            if now and now.pool == pool and len(now.nodes) == gpus and ledger.grant(now.nodes):
                self.placements[job] = now
                self._staying.append(at)
            else:
                self.movers.append(at)
        self.movers.sort()
        self._staying.sort()

    def asks(self, at: int) -> NodeRequest:
        """Request of the gang for its nodes."""
        return self._question.asks_of(self.granted[at][0])

    def place(self, at: int) -> bool:
        """Give the gang what is free; whether it finds its nodes."""
        job, pool, gpus = self.granted[at]
        chosen = self._packed(at, by_group=self.asks(at).required is None)
        if chosen is None:
            every = self._question.asks.values()
            in_pods = any(asks.per_pod > 1 or asks.topology is not None for asks in every)
            assert in_pods, f"{job} was granted {gpus} GPUs that pool {pool} has not"
            return False
        self._give(at, chosen)
        return True

    def make_room(self, at: int) -> bool:
        """Give the gang nodes of less urgent ones that stay, as few as possible; these have to move."""
        less = [other for other in self._staying if other > at and self.pools(at) & self.pools(other)]

        def fits(count: int) -> bool:
            own = [name for other in less[len(less) - count :] for name in self._nodes(other)]
            self._ledger.undo(own)
            found = self._packed(at)
            self._ledger.take(own)
            return found is not None

        if not less or not fits(len(less)):
            return False
        count = bisect.bisect_left(range(len(less)), True, key=fits)
        leaving = less[len(less) - count :]
        for other in leaving:
            self._ledger.undo(self._nodes(other))
        chosen = self._packed(at)
        assert chosen is not None
        self._give(at, chosen)
        for other in leaving:
            if not self._ledger.grant(self._nodes(other)):
                del self.placements[self.granted[other][0]]
                self._staying.remove(other)
                bisect.insort(self.movers, other)
        return True

    def keep(self, at: int, pinned: Collection[str]) -> bool:
        """Keep for the gang what is free of the nodes that it would get without those that stay.

        Whether there are such nodes. Those of more urgent gangs that may be disturbed are theirs.
        """
        others = [
            name
            for other in self._staying
            if (other > at or self.granted[other][0] in pinned) and self.pools(at) & self.pools(other)
            for name in self._nodes(other)
        ]
        self._ledger.undo(others)
        wanted = Counter(self._packed(at) or ())
        self._ledger.take(others)
        for name, gpus in wanted.items():
            self._ledger.take([name] * min(gpus, self._ledger.left[name]))
        return bool(wanted)

    def pools(self, at: int) -> set[str]:
        """Those of the gang."""
        job, pool, _ = self.granted[at]
        if job in self.placements:
            return {*self.placements[job].nodes_by_pool}
        return {part[0] for part in self._splits.get(job, ())} or {pool}

    def _nodes(self, at: int) -> Sequence[str]:
        return self.placements[self.granted[at][0]].nodes

    def _packed(self, at: int, *, by_group: bool = False) -> tuple[str, ...] | None:
        """Nodes for the gang; ``by_group``: in the groups of its split, where it has one."""
        job, pool, gpus = self.granted[at]
        split = self._splits.get(job)
        asks = self.asks(at)
        if split is not None and len(split) > 1:
            asks = NodeRequest(self._question.mixed[job].barred, asks.per_pod)
        chosen: list[str] = []
        for there, groups in split if split is not None else [(pool, {"": gpus})]:
            counts: list[tuple[str | None, int]] = [(None, sum(groups.values()))]
            if split is not None and by_group:
                counts = [*groups.items()]
            for group, count in counts:
                members: Sequence[Node] = self._ledger.pools[there]
                if group is not None:
                    members = [node for node in members if node.group == group]
                elif self._tells_nodes_apart:
                    members = asks.open(members)
                found = pack(count, members, self._ledger.left, asks.per_pod, asks.topology)
                if found is None:
                    self._ledger.undo(chosen)
                    return None
                self._ledger.take(found)
                chosen += found
        self._ledger.undo(chosen)
        return tuple(chosen)

    def _give(self, at: int, nodes: tuple[str, ...]) -> None:
        job, pool, _ = self.granted[at]
        self._ledger.take(nodes)
        parts = tuple(
            PoolPart(pool=there, gpu_type=self._type(there), gpus=sum(groups.values()))
            for there, groups in self._splits.get(job, ())
        )
        self.placements[job] = Placement(
            gpu_type=self._type(pool), pool=pool, nodes=nodes, parts=parts if len(parts) > 1 else ()
        )

    def _type(self, pool: str) -> str:
        return self._ledger.pools[pool][0].gpu_type
