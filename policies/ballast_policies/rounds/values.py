"""The input of a round, and its decision: frozen values for the operator and the simulator.

Domains are groups of nodes, as racks and blocks. A level is a label of nodes, levels go from the widest to
the narrowest, and a domain is the nodes with the same values of its level and of all wider ones, as in
Kueue's Topology (https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/); a node is the least.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def dedupe_shared_gpus(jobs: Iterable[T], shared_gpu: Callable[[T], str]) -> list[T]:
    """The jobs without the second of two on one GPU; the first of them stands for both.

    Args:
        jobs: whatever says where a job runs.
        shared_gpu: the node of the GPU that the job shares, or may share; empty: its GPUs are its own. Nodes
            whose GPU is shared have one.
    """
    found, seen = [], set[str]()
    for job in jobs:
        node = shared_gpu(job)
        if node and node in seen:
            continue
        seen.add(node)
        found.append(job)
    return found


def counted(count: int, noun: str, verb: str = "") -> str:
    """The count with its noun, and with what these do, in the singular or the plural."""
    one = count == 1
    return f"{count} {noun}{'' if one else 's'}" + (f" {verb}{'s' if one else ''}" if verb else "")


def own_domain(node: str) -> str:
    """The domain, below those that it is in, of a node that has no label of a level."""
    return f"node:{node}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a pool.

    Attributes:
        gpus: GPUs that the policy may hand out, used ones included.
        taints: what a job has to tolerate to be started there, as text; nodes with equal text are alike.
            After a "#", a number tells nodes apart that some jobs may not use for another reason.
        closed: why no job is started there at all; empty: jobs may be. Count only the GPUs of running
            gangs in ``gpus`` then.
        provisionable: it does not exist yet: an autoscaler makes it for the pods of a gang placed there.
        zone: where it is; empty: not known.
        domains: that it is in, as racks, the widest first (see above); empty: no levels are known.
    """

    name: str
    pool: str
    gpu_type: str
    gpus: int
    taints: str = ""
    closed: str = ""
    provisionable: bool = False
    zone: str = ""
    domains: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Equal for nodes of a pool that are alike to every job."""
        return self.closed or self.taints

    def domain(self, level: int) -> str:
        """Domain that it is in at a level, 0: the widest; where it is in none, it is one of its own."""
        return self.domains[level] if level < len(self.domains) else own_domain(self.name)

    @property
    def place(self) -> str:
        """Its pool, or its zone of the pool: what is taken away together."""
        return f"{self.pool} in zone {self.zone}" if self.zone else self.pool


def gpus_by(nodes: Iterable[Node], group: Callable[[Node], str]) -> Counter[str]:
    """Group of nodes -> their GPUs."""
    found: Counter[str] = Counter()
    for node in nodes:
        found[group(node)] += node.gpus
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolPart:
    """The consecutive ranks of a gang that run in one pool."""

    pool: str
    gpu_type: str
    gpus: int

    def __str__(self) -> str:
        """Text for people."""
        return f"{self.gpus} x {self.gpu_type} of pool {self.pool}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Nodes of a gang: one node name for each rank, repeated where a node hosts several.

    Attributes:
        gpu_type, pool: of rank 0, and of all ranks where the gang runs in one pool.
        parts: of a gang that runs in several pools, in the order of its ranks; empty: it runs in one.
    """

    gpu_type: str
    pool: str
    nodes: tuple[str, ...]
    parts: tuple[PoolPart, ...] = ()

    @property
    def by_pool(self) -> tuple[PoolPart, ...]:
        """Its GPUs by pool, of a gang in one pool as well."""
        return self.parts or (PoolPart(pool=self.pool, gpu_type=self.gpu_type, gpus=len(self.nodes)),)

    @property
    def nodes_by_pool(self) -> dict[str, tuple[str, ...]]:
        """Pool -> node of each of the ranks there."""
        found: dict[str, tuple[str, ...]] = {}
        first = 0
        for part in self.by_pool:
            found[part.pool] = (*found.get(part.pool, ()), *self.nodes[first : first + part.gpus])
            first += part.gpus
        return found

    def mean(self, of_pools: Mapping[str, float]) -> float:
        """Mean of a value of pools over its GPUs; of a pool that is missing it is 0."""
        return sum(of_pools.get(part.pool, 0.0) * part.gpus for part in self.by_pool) / max(
            1, len(self.nodes)
        )

    def first(self, gpus: int) -> "Placement":
        """Its first ranks, by part also where they are in one pool."""
        parts, left = [], gpus
        for part in self.by_pool:
            if left > 0:
                parts.append(dataclasses.replace(part, gpus=min(part.gpus, left)))
            left -= part.gpus
        return dataclasses.replace(self, nodes=self.nodes[:gpus], parts=tuple(parts))

    def and_more(self, nodes: tuple[str, ...]) -> "Placement":
        """Placement with ranks on these nodes of the pool of its last rank."""
        *before, last = self.by_pool
        parts = (*before, dataclasses.replace(last, gpus=last.gpus + len(nodes)))
        return dataclasses.replace(self, nodes=(*self.nodes, *nodes), parts=parts)

    def __str__(self) -> str:
        """Its GPUs as people read them."""
        return " and ".join(map(str, self.by_pool))


def kept_ranks(held: Sequence[str], wanted: Sequence[str], together: int = 1) -> tuple[int, ...] | None:
    """Ranks that continue when a gang shrinks; None: ``wanted`` is no part of what it holds.

    Rank 0 stays, and ranks of one position of the pipeline stay or leave together.

    Args:
        held: node of each rank.
        wanted: nodes to stay on, in any order.
        together: ranks at each position.
    """
    left = Counter(wanted)
    kept: list[int] = []
    for first in range(0, len(held), together):
        position = Counter(held[first : first + together])
        if position <= left:
            left -= position
            kept += range(first, first + together)
    return tuple(kept) if kept and kept[0] == 0 and not left.total() else None


def extra_nodes(held: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...] | None:
    """Node of each GPU that a gang takes in addition; None: ``wanted`` leaves out some that it holds."""
    return tuple(wanted[len(held) :]) if tuple(wanted[: len(held)]) == tuple(held) else None


def stays(held: Placement, wanted: Placement, together: int = 1) -> bool:
    """True if the gang gets there without a restart: it shrinks, grows, or is left as it is."""
    if held.pool != wanted.pool:
        return False
    smaller = kept_ranks(held.nodes, wanted.nodes, together)
    return smaller is not None or extra_nodes(held.nodes, wanted.nodes) is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """Record of the GPUs handed out so far.

    Attributes:
        received: job -> column -> seconds that the job ran there.
        promised: job -> column -> seconds that it should have run there in the same time, as an
            :class:`RoundMemory` keeps them; None: today's shares have held for as long as any job has run.
        running: job -> its placement now.
        running_since: job -> when it was given its GPUs there, on the clock of ``now``.
        trains_from: job -> when it does its first step there; in the future while it starts.
        moves: times at which running gangs were stopped or moved, for the limit of moves per hour.
    """

    received: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    promised: Mapping[str, Mapping[str, float]] | None = None
    running: Mapping[str, Placement] = dataclasses.field(default_factory=dict)
    running_since: Mapping[str, float] = dataclasses.field(default_factory=dict)
    trains_from: Mapping[str, float] = dataclasses.field(default_factory=dict)
    moves: tuple[float, ...] = ()

    def by_age(self, name: str) -> tuple[float, str]:
        """A key that sorts running gangs, those that began first before others."""
        return self.running_since.get(name, 0.0), name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """Limits on the disturbance of running gangs.

    Attributes:
        min_run_seconds: a gang is not stopped for others while it starts, nor before it trained this long.
        max_moves_per_hour: limit on running gangs stopped or moved within an hour; None: no limit.
        within_round: only free GPUs are handed out; running gangs hold theirs until the round ends.
    """

    round_seconds: float = 360.0
    min_run_seconds: float = 0.0
    max_moves_per_hour: int | None = None
    within_round: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Colocation:
    """The other job on a job's GPU.

    Attributes:
        speed: of the job beside it, over its speed alone.
        measured: like jobs have run so; otherwise the speed is an estimate.
    """

    partner: str
    speed: float
    measured: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Change of each job from where it ran to where it is to run.

    Attributes:
        extended: jobs whose grant is extended: same pool, same nodes.
        started: jobs that did not run and now do.
        moved: jobs that run elsewhere from now on.
        resized: jobs that stay, on fewer or more GPUs of their pools.
        stopped: jobs that ran and now do not.
        waiting: jobs that neither ran nor run.
        displaced: jobs that moved or stopped since a node of theirs is gone, or is no longer of their pool.
    """

    extended: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    displaced: tuple[str, ...] = ()

    @property
    def disturbed(self) -> int:
        """Running gangs that are stopped or moved by choice, which the hour's moves limit."""
        return len(self.moved) + len(self.stopped) - len(self.displaced)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round(Changes):
    """Decision of a round, with what it changes.

    Attributes:
        placements: job -> where it runs in this round; a job that is missing does not run.
        reasons: job -> why, as text with numbers.
        blocked_by_spot_limit: job that does not run on spot machines -> the limit that kept it off them.
        colocations: job that shares its GPU -> the other one.
    """

    placements: Mapping[str, Placement]
    reasons: Mapping[str, str]
    blocked_by_spot_limit: Mapping[str, str] = dataclasses.field(default_factory=dict)
    colocations: Mapping[str, Colocation] = dataclasses.field(default_factory=dict)

    @property
    def first_placements(self) -> Mapping[str, Placement]:
        """The placements, each shared GPU once."""
        return dict(
            dedupe_shared_gpus(
                self.placements.items(),
                lambda placed: placed[1].nodes[0] if placed[0] in self.colocations else "",
            )
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TopologyRequest:
    """Request of a gang for domains of the topology.

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


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRequest:
    """Request of a gang for the nodes on which it is started.

    Attributes:
        barred: taints of nodes (``Node.taints``) on which it must not be started.
        per_pod: GPUs of each of its pods, all on one node.
        topology: what it asks of the domains of its nodes; None: nothing.
    """

    barred: frozenset[str] = frozenset()
    per_pod: int = 1
    topology: TopologyRequest | None = None

    def open(self, nodes: Iterable[Node]) -> list[Node]:
        """Nodes of these on which it may be started."""
        return [node for node in nodes if not node.closed and node.taints not in self.barred]

    def usable(self, nodes: Iterable[Node]) -> Counter[str]:
        """Pool -> GPUs of the nodes on which it may be started, of each node as many as fill whole pods.

        Of what requires one domain the largest counts.
        """
        nodes = list(nodes)
        by_pool: dict[str, Counter[str]] = {node.pool: Counter() for node in nodes}
        for node in self.open(nodes):
            domain = "" if self.required is None else node.domain(self.required.level)
            by_pool[node.pool][domain] += node.gpus // self.per_pod * self.per_pod
        return Counter({pool: max(domains.values(), default=0) for pool, domains in by_pool.items()})

    @property
    def required(self) -> TopologyRequest | None:
        """The domain that it requires; None: none."""
        return self.topology if self.topology is not None and self.topology.required else None


ANY_NODES = NodeRequest()
"""Nothing is asked: the gang has pods of one GPU, which may be on any open node."""


def domains_of(name: str, labels: Mapping[str, str], levels: Sequence[str]) -> tuple[str, ...]:
    """Domain of a node at each of ``levels``, the widest first; without the label it is one of its own."""
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
    return max(rooms, default=(0, "none"))


def told(nodes: Iterable[Node], asked: TopologyRequest) -> str:
    """Domains of a gang on ``nodes``, as text."""
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
