"""Prices of pools from feeds, in place of those that the policy states.

A feed is a ConfigMap in the operator's namespace, read every :data:`READ_SECONDS`, or a cloud's price list,
which :class:`CloudPrices` asks beside the decisions. What cannot be used leaves the last good price in force,
which is in ``status.prices`` and so outlives the operator.
"""

import asyncio
import dataclasses
import datetime
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from ballast_policies.prices.clouds import AwsSpotPrice, AzurePrice, GcpPrice, Wanted, gpus_of
from ballast_policies.prices.feed import FeedPrice, FeedProblem, Reading, judge, read_feed, shown_time
from ballast_policies.prices.offers import PriceLogError
from ballast_policies.scheduling.refusals import Verdict

from ballast_operator.allocator.costs.cloud_lists import (
    Answers,
    AwsSpotHistory,
    AzureRetailPrices,
    GcpCatalog,
    PriceSource,
    SourceUnavailableError,
)
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.cluster_policy_status import PoolPrice
from ballast_operator.api.conditions import PolicyCondition, PolicyReason, some_of
from ballast_operator.api.node_pool import CapacityType, NodePool
from ballast_operator.errors import NotFound, Rejected, Unavailable
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import CONFIG_MAP
from ballast_operator.views.clock import Time, now

logger = logging.getLogger(__name__)

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

    def __init__(self, cluster: Cluster, namespace: str, clouds: "CloudPrices | None" = None) -> None:
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


SOURCE_SECONDS = 300.0
"""A source that has not answered for all of its prices by then has failed."""

RETRY_SECONDS = 60.0
"""First pause after a failure; doubles up to the source's own pause."""

LONGEST_REASON = 500


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CloudAnswer:
    """Last answer of a cloud.

    Attributes:
        price: in the list's currency, for a machine or a GPU; None: there is none.
        time: when it was asked, epoch seconds.
        why: there is no price, with what to change.
        unavailable: the cloud has not answered at all.
    """

    price: float | None
    time: float
    why: str = ""
    unavailable: bool = False


SOURCES: Mapping[type, Callable[[], PriceSource]] = {
    AwsSpotPrice: AwsSpotHistory,
    AzurePrice: AzureRetailPrices,
    GcpPrice: GcpCatalog,
}
"""Kind of price -> its cloud's price list, which is made when it is asked first."""


class CloudPrices:
    """The newest ``answers`` of the clouds for what is wanted, and the loop that asks."""

    def __init__(
        self,
        lists: Mapping[type, PriceSource] | None = None,
        *,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], Time] = now,
    ) -> None:
        self._sources = dict(lists or {})
        self._clock = clock
        self._wanted: frozenset[Wanted] = frozenset()
        self._due: dict[type, float] = {}
        self._failures: dict[type, int] = {}
        self._asked = asyncio.Event()
        self.answers: dict[Wanted, CloudAnswer] = {}
        self._changed = changed

    def want(self, wanted: Collection[Wanted]) -> None:
        """Keep the prices of ``wanted``, and of nothing else."""
        new = frozenset(wanted)
        if new == self._wanted:
            return
        for kind in {type(one) for one in new - self._wanted}:
            self._due[kind] = 0.0
            if kind not in self._sources:
                self._sources[kind] = SOURCES[kind]()
        self._wanted = new
        self.answers = {one: answer for one, answer in self.answers.items() if one in new}
        self._asked.set()

    async def run(self) -> None:
        """Ask whenever a price is due, until cancelled."""
        while True:
            times = [self._due[kind] for kind in {type(one) for one in self._wanted}]
            wait = max(0.0, min(times) - self._clock().timestamp()) if times else None
            try:
                async with asyncio.timeout(wait):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            await self.refresh()

    async def refresh(self) -> None:
        """Ask the sources whose prices are due."""
        moment = self._clock().timestamp()
        kinds = {type(one) for one in self._wanted}
        for kind in kinds:  # a clock that has been set back may not put it off
            self._due[kind] = min(self._due[kind], moment + self._sources[kind].refresh_seconds)
        due = sorted((kind for kind in kinds if self._due.get(kind, 0.0) <= moment), key=lambda k: k.__name__)
        if not due:
            return
        await asyncio.gather(*(self._ask(kind, moment) for kind in due))
        self._changed()

    async def _ask(self, kind: type, moment: float) -> None:
        source = self._sources[kind]
        wanted = sorted((one for one in self._wanted if type(one) is kind), key=str)
        found: Answers = {}
        failure: SourceUnavailableError | None = None
        try:
            async with asyncio.timeout(SOURCE_SECONDS):
                found = await source.prices(wanted)
        except SourceUnavailableError as error:
            failure = error
        except TimeoutError:
            failure = SourceUnavailableError(
                f"no answer within {SOURCE_SECONDS:g} s. To fix: let the operator's pod reach the cloud"
            )
        except Exception as error:  # a price list must never stop the operator
            logger.exception("prices of %s not read", kind.__name__)
            failure = SourceUnavailableError(
                f"{type(error).__name__}: {error}. To fix: report this; the operator's log has more"
            )
        left_out = failure or SourceUnavailableError(
            "the cloud has left it out. To fix: see to its price list"
        )
        got = {one: found.get(one, left_out) for one in wanted if one in self._wanted}
        for one, answer in got.items():
            self.answers[one] = _answer(answer, moment)
        failed = any(isinstance(answer, SourceUnavailableError) for answer in got.values())
        self._failures[kind] = self._failures.get(kind, 0) + 1 if failed else 0
        pause = source.refresh_seconds
        if failed:
            pause = min(pause, RETRY_SECONDS * 2 ** min(self._failures[kind] - 1, 20))
        # What was wanted in the meantime is asked for at once.
        more = any(type(one) is kind and one not in self.answers for one in self._wanted)
        self._due[kind] = 0.0 if more else moment + pause


def _answer(found: float | PriceLogError | SourceUnavailableError, moment: float) -> CloudAnswer:
    if isinstance(found, Exception):
        unavailable = isinstance(found, SourceUnavailableError)
        return CloudAnswer(price=None, time=moment, why=str(found)[:LONGEST_REASON], unavailable=unavailable)
    return CloudAnswer(price=found, time=moment)


def wanted_of(pool: NodePool) -> Wanted | None:
    """Query for a cloud; None: the pool's price comes from elsewhere."""
    feed = pool.price_feed
    if feed is None:
        return None
    if feed.aws is not None:
        return AwsSpotPrice(region=feed.aws.region, zone=feed.aws.zone, instance_type=feed.aws.instance_type)
    if feed.azure is not None:
        return AzurePrice(
            region=feed.azure.region,
            vm_size=feed.azure.vm_size,
            spot=pool.capacity_type is CapacityType.SPOT,
            currency=feed.currency,
        )
    if feed.gcp is not None:
        return GcpPrice(skus=tuple((sku.id, sku.per_gpu) for sku in feed.gcp.skus), currency=feed.currency)
    return None


def feed_name(pool: NodePool) -> str:
    """Source of the price, with all that turns it into a price of a GPU: a kept price is of this feed."""
    feed, wanted = pool.price_feed, wanted_of(pool)
    if feed is None:
        return ""
    if wanted is None:
        return f"{feed.config_map}/{feed.key or pool.name}"
    each = f"/{pool.gpus_per_node}" if pool.gpus_per_node and not isinstance(wanted, GcpPrice) else ""
    money = f" {feed.currency}*{feed.rate:g}" if feed.rate is not None else ""
    return f"{wanted}{each}{money}"


def cloud_reading(
    pool: NodePool,
    wanted: Wanted,
    answer: CloudAnswer | None,
    before: FeedPrice | None,
    *,
    now: float,
    on_demand: float | None,
) -> Reading:
    """Price of a GPU hour from ``answer``, in the pools' currency.

    ``answer`` None: the cloud has not answered yet. ``before``: the last good price. ``now``: epoch seconds.
    ``on_demand``: of the GPU type, in the pools' currency; None: not known.
    """
    feed = pool.price_feed
    assert feed is not None
    try:
        gpus = gpus_of(wanted, pool.gpus_per_node)
    except PriceLogError as error:
        return Reading(known=before, problem=FeedProblem.UNREADABLE, message=str(error))
    if answer is None and before is None:
        message = f"{wanted}: there is no answer yet. To fix: wait for it, or set pricePerGpuHour"
        return Reading(known=None, problem=FeedProblem.MISSING, message=message)
    if answer is not None and answer.price is None:
        problem = FeedProblem.UNAVAILABLE if answer.unavailable else FeedProblem.UNREADABLE
        return Reading(known=before, problem=problem, message=answer.why)
    if answer is not None and answer.price is not None:
        rate = 1.0 if feed.rate is None else feed.rate
        found = FeedPrice(price=answer.price / gpus * rate, time=answer.time)
    else:
        assert before is not None
        found = before
    return judge(
        found,
        before,
        now=now,
        stale_after=feed.stale_after_seconds,
        on_demand=on_demand,
        when_stale="see that the operator reaches the cloud",
    )
