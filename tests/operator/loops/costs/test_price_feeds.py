"""Prices of a ConfigMap or a cloud decide and are paid; losing their source loses no price."""

import asyncio
import datetime
import json
from collections.abc import Sequence
from typing import Any

import pytest
from ballast_operator.allocator.costs.cloud_lists import SourceUnavailableError
from ballast_operator.allocator.costs.price_feeds import READ_SECONDS, CloudPrices, PriceFeeds
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus
from ballast_operator.api.conditions import PolicyReason
from ballast_operator.cli.live.whatif import read_cluster
from ballast_operator.kube.kinds import CONFIG_MAP
from ballast_operator.views.clock import show
from ballast_policies.prices.clouds import AwsSpotPrice, AzurePrice, GcpPrice
from ballast_policies.prices.offers import PriceLogError

from tests.operator.loops.simulated.simulation import Simulation, throughput
from tests.support.waiting import WAIT_SECONDS

SYSTEM = "ballast-system"
SPEEDS = throughput(sure=1.0, spot=1.0)


def cluster(policy: str = "min-cost", **pool: object) -> Simulation:
    """Pool sure at 2.0; pool spot with a feed, and 3.0 until it is read."""
    spot = {"pricePerGpuHour": 3.0, "priceFeed": {"configMap": "prices"}, **pool}
    pools = {"sure": {"pricePerGpuHour": 2.0}, "spot": spot}
    nodes = {"a": ("sure", 2), "b": ("spot", 2)}
    return Simulation(nodes=nodes, pools=pools, roundSeconds=10, objective={"policy": policy})


def write(simulation: Simulation, price: object, *, key: str = "spot", **more: str) -> None:
    value = json.dumps({"pricePerGpuHour": price, "time": show(simulation.now)})
    write_data(simulation, {key: value, **more})


def write_data(simulation: Simulation, data: dict[str, str]) -> None:
    simulation.world.put(CONFIG_MAP, {"metadata": {"namespace": SYSTEM, "name": "prices"}, "data": data})


async def after_a_read(simulation: Simulation) -> None:
    await simulation.ticks(int(READ_SECONDS) + 1)


def status(simulation: Simulation) -> ClusterPolicyStatus:
    return ClusterPolicyStatus.model_validate(simulation.policy()["status"])


def billed(simulation: Simulation) -> dict[str, float]:
    """Pool -> the price that its bill goes by."""
    return {entry.pool: entry.price_per_gpu_hour for entry in status(simulation).bill}


def condition(simulation: Simulation):
    return next((c for c in status(simulation).conditions if c.type == "PricesCurrent"), None)


@pytest.mark.slow
async def test_a_job_follows_the_price_of_the_feed():
    """To the pool that has become cheaper, and back; status has the price and its time."""
    simulation = cluster()
    write(simulation, 1.0)
    await simulation.run_job("one", totalSteps=100_000, throughput=SPEEDS)
    assert simulation.pool("one") == "spot"
    assert condition(simulation).reason == PolicyReason.PRICES_READ
    (price,) = status(simulation).prices
    assert (price.pool, price.feed, price.price_per_gpu_hour) == ("spot", "prices/spot", 1.0)
    write(simulation, 2.9)
    await simulation.until(lambda: simulation.pool("one") == "sure")
    assert status(simulation).prices[0].price_per_gpu_hour == 2.9


async def test_whatif_counts_the_price_of_the_feed():
    """As the operator does."""
    simulation = cluster()
    write(simulation, 1.0)
    await simulation.tick()
    snapshot = (await read_cluster(simulation.cluster)).snapshot
    assert snapshot.problem.prices == {"sure": 2.0, "spot": 1.0}


async def test_without_a_price_the_stated_one_counts_and_the_condition_says_why():
    """A ConfigMap that is not there, then one without the key."""
    simulation = cluster()
    await simulation.tick()
    found = condition(simulation)
    assert (found.status, found.reason) == ("False", PolicyReason.PRICE_MISSING)
    assert "no such ConfigMap in namespace ballast-system. To fix: create it" in found.message
    assert "pricePerGpuHour 3 counts" in found.message
    assert billed(simulation)["spot"] == 3.0
    write(simulation, 1.0, key="other")
    await after_a_read(simulation)
    assert "there is no key spot" in condition(simulation).message
    assert status(simulation).prices == ()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, PolicyReason.PRICE_MISSING),
        ({}, PolicyReason.PRICE_MISSING),
        ({"spot": "NaN"}, PolicyReason.PRICE_UNREADABLE),
        ({"spot": "[" * 10_000}, PolicyReason.PRICE_UNREADABLE),
        (
            {"spot": '{"pricePerGpuHour": 900, "time": "2026-01-01T00:00:00Z"}'},
            PolicyReason.PRICE_IMPLAUSIBLE,
        ),
    ],
)
async def test_the_last_good_price_outlives_the_configmap_and_the_operator(data, reason):
    """Another pool of the same feed is not affected by an entry that cannot be read."""
    simulation = cluster()
    with simulation.changed_pools() as pools:
        pools["sure"]["priceFeed"] = {"configMap": "prices", "key": "other"}
    good = json.dumps({"pricePerGpuHour": 1.5, "time": show(simulation.now)})
    write(simulation, 1.0, other=good)
    await simulation.tick()
    if data is None:
        simulation.world.drop(CONFIG_MAP, SYSTEM, "prices")
    else:
        write_data(simulation, {"other": good, **data})
    for restart in (False, True):
        if restart:
            simulation.start_operator()
        await after_a_read(simulation)
        found = condition(simulation)
        assert (found.status, found.reason) == ("False", reason)
        assert "pool spot, prices/spot" in found.message
        assert ("pool sure" in found.message) == (data is None)
        assert "To fix:" in found.message
        assert "1 of 2026-01-01T00:00:" in found.message
        prices = {entry.pool: entry.price_per_gpu_hour for entry in status(simulation).prices}
        assert prices == {"sure": 1.5, "spot": 1.0}
        assert billed(simulation) == prices


async def test_an_old_price_counts_and_is_called_stale_until_there_is_a_new_one():
    """The condition flips without any change of the ConfigMap."""
    simulation = cluster(priceFeed={"configMap": "prices", "staleAfterSeconds": 30})
    write(simulation, 1.0)
    await simulation.tick()
    assert condition(simulation).is_true
    await simulation.tick(seconds=60)
    assert (condition(simulation).is_true, condition(simulation).reason) == (False, PolicyReason.PRICE_STALE)
    assert status(simulation).prices[0].price_per_gpu_hour == 1.0
    assert simulation.metrics.price_age_seconds.labels("spot")._value.get() >= 60
    write(simulation, 1.2)
    await after_a_read(simulation)
    assert condition(simulation).is_true


async def test_without_a_feed_there_is_no_such_condition():
    """Neither before one is set nor after it was taken away."""
    simulation = cluster()
    await simulation.tick()
    assert condition(simulation) is not None
    with simulation.changed_pools() as pools:
        del pools["spot"]["priceFeed"]
    await simulation.tick()
    assert condition(simulation) is None


async def test_a_policy_that_became_invalid_is_not_looked_at_for_its_feed():
    """The loop sleeps until something changes; what was known of prices stays in the status."""
    simulation = cluster()
    write(simulation, 1.0)
    await simulation.tick()
    assert simulation.now.timestamp() < simulation.allocator.next_at
    simulation.change_policy(roundSeconds=-1)
    await simulation.tick(seconds=100)
    assert simulation.allocator.next_at is None
    assert status(simulation).prices[0].price_per_gpu_hour == 1.0


@pytest.mark.slow
async def test_jobs_and_nodes_pay_each_price_for_the_time_that_it_held():
    """Over changes of the price and a death of the operator, to a cent."""
    simulation = cluster("max-throughput")
    write(simulation, 1.0)
    simulation.add_job("one", totalSteps=100_000, gpuTypes=["spot"], throughput=throughput(spot=1.0))
    await simulation.until(lambda: simulation.status("one").allocation is not None)
    expected = 0.0
    for second in range(240):
        if second in (changes := {40: 3.6, 120: 0.36, 200: 1.8}):
            write(simulation, changes[second])
        if second == 100:
            simulation.start_operator()
        expected += 2 * billed(simulation)["spot"] / 3600
        await simulation.tick()
    costs_now = simulation.costs()
    spot = next(pool for pool in costs_now.to_dict()["pools"] if pool["pool"] == "spot")
    assert spot["price"] == 1.8
    assert costs_now.jobs[0].cost == pytest.approx(expected, abs=0.01)
    assert spot["bill"] == pytest.approx(expected, abs=0.01)
    assert expected > 0.2


async def test_a_new_price_is_seen_while_nothing_else_happens():
    """The allocator's loop wakes up to read it, long before the round's end."""
    simulation = cluster()
    simulation.change_policy(roundSeconds=86_400)
    write(simulation, 1.0)
    await simulation.tick()
    write(simulation, 1.7)
    simulation.now += datetime.timedelta(seconds=READ_SECONDS)
    written = asyncio.Event()
    simulation.world.after_write = lambda number: written.set()
    running = asyncio.gather(simulation.allocator.run(), simulation.reporter.run())
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await written.wait()
    finally:
        running.cancel()
    assert status(simulation).prices[0].price_per_gpu_hour == 1.7


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

    def price(self) -> float:
        return billed(self)["spot"]


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
    assert (cluster.price(), condition(cluster).reason) == (3.0, PolicyReason.PRICE_MISSING)
    await cluster.ask()
    assert (cluster.price(), condition(cluster).reason) == (price, PolicyReason.PRICES_READ)


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
            assert condition(cluster).is_true  # the kept price is recent, and the cloud was not asked yet
        await cluster.ask()
        found = condition(cluster)
        assert (found.status, found.reason, cluster.price()) == ("False", reason, 1.0)
        assert "pool spot, aws/us-east-1/p3.8xlarge: " in found.message
        assert "To fix:" in found.message
        assert "(1 of 2" in found.message
    cluster.cloud.price = 4.4
    await cluster.ask()
    assert condition(cluster).is_true
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
    assert condition(cluster).reason == PolicyReason.PRICE_UNREADABLE
    assert "To fix: set gpusPerNode of the pool (pricePerGpuHour 3 counts)" in condition(cluster).message
    assert cluster.price() == 3.0
