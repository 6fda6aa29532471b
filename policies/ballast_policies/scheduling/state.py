"""The cluster as decisions see it: nodes of pools, and jobs that want GPUs, with what is known of them."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.prices.hazard import Hazard, RestartCosts, checkpoint_interval
from ballast_policies.rounds.gangs import ElasticGang, MixedGang, SharedGpus, SpreadGang
from ballast_policies.rounds.question import SpotLimits
from ballast_policies.rounds.values import ANY_NODES, Node, NodeRequest, Placement, gpus_by

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

        ``per_pod``: GPUs of each of its pods; ``barred``: groups of nodes that it must not be started on.
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
        """Count as of :meth:`fewest`, of one pool."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """The pools at one moment.

    Attributes:
        gpu_types: of the pools, sorted.
        nodes: of the pools, with the GPUs that may be handed out.
        memory: pool -> bytes of each of its GPUs, where that is known.
        regions: pool -> where its nodes are; empty: not known.
    """

    gpu_types: tuple[str, ...]
    nodes: tuple[Node, ...] = ()
    pools: tuple[PricedPool, ...] = ()
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    regions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def node_sizes(self) -> NodeSizes:
        """Numbers of nodes that gangs need in each pool."""
        return NodeSizes.of(self.nodes)

    @functools.cached_property
    def prices(self) -> Mapping[str, float]:
        """GPU type -> mean price of its pools by their GPUs; without types of which no pool has a price."""
        priced: dict[str, list[PricedPool]] = {}
        for pool in self.pools:
            if pool.price > 0:
                priced.setdefault(pool.gpu_type, []).append(pool)
        found = {}
        for gpu_type, pools in priced.items():
            gpus = [pool.gpus for pool in pools] if any(pool.gpus for pool in pools) else [1] * len(pools)
            costs = (pool.price * count for pool, count in zip(pools, gpus, strict=True))
            found[gpu_type] = sum(costs) / sum(gpus)
        return found

    @property
    def pool_prices(self) -> dict[str, float]:
        """Pool -> price of a GPU hour: where it states none, that of its type, or 0."""
        return {pool.pool: pool.price or self.prices.get(pool.gpu_type, 0.0) for pool in self.pools}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A job that wants GPUs.

    Attributes:
        job: as policies see it.
        tenant: its namespace, whose jobs may have a limit on GPUs in all.
        launches: how often it was launched: a grant holds for one launch.
        placement: where its gang runs; None: it holds no GPUs, or its launch is ending.
        running_since: when that launch was decided, epoch seconds; 0 without a placement.
        trains_from: when it does its first step, epoch seconds; infinite: it starts, and nobody knows.
        elastic: the sizes that its gang may have, with their speeds; None: it has one size.
        grows_from: from when on its gang may take more GPUs, epoch seconds; None: as it is now, never.
        asks: what it asks of its nodes.
        measured: whether its speed is stated or measured somewhere; otherwise every figure is a guess.
        mixed: what is known of it as a gang in several pools; None: it may be in one only.
        closed_pools: pools that are closed to it by what it asks for.
        left_out: pools that it is not offered, closed ones or for lack of memory, as text.
        usd_per_step: pool -> what reading its data costs there, and a checkpoint that is copied there first,
            spread over the steps that are left; empty: nothing.
        usd_to_move: pool -> what of that the copy costs, in all.
        data_region: where its data is.
        spread: of a running gang on more nodes than would hold it; None: it is not.
        beside_speed: of a running job that shares its GPU, its speed over that alone.
    """

    job: Job
    tenant: str = ""
    launches: int = 0
    placement: Placement | None = None
    running_since: float = 0.0
    trains_from: float = 0.0
    elastic: ElasticGang | None = None
    grows_from: float | None = None
    asks: NodeRequest = ANY_NODES
    measured: bool = True
    mixed: MixedGang | None = None
    closed_pools: frozenset[str] = frozenset()
    left_out: str = ""
    usd_per_step: Mapping[str, float] = dataclasses.field(default_factory=dict)
    usd_to_move: Mapping[str, float] = dataclasses.field(default_factory=dict)
    data_region: str = ""
    spread: SpreadGang | None = None
    beside_speed: float = 1.0

    @property
    def name(self) -> str:
        """Its name in problems and rounds."""
        return self.job.name

    @property
    def may_be_in_one_pool(self) -> bool:
        """True if a pool holds its least size, and it does not run in several."""
        held = self.placement is not None and bool(self.placement.parts)
        return self.mixed is None or (self.mixed.fits_one_pool and not held)

    def stays(self, placement: Placement | None) -> bool:
        """True if it runs, and continues there without a restart, maybe with another size."""
        held = self.placement
        if held is None or placement is None:
            return False
        if placement == held:
            return True
        gang = self.mixed if held.parts or placement.parts else self.elastic
        return gang is not None and gang.becomes(held, placement)

    def most_at(self, placement: Placement) -> int:
        """GPUs to which its gang may grow where it is; 0: it has one size."""
        if placement.parts:
            return self.mixed.sizes[-1] if self.mixed is not None else 0
        sizes = {} if self.elastic is None else self.elastic.speeds.get(placement.gpu_type, {})
        return max(sizes, default=0)

    def speed(self, placement: Placement) -> float:
        """Steps/s where it is placed; 0: not known."""
        gpus, elastic = len(placement.nodes), self.elastic
        if placement.parts:
            return self.mixed.speed_at(placement) if self.mixed is not None else 0.0
        known = 0.0 if self.spread is None else self.spread.speed_at(placement)
        if elastic is not None and not known:
            known = elastic.speed(placement.gpu_type, gpus)
        alone = known or self.job.throughput.get(placement.gpu_type, 0.0)
        return alone * self.beside_speed if placement == self.placement else alone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantRooms:
    """Tenants with a limit on GPUs.

    Attributes:
        gpus: tenant -> GPUs that its jobs may have besides the least sizes of those that run.
        left: tenant -> GPUs that its jobs may still take now, by what their pods hold.
    """

    gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)
    left: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterState:
    """The cluster at one moment.

    Attributes:
        jobs: those that want GPUs and that some round can place, by age.
        tenants: what tenants with a limit on GPUs may still be given.
        shared: which jobs may share which GPUs.
        preempted: spot pool -> machines that were taken away there, and in how many hours.
        start_seconds: pool -> until the pods of a new node run.
    """

    capacity: Capacity
    jobs: tuple[ClusterJob, ...]
    tenants: TenantRooms = dataclasses.field(default_factory=TenantRooms)
    shared: SharedGpus = dataclasses.field(default_factory=SharedGpus)
    spot: SpotLimits = dataclasses.field(default_factory=SpotLimits)
    preempted: Mapping[str, Hazard] = dataclasses.field(default_factory=dict)
    start_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def usable_pools(self) -> tuple[PricedPool, ...]:
        """The pools with the GPUs that could be in use at a time, so that shares are ones to be had.

        Which nodes of spot pools are not offered for their limits, each round decides. Where not all pools
        can be used whole, the cheapest come first. What runs counts in any case.
        """
        limits, capacity = self.spot, self.capacity
        if not limits.limits:
            return capacity.pools
        has = gpus_by(capacity.nodes, lambda node: node.pool)
        places: dict[str, Counter[str]] = {}
        for node in capacity.nodes:
            places.setdefault(node.pool, Counter())[node.place] += node.gpus
        held: Counter[str] = Counter()
        # Of two jobs on one GPU, one.
        for placement in {self.shared.on(at) or name: at for name, at in self.running.items()}.values():
            for name, nodes in placement.nodes_by_pool.items():
                held[name] += len(nodes)
        spot = sum(has[pool] for pool in limits.pools)
        wanted = [job.job.gpus if job.elastic is None else job.elastic.most for job in self.jobs]
        demand, largest = sum(wanted), max(wanted, default=0)
        beside = limits.most_beside(has.total() - spot)
        most = min(beside, limits.most(demand)) if limits.on_demand_share > 0 else math.inf
        left = most - sum(held[pool] for pool in limits.pools)
        part = limits.most_in_one_pool
        usable = {}
        for pool in sorted(capacity.pools, key=lambda pool: (pool.price <= 0, pool.price, pool.pool)):
            if pool.pool not in limits.pools:
                continue
            there: float = has[pool.pool]
            if part < 1:
                most_there = max(largest, part * min(demand, spot))
                there = sum(
                    min(gpus, part / (1 - part) * (spot - gpus) + largest, most_there)
                    for gpus in places.get(pool.pool, {}).values()
                )
            more = int(max(0, min(there - held[pool.pool], left)))
            left -= more
            usable[pool.pool] = min(has[pool.pool], held[pool.pool] + more)
        return tuple(
            dataclasses.replace(pool, gpus=usable.get(pool.pool, pool.gpus)) for pool in capacity.pools
        )

    @functools.cached_property
    def useful_prices(self) -> tuple[PricedPool, ...]:
        """The usable pools at the price of an hour in which a job gets on, not of one that is paid.

        Start-ups and saves at preemptions are paid as well (``RestartCosts.useful_part``). In whole percent,
        so that not every preemption calls for another allocation. A pool that has lost no machine keeps its
        price.
        """

        def useful(pool: PricedPool) -> PricedPool:
            seen = self.preempted.get(pool.pool)
            if seen is None or not seen.preemptions or pool.price <= 0:
                return pool
            costs = RestartCosts(startup_seconds=self.start_seconds.get(pool.pool, 180.0))
            part = costs.useful_part(seen.per_hour, checkpoint_interval(seen.per_hour, costs))
            return dataclasses.replace(pool, price=pool.price / max(0.01, round(part, 2)))

        return tuple(map(useful, self.usable_pools))

    @functools.cached_property
    def problem(self) -> Problem:
        """The jobs and the GPUs that could be in use as an allocation problem."""
        gpus = gpus_by(self.capacity.nodes, lambda node: node.gpu_type)
        for pool, usable in zip(self.capacity.pools, self.usable_pools, strict=True):
            gpus[pool.gpu_type] -= pool.gpus - usable.gpus
        return Problem(
            gpu_types=self.capacity.gpu_types,
            capacity=dict(gpus),
            jobs=tuple(job.job for job in self.jobs),
            prices=self.capacity.prices,
        )

    @functools.cached_property
    def running(self) -> Mapping[str, Placement]:
        """Job name -> its placement, for jobs that have one."""
        return {job.name: job.placement for job in self.jobs if job.placement is not None}

    @functools.cached_property
    def running_since(self) -> Mapping[str, float]:
        """Job name -> epoch seconds, for jobs that have a placement."""
        return {job.name: job.running_since for job in self.jobs if job.placement is not None}

    @functools.cached_property
    def trains_from(self) -> Mapping[str, float]:
        """Job name -> epoch seconds, for jobs that have a placement."""
        return {job.name: job.trains_from for job in self.jobs if job.placement is not None}

    @functools.cached_property
    def mixed(self) -> Mapping[str, MixedGang]:
        """Job name -> what is known of it as a gang in several pools, for jobs that may be one."""
        return {job.name: job.mixed for job in self.jobs if job.mixed is not None}

    @functools.cached_property
    def asks(self) -> Mapping[str, NodeRequest]:
        """Job name -> what it asks of its nodes, for jobs that ask for anything."""
        return {job.name: job.asks for job in self.jobs if job.asks != ANY_NODES}

    @functools.cached_property
    def unmeasured(self) -> frozenset[str]:
        """Names of the jobs of whose speed nothing is known."""
        return frozenset(job.name for job in self.jobs if not job.measured)

    def next_scale_up_time(self, now: float) -> float | None:
        """Time at which the next gang may grow for which GPUs are free; None: none is known."""
        free = Counter({node.name: node.gpus for node in self.capacity.nodes})
        for placement in self.running.values():
            free.subtract(placement.nodes)
        pools = {node.pool for node in self.capacity.nodes if free[node.name] > 0}
        times = [
            job.grows_from
            for job in self.jobs
            if job.placement is not None and job.placement.by_pool[-1].pool in pools
            if job.grows_from is not None and job.grows_from > now
            if job.most_at(job.placement) > len(job.placement.nodes)
        ]
        return min(times, default=None)
