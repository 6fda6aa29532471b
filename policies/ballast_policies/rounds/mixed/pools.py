"""Free GPUs of several pools together: who has them, who may take them, and when it is a gang's turn."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.packing import pack
from ballast_policies.rounds.priority import priorities
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement, PoolPart


class AllPools:
    """The pools of a question, taken together."""

    def __init__(self, question: Question) -> None:
        self._q = question

    def urgency(self) -> dict[str, float]:
        """Job -> its priority over all columns together, as :mod:`..priority` has it for one."""
        q = self._q
        received = {job.name: sum(q.state.received.get(job.name, {}).values()) for job in q.jobs}
        running = (q.now - since for since in q.state.running_since.values())
        elapsed = max([q.settings.round_seconds, *received.values(), *running])
        share = np.array([sum(q.shares.get(job.name, {}).values()) for job in q.jobs])
        promised = share * elapsed
        if q.state.promised is not None:
            promised = np.array([sum(q.state.promised.get(job.name, {}).values()) for job in q.jobs])
        had = np.array([received[job.name] for job in q.jobs])
        found = priorities(share, promised, had, round_seconds=q.settings.round_seconds)
        return dict(zip(received, found.tolist(), strict=True))

    def free(self, used: Sequence[Sequence[str]]) -> Counter[str]:
        """Node -> GPUs that are left of it, by the nodes of gangs."""
        left = Counter({node.name: node.gpus for node in self._q.nodes})
        for nodes in used:
            left.subtract(nodes)
        return left

    def open_nodes(self, gang: MixedGang, left: Mapping[str, int], *, to_come: bool = False) -> list[Node]:
        """Nodes on which the gang may be started, with their free GPUs; those to come only where asked."""
        return [
            dataclasses.replace(node, gpus=left[node.name])
            for node in self._q.nodes
            if (to_come or not node.coming)
            and not node.closed
            and node.group not in gang.barred
            and left[node.name] > 0
        ]

    def room_of(self, gang: MixedGang, nodes: Sequence[Node]) -> dict[str, tuple[str, int]]:
        """Pool -> (its GPU type, free GPUs of ``nodes`` in whole pods of the gang)."""
        found: dict[str, tuple[str, int]] = {}
        for node in nodes:
            before = found.get(node.pool, (node.gpu_type, 0))[1]
            found[node.pool] = node.gpu_type, before + node.gpus // gang.per_pod * gang.per_pod
        return found

    def placed(self, gang: MixedGang, parts: Sequence[PoolPart], nodes: Sequence[Node]) -> Placement | None:
        """The gang in ``parts`` on ``nodes``, as few of them as possible; None: it has no parts."""
        free, chosen = {node.name: node.gpus for node in nodes}, list[str]()
        for part in parts:
            here = pack(part.gpus, [node for node in nodes if node.pool == part.pool], free, gang.per_pod)
            if here is None:
                return None
            chosen += here
        if not parts:
            return None
        return Placement(
            gpu_type=parts[0].gpu_type,
            pool=parts[0].pool,
            nodes=tuple(chosen),
            parts=tuple(parts) if len(parts) > 1 else (),
        )

    def tenant_room(
        self, name: str, placements: Mapping[str, Placement], more: Mapping[str, Placement]
    ) -> int | None:
        """GPUs that its tenant may still be given besides ``placements`` and ``more``; None: no limit."""
        tenant = self._q.tenants.get(name, "")
        if tenant not in self._q.room:
            return None
        used = 0
        for other, at in {**placements, **more}.items():
            if self._q.tenants.get(other, "") != tenant:
                continue
            runs = other in self._q.state.running and other not in self._q.pending
            before = self._q.least(other, self._q.state.running[other]) if runs else ()
            used += len(at.nodes) - len(before)
        return max(0, self._q.room[tenant] - used)

    def waits_for(self, gang: MixedGang, left: Mapping[str, int]) -> str:
        """What a gang lacks that waits for GPUs of several pools."""
        room = self.room_of(gang, self.open_nodes(gang, left, to_come=True))
        types = {node.pool: node.gpu_type for node in self._q.nodes if gang.relative(node.gpu_type) > 0}
        has = [
            f"{room.get(pool, ('', 0))[1]} {kind} free in pool {pool}" for pool, kind in sorted(types.items())
        ]
        return f"waits for {gang.sizes[0]} GPUs of its pools together: {'; '.join(has) or 'it may use none'}"
