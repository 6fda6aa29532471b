"""What a round with gangs in several pools is decided on."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.mixed.gang import MixedGang
from ballast_policies.rounds.packing import pack
from ballast_policies.rounds.priority import priorities
from ballast_policies.rounds.sizes.decide import decide_elastic_round
from ballast_policies.rounds.sizes.gang import ElasticGang, SizeSettings
from ballast_policies.rounds.values import Node, Placement, PoolPart, Round, RoundSettings, RoundState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """As :func:`decide_elastic_round` is asked, and the gangs that may run in several pools."""

    now: float
    shares: Mapping[str, Mapping[str, float]]
    jobs: Sequence[Job]
    nodes: Sequence[Node]
    state: RoundState
    settings: RoundSettings
    elastic: Mapping[str, ElasticGang]
    mixed: Mapping[str, MixedGang]
    sizes: SizeSettings | None = None
    tenants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    room: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pending: frozenset[str] = frozenset()
    not_tolerated: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus_per_pod: Mapping[str, int] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, float] | None = None

    def decide(
        self,
        without: Collection[str] = (),
        taken: Mapping[str, int] | None = None,
        *,
        moves: int = 0,
        tenants: Mapping[str, int] | None = None,
    ) -> Round:
        """The round of the other jobs, each in one pool.

        Args:
            without: jobs that take no part.
            taken: node -> GPUs that these have.
            moves: running gangs that these stop, of those that may be stopped within the hour.
            tenants: tenant -> GPUs that these take of its room.
        """
        taken, gone, settings = taken or {}, set(without), self.settings
        if moves and settings.max_moves_per_hour is not None:
            left = max(0, settings.max_moves_per_hour - moves)
            settings = dataclasses.replace(settings, max_moves_per_hour=left)
        nodes, parts = self.nodes, self.parts
        if taken:
            nodes = [dataclasses.replace(node, gpus=node.gpus - taken.get(node.name, 0)) for node in nodes]
        if gone and parts is None:
            weights = sum(job.weight for job in self.jobs) or 1.0
            parts = {job.name: job.weight / weights for job in self.jobs}
        state = self.state
        if gone:
            running = {name: at for name, at in state.running.items() if name not in gone}
            state = dataclasses.replace(state, running=running)
        return decide_elastic_round(
            now=self.now,
            shares=self.shares,
            jobs=[job for job in self.jobs if job.name not in gone] if gone else self.jobs,
            nodes=nodes,
            state=state,
            settings=settings,
            elastic=self.elastic,
            sizes=self.sizes,
            tenants=self.tenants,
            room={name: max(0, has - tenants.get(name, 0)) for name, has in self.room.items()}
            if tenants
            else self.room,
            pending=self.pending,
            not_tolerated=self.not_tolerated,
            columns=self.columns,
            gpus_per_pod=self.gpus_per_pod,
            parts=parts,
        )

    def urgency(self) -> dict[str, float]:
        """Job -> its priority over all columns together, as :mod:`..priority` has it for one."""
        received = {job.name: sum(self.state.received.get(job.name, {}).values()) for job in self.jobs}
        running = (self.now - since for since in self.state.running_since.values())
        elapsed = max([self.settings.round_seconds, *received.values(), *running])
        share = np.array([sum(self.shares.get(job.name, {}).values()) for job in self.jobs])
        promised = share * elapsed
        if self.state.promised is not None:
            promised = np.array([sum(self.state.promised.get(job.name, {}).values()) for job in self.jobs])
        had = np.array([received[job.name] for job in self.jobs])
        found = priorities(share, promised, had, round_seconds=self.settings.round_seconds)
        return dict(zip(received, found.tolist(), strict=True))

    def least(self, name: str, placement: Placement) -> tuple[str, ...]:
        """The nodes that the gang is to keep: an elastic one, those of its least size."""
        gang = self.elastic.get(name)
        held = name in self.state.running and name not in self.pending
        if gang is None or (held and not gang.may_shrink):
            return placement.nodes
        return placement.nodes[: min(gang.speeds.get(placement.gpu_type, {}), default=gang.least)]

    def free(self, used: Sequence[Sequence[str]]) -> Counter[str]:
        """Node -> GPUs that are left of it, by the nodes of gangs."""
        left = Counter({node.name: node.gpus for node in self.nodes})
        for nodes in used:
            left.subtract(nodes)
        return left

    def open_nodes(self, gang: MixedGang, left: Mapping[str, int], *, to_come: bool = False) -> list[Node]:
        """Nodes on which the gang may be started, with their free GPUs; those to come only where asked."""
        return [
            dataclasses.replace(node, gpus=left[node.name])
            for node in self.nodes
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
        tenant = self.tenants.get(name, "")
        if tenant not in self.room:
            return None
        used = 0
        for other, at in {**placements, **more}.items():
            if self.tenants.get(other, "") != tenant:
                continue
            runs = other in self.state.running and other not in self.pending
            before = self.least(other, self.state.running[other]) if runs else ()
            used += len(at.nodes) - len(before)
        return max(0, self.room[tenant] - used)

    def waits_for(self, gang: MixedGang, left: Mapping[str, int]) -> str:
        """What a gang lacks that waits for GPUs of several pools."""
        room = self.room_of(gang, self.open_nodes(gang, left, to_come=True))
        types = {node.pool: node.gpu_type for node in self.nodes if gang.relative(node.gpu_type) > 0}
        has = [
            f"{room.get(pool, ('', 0))[1]} {kind} free in pool {pool}" for pool, kind in sorted(types.items())
        ]
        return f"waits for {gang.sizes[0]} GPUs of its pools together: {'; '.join(has) or 'it may use none'}"
