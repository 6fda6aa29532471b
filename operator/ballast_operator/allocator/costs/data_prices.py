"""Regions of pools, and the pools in which it is known what a job's data costs."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from ballast_policies.prices.egress import DataPrices, JobData
from ballast_policies.scheduling.refusals import Refusal

from ballast_operator.api.conditions import JobReason
from ballast_operator.api.costs import DataPrice
from ballast_operator.api.node_pool import NodePool
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView, region_of


def pool_region(pool: NodePool, nodes: Iterable[NodeView], known: str = "") -> str:
    """The region of ``pool``: as stated, else of its nodes, its selector, its price feed, or as it was known.

    Empty: not known, or its nodes are in several.
    """
    if pool.region is not None:
        return pool.region
    found = {region for node in nodes if (region := region_of(node.labels))}
    if found:
        return found.pop() if len(found) == 1 else ""
    feed = pool.price_feed
    of_feed = next((each.region for each in (feed and feed.aws, feed and feed.azure) if each), "")
    return region_of(pool.node_selector) or of_feed or known


def data_prices(stated: Iterable[DataPrice]) -> DataPrices:
    """The prices of data that a ClusterPolicy states."""
    return DataPrices({(each.from_region, each.to_region): each.price_per_gb for each in stated})


def pools_without_price(
    data: JobData | None, regions: Mapping[str, str], prices: DataPrices
) -> Mapping[str, str]:
    """Pool -> why it is not known what the data costs there; nothing of a job that does not state any."""
    if data is None:
        return {}
    return {
        pool: f"no price of data from {data.region} to {region}" if region else f"pool {pool} has no region"
        for pool, region in regions.items()
        if data.usd_per_step(prices, region) is None
    }


def usd_per_step(view: JobView, regions: Mapping[str, str], prices: DataPrices) -> dict[str, float]:
    """Pool -> what a step of the job costs there besides GPUs; empty: it pays for no data anywhere.

    A checkpoint that has to be copied there first is spread over the steps that are left.
    """
    assert view.spec is not None
    data, copies = view.spec.data, usd_to_move(view, regions, prices)
    if data is None:
        return {}
    done = view.status.progress.step if view.status.progress is not None else 0
    left = max(1, view.spec.config.total_steps - done)
    found = {}
    for pool, region in regions.items():
        each = data.usd_per_step(prices, region)
        if each is not None:
            found[pool] = each + copies.get(pool, 0.0) / left
    return found if any(found.values()) else {}


def usd_to_move(view: JobView, regions: Mapping[str, str], prices: DataPrices) -> dict[str, float]:
    """Pool -> what copying the job's checkpoint there costs; without pools where that is nothing."""
    data, status = view.spec.data if view.spec is not None else None, view.status
    if data is None or status.data is None or status.progress is None or status.progress.step <= 0:
        return {}
    here = status.data.region
    copies = {pool: data.usd_to_move(prices, here, region) for pool, region in regions.items()}
    return {pool: usd for pool, usd in copies.items() if usd}


def no_priced_pool(unpriced: Mapping[str, str], pools: Sequence[str]) -> Refusal | None:
    """Refusal of a job that may use ``pools`` otherwise; None: some of them have a price."""
    if not pools or any(pool not in unpriced for pool in pools):
        return None
    return Refusal(
        JobReason.NO_DATA_PRICE,
        f"what reading spec.dataLocation costs is not known in any pool of its GPU types: "
        f"{_reasons(unpriced, pools)}. To fix: add dataPrices to the ClusterPolicy and nodePools[].region "
        "where it is missing, or leave out spec.dataLocation",
    )


def left_out_for_data(unpriced: Mapping[str, str], pools: Collection[str]) -> str:
    """Pools that a job is not offered, as text; empty: none."""
    named = sorted(unpriced.keys() & set(pools))
    if not named:
        return ""
    return f"spec.dataLocation: not offered {', '.join(named[:5])}, {_reasons(unpriced, named)}"


def _reasons(unpriced: Mapping[str, str], pools: Iterable[str]) -> str:
    return "; ".join(list(dict.fromkeys(unpriced[pool] for pool in sorted(pools)))[:3])
