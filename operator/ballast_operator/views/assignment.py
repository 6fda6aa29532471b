"""Decisions of the allocator: the only thing that passes from the allocator to a job's pass."""

import dataclasses
from collections.abc import Iterable, Mapping

from ballast_policies.prices.egress import NO_DATA_PRICES, DataPrices
from ballast_policies.scheduling.assignments import Assignment

from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus
from ballast_operator.api.node_pool import NodePool
from ballast_operator.kube.kinds import Key, Object
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView


def alike(one: Assignment | None, other: Assignment | None) -> bool:
    """True if a job has no reason to look again: names and texts alone are not worth a pass."""
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
    """Properties of a pool that a job's pass has to know.

    Attributes:
        pool: as the ClusterPolicy has it, at the price of now.
        earlier: (until when, price), oldest first: prices that have changed since it was seen first.
        losses_per_hour: how often one of its machines is taken away; None: they stay.
        region: of its nodes; empty: not known.
        data_prices: of data between regions.
    """

    pool: NodePool
    earlier: tuple[tuple[Time, float], ...] = ()
    losses_per_hour: float | None = None
    region: str = ""
    data_prices: DataPrices = NO_DATA_PRICES

    def changed(self, pool: NodePool, *, at: Time) -> "PoolInfo":
        """The pool from ``at`` on."""
        earlier, price = self.earlier, self.pool.price_per_gpu_hour
        if pool.price_per_gpu_hour != price:
            earlier = (*earlier, (at, price))[-MOST_EARLIER:]
        return dataclasses.replace(self, pool=pool, earlier=earlier)

    def mean_price(self, since: Time | None, now: Time) -> float:
        """The mean price of a GPU hour from ``since`` to ``now``."""
        if since is None or now <= since:
            return self.pool.price_per_gpu_hour
        total, at = 0.0, since
        for until, price in self.earlier:
            end = min(until, now)
            if at < end:
                total += price * (end - at).total_seconds()
                at = end
        total += self.pool.price_per_gpu_hour * (now - at).total_seconds()
        return total / (now - since).total_seconds()


UNKNOWN_POOL = PoolInfo(
    pool=NodePool.model_construct(name="", node_selector={}, gpu_type="", start_seconds=0.0)
)
"""A pool of which nothing is known."""


def billed_pools(policies: Iterable[Object]) -> dict[str, PoolInfo]:
    """The pools at the prices of the ``policies``' bills: what is known before the first decision."""
    oldest_first = sorted(policies, key=lambda item: item["metadata"].get("creationTimestamp", ""))
    prices: dict[str, float] = {}
    for item in oldest_first:
        read = ClusterPolicyStatus.written(item.get("status"), "bill")
        for entry in () if read is None else read.bill:
            prices.setdefault(entry.pool, entry.price_per_gpu_hour)
    return {
        name: PoolInfo(pool=UNKNOWN_POOL.pool.model_copy(update={"name": name, "price_per_gpu_hour": price}))
        for name, price in prices.items()
    }


MOST_EARLIER = 64
"""Earlier prices of a pool that are kept: those since a job's cost was summed up last are needed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The allocator's newest decision on all jobs and pools; empty: there is none.

    Attributes:
        assignments: job -> what the allocator wants of it.
        jobs: as they were decided on: another may have a job's name since, or its spec be edited.
        pools: pool -> what is known of it.
    """

    assignments: Mapping[Key, Assignment] = dataclasses.field(default_factory=dict)
    jobs: Mapping[Key, JobView] = dataclasses.field(default_factory=dict)
    pools: Mapping[str, PoolInfo] = dataclasses.field(default_factory=dict)

    def on(self, key: Key, uid: str) -> Assignment | None:
        """Assignment of this job; None: nothing is decided on it yet."""
        seen = self.jobs.get(key)
        return self.assignments.get(key) if seen is not None and seen.uid == uid else None
