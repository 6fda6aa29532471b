"""The price of a pool that names a cloud's price list."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping

from ballast_policies.prices.clouds import AwsSpotPrice, AzurePrice, GcpPrice, Wanted, gpus_of
from ballast_policies.prices.feed import FeedPrice, FeedProblem, Reading, judge
from ballast_policies.prices.offers import PriceLogError

from ballast_operator.allocator.costs.cloud_lists import (
    Answers,
    AwsSpotHistory,
    AzureRetailPrices,
    GcpCatalog,
    PriceSource,
    SourceUnavailableError,
)
from ballast_operator.api.node_pool import CapacityType, NodePool
from ballast_operator.views.clock import Time, now

logger = logging.getLogger(__name__)

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


def sources() -> dict[type, PriceSource]:
    """The price lists of the clouds."""
    return {AwsSpotPrice: AwsSpotHistory(), AzurePrice: AzureRetailPrices(), GcpPrice: GcpCatalog()}


class CloudPrices:
    """The newest ``answers`` of the clouds for what is wanted, and the loop that asks."""

    def __init__(
        self,
        lists: Mapping[type, PriceSource] | None = None,
        *,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], Time] = now,
    ) -> None:
        self._sources = sources() if lists is None else lists
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
        failed = bool(got) and all(isinstance(answer, SourceUnavailableError) for answer in got.values())
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
