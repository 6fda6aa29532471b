"""The question of a round: one value for every pass over the jobs."""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence

from ballast_policies.allocation.policy import Surplus
from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.gangs import ElasticGang, MixedGang, SharedGpus, SpreadGang
from ballast_policies.rounds.values import (
    ANY_NODES,
    Node,
    NodeRequest,
    Placement,
    RoundSettings,
    RoundState,
    gpus_by,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpotLimits:
    """Limits on starts in spot pools.

    Attributes:
        on_demand_share: part of the GPUs in use that are not spot, at least.
        most_in_one_pool: part of the spot GPUs in use that are in one pool, or in one zone of a pool where
            zones are known, at most, but for the last gang there.
    """

    pools: frozenset[str] = frozenset()
    on_demand_share: float = 0.0
    most_in_one_pool: float = 1.0

    @property
    def limits(self) -> bool:
        """True if anything is limited."""
        return bool(self.pools) and (self.on_demand_share > 0 or self.most_in_one_pool < 1)

    def most(self, used: int) -> int:
        """Spot GPUs that may be in use where ``used`` GPUs are in use in all."""
        return math.floor((1.0 - self.on_demand_share) * used + 1e-9)

    def most_beside(self, others: int) -> float:
        """Spot GPUs that may be in use beside ``others`` GPUs that are not spot; infinite: any number."""
        if self.on_demand_share <= 0:
            return math.inf
        return math.floor((1.0 - self.on_demand_share) / self.on_demand_share * others + 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """Input of a round's decision.

    Attributes:
        now: seconds, on the clock of the state's times.
        shares: job -> column -> fraction of time (``Allocation.allocation``); missing: 0.
        jobs: in order of arrival; ``gpus`` of an elastic one is its least size.
        state: what was promised and received so far, and who runs where, with all that it holds.
        elastic: job -> its sizes, for jobs that may have several.
        mixed: job -> gang that may run in several pools at once.
        spread: job -> running gang on more nodes than would hold it.
        shared: who may share which GPUs; nodes whose GPUs are shared have one.
        surplus: what the policy does with GPUs beyond the least sizes.
        tenants: job -> its tenant, of tenants with a limit on GPUs.
        room: tenant -> GPUs that its jobs may have besides those that run with their least sizes.
        pending: jobs of ``state.running`` that were granted their GPUs and do not hold them yet.
        asks: job -> what it asks of its nodes, where it asks for anything.
        columns: pool -> column of shares and accounts where it is not the GPU type (of different price).
        parts: job -> part of the cluster that it has a claim to; None: by its weight.
    """

    now: float
    shares: Mapping[str, Mapping[str, float]]
    jobs: Sequence[Job]
    nodes: Sequence[Node]
    state: RoundState = dataclasses.field(default_factory=RoundState)
    settings: RoundSettings = dataclasses.field(default_factory=RoundSettings)
    elastic: Mapping[str, ElasticGang] = dataclasses.field(default_factory=dict)
    mixed: Mapping[str, MixedGang] = dataclasses.field(default_factory=dict)
    spread: Mapping[str, SpreadGang] = dataclasses.field(default_factory=dict)
    shared: SharedGpus = dataclasses.field(default_factory=SharedGpus)
    spot: SpotLimits = dataclasses.field(default_factory=SpotLimits)
    surplus: Surplus = Surplus.LEVEL
    tenants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    room: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pending: frozenset[str] = frozenset()
    asks: Mapping[str, NodeRequest] = dataclasses.field(default_factory=dict)
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, float] | None = None

    def without(
        self,
        jobs: Collection[str],
        taken: Mapping[str, int],
        *,
        moves: int = 0,
        tenants: Mapping[str, int] | None = None,
    ) -> "Question":
        """Question that is left when ``jobs`` are placed.

        Args:
            jobs: that take no part any more.
            taken: node -> GPUs that these have.
            moves: running gangs that these stop, of those that may be stopped within the hour.
            tenants: tenant -> GPUs that these take of its room.
        """
        settings = self.settings
        if moves and settings.max_moves_per_hour is not None:
            left = max(0, settings.max_moves_per_hour - moves)
            settings = dataclasses.replace(settings, max_moves_per_hour=left)
        return dataclasses.replace(
            self,
            jobs=[job for job in self.jobs if job.name not in jobs],
            nodes=[
                dataclasses.replace(node, gpus=node.gpus - taken[node.name]) if node.name in taken else node
                for node in self.nodes
            ],
            state=dataclasses.replace(
                self.state,
                running={name: at for name, at in self.state.running.items() if name not in jobs},
            ),
            settings=settings,
            room={name: max(0, has - (tenants or {}).get(name, 0)) for name, has in self.room.items()},
            parts=self.claimed_parts(),
        )

    def claimed_parts(self) -> Mapping[str, float]:
        """Job -> part of the cluster that it has a claim to."""
        if self.parts is not None:
            return self.parts
        weights = sum(job.weight for job in self.jobs) or 1.0
        return {job.name: job.weight / weights for job in self.jobs}

    @functools.cached_property
    def nodes_by_name(self) -> Mapping[str, Node]:
        """Node by its name."""
        return {node.name: node for node in self.nodes}

    @functools.cached_property
    def types(self) -> Mapping[str, str]:
        """Pool -> its GPU type."""
        return {node.pool: node.gpu_type for node in self.nodes}

    @functools.cached_property
    def gpus(self) -> Mapping[str, int]:
        """Pool -> its GPUs."""
        return gpus_by(self.nodes, lambda node: node.pool)

    @functools.cached_property
    def second_jobs(self) -> Mapping[str, str]:
        """Running job that is second on its GPU -> the first: the one that has been there longer."""
        running, first_on, second_of = self.state.running, dict[str, str](), dict[str, str]()
        able = running.keys() - self.shared.unable if self.shared.memory else ()
        there = [name for name in able if self.shared.on(running[name])]
        for name in sorted(there, key=self.state.by_age):
            first = first_on.setdefault(running[name].nodes[0], name)
            if first != name:
                second_of.setdefault(first, name)
        return {second: first for first, second in second_of.items()}

    @functools.cached_property
    def holders(self) -> Mapping[str, Placement]:
        """Placements of running jobs, without second jobs."""
        seconds = self.second_jobs
        return {name: at for name, at in self.state.running.items() if name not in seconds}

    def asks_of(self, name: str) -> NodeRequest:
        """Request of the gang for its nodes."""
        return self.asks.get(name, ANY_NODES)

    @functools.cached_property
    def _usable(self) -> dict[NodeRequest, Mapping[str, int]]:
        return {}

    def usable(self, asks: NodeRequest) -> Mapping[str, int]:
        """Pool -> GPUs on which such a gang may be started; of thousands of jobs most ask for the same."""
        if asks not in self._usable:
            self._usable[asks] = asks.usable(self.nodes)
        return self._usable[asks]

    def trains(self, name: str) -> bool:
        """True if the gang runs, and its pods have started."""
        return name in self.state.running and name not in self.pending

    def least(self, name: str, placement: Placement) -> tuple[str, ...]:
        """The nodes that the gang is to keep: an elastic one, those of its least size."""
        gang = self.elastic.get(name)
        if gang is None or (self.trains(name) and not gang.may_shrink):
            return placement.nodes
        return placement.nodes[: min(gang.speeds.get(placement.gpu_type, {}), default=gang.least)]

    def in_several_pools(self, name: str) -> bool:
        """True if the gang spans several pools: no pool holds it, or it runs so."""
        held, gang = self.state.running.get(name), self.mixed.get(name)
        return bool(held.parts) if held is not None else gang is not None and not gang.fits_one_pool

    def ran(self, name: str) -> float:
        """Seconds that the running gang has been where it is."""
        return self.now - self.state.running_since.get(name, self.now)

    def trained(self, name: str) -> float:
        """Seconds since the running gang's first step where it is; 0 or less: it starts.

        Infinite: not known, as a clock was set back since.
        """
        ran = self.ran(name)
        return min(ran if ran >= 0 else math.inf, self.now - self.state.trains_from.get(name, -math.inf))

    def may_stop(self, name: str) -> bool:
        """True if the running gang has had its start, and its least time after that."""
        trained = self.trained(name)
        return trained > 0 and trained >= self.settings.min_run_seconds
