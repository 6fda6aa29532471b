"""Prices of clouds decide and are paid; a cloud that does not answer stops nothing and loses no price."""

import datetime
from collections.abc import Sequence
from typing import Any

import pytest
from ballast_operator.allocator.costs.cloud_lists import SourceUnavailableError
from ballast_operator.allocator.costs.cloud_prices import CloudPrices
from ballast_operator.allocator.costs.price_feeds import PriceFeeds
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus
from ballast_operator.api.conditions import PolicyReason
from ballast_policies.prices.clouds import AwsSpotPrice, AzurePrice, GcpPrice
from ballast_policies.prices.offers import PriceLogError

from tests.operator.loops.simulated.simulation import Simulation

AWS = {"aws": {"region": "us-east-1", "instanceType": "p3.8xlarge"}}


class Cloud:
    """Every price list: one price for a machine, or what the test puts in its place."""

    refresh_seconds = 300.0

    def __init__(self) -> None:
        self.price: Any = 4.0

    async def prices(self, wanted: Sequence[Any]) -> Any:
        if isinstance(self.price, SourceUnavailableError):
            raise self.price
        return dict.fromkeys(wanted, self.price)


class Cluster(Simulation):
    """Pool sure at 2.0; pool spot with a cloud's price, and 3.0 until it is known."""

    def __init__(self, feed: dict[str, Any], **pool: Any) -> None:
        self.cloud = Cloud()
        spot = {"pricePerGpuHour": 3.0, "capacityType": "spot", "priceFeed": feed, **pool}
        super().__init__(
            nodes={"a": ("sure", 2), "b": ("spot", 2)},
            pools={"sure": {"pricePerGpuHour": 2.0}, "spot": spot},
            roundSeconds=10,
            objective={"policy": "min-cost"},
        )

    def start_operator(self) -> None:
        super().start_operator()
        lists = dict.fromkeys((AwsSpotPrice, AzurePrice, GcpPrice), self.cloud)
        clouds = CloudPrices(lists, changed=self.asked_to_decide, clock=self._time)
        self.feeds = PriceFeeds(self.cluster, "ballast-system", clouds)
        self.allocator._feeds = self.feeds

    async def ask(self, seconds: float = 300.0) -> None:
        """The loop that asks has had its turn, and a decision has been made since."""
        await self.tick(seconds=seconds)
        await self.feeds.clouds.refresh()
        await self.tick()

    def policy_status(self) -> ClusterPolicyStatus:
        return ClusterPolicyStatus.model_validate(self.policy()["status"])

    def condition(self) -> Any:
        return next((c for c in self.policy_status().conditions if c.type == "PricesCurrent"), None)

    def price(self) -> float:
        return {entry.pool: entry.price_per_gpu_hour for entry in self.policy_status().bill}["spot"]


@pytest.mark.parametrize(
    ("feed", "pool", "price"),
    [
        (AWS, {}, 1.0),  # a p3.8xlarge has four GPUs, by the catalogue
        (AWS, {"gpusPerNode": 8}, 0.5),
        ({**AWS, "rate": 0.25}, {}, 0.25),
        ({"azure": {"region": "eastus", "vmSize": "Standard_NC12s_v3"}}, {}, 2.0),
        ({"gcp": {"skus": [{"id": "039F-D0DA-4055"}]}}, {"gpusPerNode": 8}, 4.0),
        ({"gcp": {"skus": [{"id": "039F-D0DA-4055"}]}, "currency": "EUR", "rate": 1.25}, {}, 5.0),
    ],
)
async def test_a_machines_price_becomes_that_of_a_gpu_in_the_pools_currency(feed, pool, price):
    """Until there is an answer the stated price counts, and the condition says so."""
    cluster = Cluster(feed, **pool)
    await cluster.tick()
    assert (cluster.price(), cluster.condition().reason) == (3.0, PolicyReason.PRICE_MISSING)
    await cluster.ask()
    assert (cluster.price(), cluster.condition().reason) == (price, PolicyReason.PRICES_READ)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (SourceUnavailableError("AWS does not answer. To fix: wait"), PolicyReason.PRICE_UNAVAILABLE),
        (PriceLogError("no such type. To fix: correct it"), PolicyReason.PRICE_UNREADABLE),
        (4000.0, PolicyReason.PRICE_IMPLAUSIBLE),
        (0.001, PolicyReason.PRICE_IMPLAUSIBLE),
    ],
)
async def test_the_last_good_price_outlives_an_outage_and_the_operator(answer, reason):
    """The condition names pool, reason and the price that counts; a new answer clears it."""
    cluster = Cluster(AWS)
    await cluster.ask()
    cluster.cloud.price = answer
    for restart in (False, True):
        if restart:
            cluster.start_operator()
            await cluster.tick()
            assert cluster.condition().is_true  # the kept price is recent, and the cloud was not asked yet
        await cluster.ask()
        found = cluster.condition()
        assert (found.status, found.reason, cluster.price()) == ("False", reason, 1.0)
        assert "pool spot, aws/us-east-1/p3.8xlarge: " in found.message
        assert "To fix:" in found.message
        assert "(1 of 2" in found.message
    cluster.cloud.price = 4.4
    await cluster.ask()
    assert cluster.condition().is_true
    assert cluster.price() == pytest.approx(1.1)


async def test_a_clock_that_is_set_back_does_not_put_off_a_new_price():
    """By two refreshes at most, however far it is set back."""
    cluster = Cluster(AWS, gpusPerNode=8)
    cluster.ahead = datetime.timedelta(days=1)
    await cluster.tick()
    await cluster.ask()
    first = cluster.price()
    cluster.cloud.price *= 2
    cluster.ahead = datetime.timedelta()
    for _ in range(2):
        await cluster.ask(cluster.cloud.refresh_seconds)
    assert cluster.price() == 2 * first


async def test_a_machine_that_no_catalogue_knows_needs_gpus_per_node():
    """Nothing is guessed; the stated price counts."""
    cluster = Cluster({"aws": {"region": "us-east-1", "instanceType": "p9.huge"}})
    await cluster.ask()
    assert cluster.condition().reason == PolicyReason.PRICE_UNREADABLE
    assert "To fix: set gpusPerNode of the pool (pricePerGpuHour 3 counts)" in cluster.condition().message
    assert cluster.price() == 3.0
