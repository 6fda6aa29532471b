"""Prices of pools from feeds, in place of those that the policy states.

A feed is a ConfigMap in the operator's namespace, read every :data:`READ_SECONDS`, or a cloud's price list,
which :class:`CloudPrices` asks beside the decisions. What cannot be used leaves the last good price in force,
which is in ``status.prices`` and so outlives the operator.
"""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence

from ballast_policies.prices.feed import FeedPrice, FeedProblem, Reading, read_feed, shown_time

from ballast_operator.allocator.costs.cloud_prices import CloudPrices, cloud_reading, feed_name, wanted_of
from ballast_operator.api.base import Verdict
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.cluster_policy_status import PoolPrice
from ballast_operator.api.conditions import PolicyCondition, PolicyReason, some_of
from ballast_operator.api.node_pool import NodePool
from ballast_operator.errors import NotFound, Rejected, Unavailable
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import CONFIG_MAP
from ballast_operator.views.clock import Time

READ_SECONDS = 15.0
"""Seconds between reads of a ConfigMap."""

MOST_NAMED = 5
"""Pools named in the condition PricesCurrent."""

_REASONS = {
    FeedProblem.MISSING: PolicyReason.PRICE_MISSING,
    FeedProblem.UNAVAILABLE: PolicyReason.PRICE_UNAVAILABLE,
    FeedProblem.UNREADABLE: PolicyReason.PRICE_UNREADABLE,
    FeedProblem.IMPLAUSIBLE: PolicyReason.PRICE_IMPLAUSIBLE,
    FeedProblem.STALE: PolicyReason.PRICE_STALE,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolReading:
    """The price feed of a pool at one moment: its name in the status, and ``pricePerGpuHour`` as stated."""

    pool: str
    feed: str
    stated: float
    reading: Reading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """Content of a ConfigMap; None and why where it could not be read."""

    data: Mapping[str, str] | None
    why: str = ""


class PriceFeeds:
    """The price feeds of one policy after the other.

    Attributes:
        clouds: what clouds have answered; its loop asks them.
        next_at: when feeds are read again, epoch seconds; None: no pool has one.
    """

    def __init__(self, cluster: Cluster, namespace: str, clouds: CloudPrices | None = None) -> None:
        self.clouds = CloudPrices() if clouds is None else clouds
        self._cluster = cluster
        self._namespace = namespace
        self._contents: dict[str, _Content] = {}
        self._known: dict[tuple[str, str], FeedPrice] = {}
        self.next_at: float | None = None

    async def read(self, policy: ClusterPolicy, status: object, now: Time) -> tuple[PoolReading, ...]:
        """The price of each pool that has a feed; ``status``: of the policy, as an operator has left it."""
        moment, pools = now.timestamp(), [pool for pool in policy.spec.node_pools if pool.price_feed]
        self.clouds.want([wanted for pool in pools if (wanted := wanted_of(pool)) is not None])
        if not pools:
            self.next_at, self._contents, self._known = None, {}, {}
            return ()
        names = {feed.config_map for pool in pools if (feed := pool.price_feed) and feed.config_map}
        left = 0.0 if self.next_at is None else self.next_at - moment
        # More is left than there ever was where the clock has been set back.
        if not 0 < left <= READ_SECONDS or not names <= self._contents.keys():
            await self._fetch(names)
            self.next_at = moment + READ_SECONDS
        before = {**saved_prices(status), **self._known}
        found = [self._reading(policy, pool, before, moment) for pool in pools]
        self._known = known_prices(found)
        return tuple(found)

    async def _fetch(self, names: set[str]) -> None:
        """Read the ConfigMaps; those that the API server does not answer for stay as they were."""
        self._contents = {name: self._contents[name] for name in names if name in self._contents}
        for name in sorted(names):
            try:
                data = (await self._cluster.get(CONFIG_MAP, self._namespace, name)).get("data") or {}
            except NotFound:
                why = f"there is no such ConfigMap in namespace {self._namespace}. To fix: create it"
                self._contents[name] = _Content(data=None, why=why)
            except Rejected as error:
                self._contents[name] = _Content(data=None, why=f"{error}. To fix: let the operator read it")
            except Unavailable as error:
                unknown = _Content(data=None, why=f"{error}. To fix: see that the API server answers")
                self._contents.update({left: unknown for left in names if left not in self._contents})
                return
            else:
                self._contents[name] = _Content(data=data)

    def _reading(
        self,
        policy: ClusterPolicy,
        pool: NodePool,
        before: Mapping[tuple[str, str], FeedPrice],
        moment: float,
    ) -> PoolReading:
        feed, wanted, name = pool.price_feed, wanted_of(pool), feed_name(pool)
        assert feed is not None
        alike = (other for other in policy.spec.node_pools if other.gpu_type == pool.gpu_type)
        on_demand = max(other.price_per_gpu_hour for other in alike)
        last = before.get((pool.name, name))
        if wanted is not None:
            answer = self.clouds.answers.get(wanted)
            reading = cloud_reading(pool, wanted, answer, last, now=moment, on_demand=on_demand or None)
        else:
            assert feed.config_map is not None
            key, content = feed.key or pool.name, self._contents[feed.config_map]
            missing = f"there is no key {key}. To fix: write it, or correct priceFeed.key"
            reading = read_feed(
                None if content.data is None else content.data.get(key),
                last,
                now=moment,
                stale_after=feed.stale_after_seconds,
                on_demand=on_demand or None,
                why_missing=content.why or missing,
            )
        return PoolReading(pool=pool.name, feed=name, stated=pool.price_per_gpu_hour, reading=reading)


def saved_prices(status: object) -> dict[tuple[str, str], FeedPrice]:
    """(pool, feed) -> the price in the status of a ClusterPolicy; what is malformed there is left out."""
    entries = status.get("prices") if isinstance(status, Mapping) else None
    found = {}
    for entry in entries if isinstance(entries, Sequence) else ():
        try:
            price = PoolPrice.model_validate(entry)
            known = FeedPrice(price=price.price_per_gpu_hour, time=price.time.timestamp())
        except (ValueError, OverflowError):
            continue
        found[price.pool, price.feed] = known
    return found


def with_prices(policy: ClusterPolicy, prices: Mapping[tuple[str, str], FeedPrice]) -> ClusterPolicy:
    """``policy`` with ``prices``, by pool and feed, in place of ``pricePerGpuHour`` of pools with a feed."""
    pools = []
    for pool in policy.spec.node_pools:
        known = prices.get((pool.name, feed_name(pool)))
        if pool.price_feed is None or known is None:
            pools.append(pool)
        else:
            pools.append(pool.model_copy(update={"price_per_gpu_hour": known.price}))
    spec = policy.spec.model_copy(update={"node_pools": tuple(pools)})
    return policy.model_copy(update={"spec": spec})


def known_prices(readings: Sequence[PoolReading]) -> dict[tuple[str, str], FeedPrice]:
    """(pool, feed) -> the last good price."""
    return {(entry.pool, entry.feed): entry.reading.known for entry in readings if entry.reading.known}


def price_status(prices: Mapping[tuple[str, str], FeedPrice]) -> tuple[PoolPrice, ...]:
    """``status.prices``, from prices by pool and feed."""
    return tuple(
        PoolPrice(
            pool=pool,
            feed=feed,
            price_per_gpu_hour=known.price,
            time=datetime.datetime.fromtimestamp(known.time, datetime.UTC),
        )
        for (pool, feed), known in prices.items()
    )


def prices_current(readings: Sequence[PoolReading]) -> Verdict:
    """The condition PricesCurrent of the pools that have a feed."""
    failed = [entry for entry in readings if entry.reading.problem is not None]
    if not failed:
        oldest = min(readings, key=lambda entry: entry.reading.known.time if entry.reading.known else 0.0)
        assert oldest.reading.known is not None
        message = (
            f"{len(readings)} prices of feeds count; the oldest is that of pool {oldest.pool}, "
            f"{oldest.reading.known.price:g} of {shown_time(oldest.reading.known.time)}"
        )
        return Verdict(PolicyCondition.PRICES_CURRENT, True, PolicyReason.PRICES_READ, message)
    lines = [f"pool {each.pool}, {each.feed}: {each.reading.message} ({_counts(each)})" for each in failed]
    message = some_of(lines, MOST_NAMED, between="; ", kind=" pools")
    assert failed[0].reading.problem is not None
    return Verdict(PolicyCondition.PRICES_CURRENT, False, _REASONS[failed[0].reading.problem], message)


def _counts(entry: PoolReading) -> str:
    known = entry.reading.known
    if known is not None:
        return f"{known.price:g} of {shown_time(known.time)} counts"
    if entry.stated > 0:
        return f"pricePerGpuHour {entry.stated:g} counts"
    return "no price is known"
