"""Decisions of the allocator: the only thing that passes from the allocator to a job's pass."""

import dataclasses
from collections.abc import Mapping

from ballast_policies.contract import GPU_RESOURCE
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.prices.egress import NO_DATA_PRICES, DataPrices
from ballast_policies.rounds.values import Placement
from ballast_policies.scheduling.assignments import JobAssignment

from ballast_operator.kube.kinds import Key
from ballast_operator.views.clock import Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A condition of the job that only the allocator can know."""

    type: str
    value: bool
    reason: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(JobAssignment):
    """The allocator's answer for one job: what is decided, with what its pass needs to carry it out.

    Attributes:
        launches: ``status.launches`` of the snapshot that this answers. A job with a later launch
            ignores the assignment, so that none is carried out twice.
        kept_pods: for KEEP: the pods of the kept ranks; empty: all.
        plan_id: the round.
        reason: a reason of the condition ``Admitted``, for RELEASE.
        advice: conditions that the policy sets on the job.
        layers: of the job, as measured by it or another of its kind; None: nothing is known.
    """

    launches: int
    kept_pods: tuple[str, ...] = ()
    plan_id: str = ""
    reason: str = ""
    advice: tuple[Advice, ...] = ()
    layers: MeasuredLayers | None = None


def alike(one: Assignment | None, other: Assignment | None) -> bool:
    """Whether a job has no reason to look again: names and texts alone are not worth a pass."""
    if one is other or one is None or other is None:
        return one is other
    return (
        one.action is other.action
        and one.launches == other.launches
        and one.placement == other.placement
        and one.extra_nodes == other.extra_nodes
        and one.kept_pods == other.kept_pods
        and one.partner == other.partner
        and one.reason == other.reason
        and one.chosen == other.chosen
        and one.advice == other.advice
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """What a job's pass has to know of a pool.

    Attributes:
        price_per_hour: of a GPU, now.
        gpu_resource: what pods ask for.
        earlier: (until when, price), oldest first: prices that have changed since it was seen first.
        node_selector: labels of its nodes.
        start_seconds: how long a new node takes to come.
        max_nodes: nodes that it may have; 0: only those that exist.
        losses_per_hour: how often one of its machines is taken away; None: they stay.
        region: of its nodes; empty: not known.
        data_prices: of data between regions.
        shares: two jobs may share a GPU of its nodes.
    """

    price_per_hour: float = 0.0
    gpu_resource: str = GPU_RESOURCE
    earlier: tuple[tuple[Time, float], ...] = ()
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start_seconds: float = 0.0
    max_nodes: int = 0
    losses_per_hour: float | None = None
    region: str = ""
    data_prices: DataPrices = NO_DATA_PRICES
    shares: bool = False

    def changed(self, price_per_hour: float, gpu_resource: str, *, at: Time) -> "PoolInfo":
        """The pool from ``at`` on."""
        earlier = self.earlier
        if price_per_hour != self.price_per_hour:
            earlier = (*earlier, (at, self.price_per_hour))[-MOST_EARLIER:]
        return dataclasses.replace(
            self, price_per_hour=price_per_hour, gpu_resource=gpu_resource, earlier=earlier
        )

    def mean_price(self, since: Time | None, now: Time) -> float:
        """The mean price of a GPU hour from ``since`` to ``now``."""
        if since is None or now <= since:
            return self.price_per_hour
        total, at = 0.0, since
        for until, price in self.earlier:
            end = min(until, now)
            if at < end:
                total += price * (end - at).total_seconds()
                at = end
        total += self.price_per_hour * (now - at).total_seconds()
        return total / (now - since).total_seconds()


UNKNOWN_POOL = PoolInfo()
"""A pool of which nothing is known."""

MOST_EARLIER = 64
"""Earlier prices of a pool that are kept: those since a job's cost was summed up last are needed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The allocator's newest decision on all jobs and pools.

    Attributes:
        assignments: job -> what the allocator wants of it.
        uids: job -> UID of the job that was decided on: another may have its name since.
        pools: pool -> what is known of it.
    """

    assignments: Mapping[Key, Assignment] = dataclasses.field(default_factory=dict)
    uids: Mapping[Key, str] = dataclasses.field(default_factory=dict)
    pools: Mapping[str, PoolInfo] = dataclasses.field(default_factory=dict)

    def on(self, key: Key, uid: str) -> Assignment | None:
        """What is wanted of this job; None: nothing is decided on it yet."""
        return self.assignments.get(key) if self.uids.get(key) == uid else None


@dataclasses.dataclass(slots=True)
class AssignmentBoard:
    """Where the allocator publishes its newest decision, whole, and passes read it; empty: there is none."""

    newest: Decided = dataclasses.field(default_factory=Decided)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangPools:
    """The pools of a gang.

    Attributes:
        first: that of rank 0.
        others: pool -> the same, of a gang in several, the first among them; empty: it is in one.
    """

    first: PoolInfo = UNKNOWN_POOL
    others: Mapping[str, PoolInfo] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, placement: Placement | None, pools: Mapping[str, PoolInfo]) -> "GangPools":
        """Those of ``placement``, of which nothing may be known."""
        if placement is None:
            return cls(first=pools.get("", UNKNOWN_POOL))
        return cls(
            first=pools.get(placement.pool, UNKNOWN_POOL),
            others={part.pool: pools.get(part.pool, UNKNOWN_POOL) for part in placement.parts},
        )

    def named(self, pool: str) -> PoolInfo:
        """The gang's pool of this name."""
        return self.others.get(pool, self.first)


UNKNOWN_POOLS = GangPools()
"""A gang of whose pools nothing is known."""
