"""The price of a pool that names a cloud's price list."""

from ballast_policies.prices.clouds.wanted import (
    AwsSpotPrice,
    AzurePrice,
    GcpPrice,
    Wanted,
    gpus_of,
)
from ballast_policies.prices.errors import PriceLogError
from ballast_policies.prices.feed import FeedPrice, FeedProblem, Reading, judge

from ballast_operator.allocator.costs.clouds.prices import CloudAnswer
from ballast_operator.api.node_pool import CapacityType, NodePool


def wanted_of(pool: NodePool) -> Wanted | None:
    """What to ask a cloud for; None: the pool's price comes from elsewhere."""
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
    """Where the price is read, with all that turns it into a price of a GPU: a kept price is of this feed."""
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
    """What ``answer`` says of the price of a GPU hour, in the pools' currency.

    Args:
        pool: it has a price feed.
        wanted: by this pool.
        answer: None: the cloud has not answered yet.
        before: the last good price.
        now: epoch seconds.
        on_demand: of the GPU type, in the pools' currency; None: not known.
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
