"""The loop that asks clouds: when, for what, and what becomes of sources that fail."""

import asyncio
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from ballast_operator.allocator.costs.cloud_lists import SourceUnavailableError
from ballast_operator.allocator.costs.price_feeds import RETRY_SECONDS, CloudPrices
from ballast_policies.prices.clouds import AwsSpotPrice, AzurePrice
from ballast_policies.prices.offers import PriceLogError

from tests.support.waiting import WAIT_SECONDS

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ONE, TWO = (AwsSpotPrice(region="us-east-1", instance_type=name) for name in ("p3.2xlarge", "p3.8xlarge"))
AZURE = AzurePrice(region="eastus", vm_size="Standard_NC6s_v3", spot=True)


class Listed:
    """A price list that holds these prices, or fails; it notes what it was asked for."""

    def __init__(self, prices: Any, refresh_seconds: float = 300.0) -> None:
        self.listed, self.refresh_seconds, self.asked = prices, refresh_seconds, []
        self.meanwhile: Callable[[], None] = lambda: None

    async def prices(self, wanted: Sequence[Any]) -> Any:
        self.asked.append(list(wanted))
        self.meanwhile()
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed


class World:
    """Two lists, and a clock that the test moves."""

    def __init__(self, aws: Any, azure: Any = None) -> None:
        self.now, self.changes, self.answered = START, 0, asyncio.Event()
        self.aws, self.azure = Listed(aws), Listed(azure or {})
        lists = {AwsSpotPrice: self.aws, AzurePrice: self.azure}
        self.prices = CloudPrices(lists, changed=self._changed, clock=lambda: self.now)

    def _changed(self) -> None:
        self.changes += 1
        self.answered.set()

    async def after(self, seconds: float) -> None:
        self.now += datetime.timedelta(seconds=seconds)
        await self.prices.refresh()


async def test_prices_are_asked_for_when_they_are_due():
    """At once, then every few minutes; nothing is asked where nothing is wanted."""
    world = World({ONE: 1.0})
    await world.after(0)
    assert (world.aws.asked, world.changes) == ([], 0)
    world.prices.want([ONE])
    await world.after(0)
    await world.after(299)
    assert (world.aws.asked, world.changes) == ([[ONE]], 1)
    await world.after(1)
    assert len(world.aws.asked) == 2
    assert world.prices.answers[ONE].price == 1.0
    assert world.prices.answers[ONE].time == world.now.timestamp()


async def test_what_is_new_is_asked_for_at_once_and_what_is_unwanted_is_forgotten():
    """Of the list that it is about."""
    world = World({ONE: 1.0, TWO: 4.0}, {AZURE: 2.0})
    world.prices.want([ONE, AZURE])
    await world.after(0)
    world.prices.want([TWO, AZURE])
    assert world.prices.answers.keys() == {AZURE}
    await world.after(1)
    assert (len(world.aws.asked), len(world.azure.asked)) == (2, 1)
    assert world.prices.answers[TWO].price == 4.0
    world.prices.want([])
    await world.after(10_000)
    assert (len(world.aws.asked), len(world.azure.asked), world.prices.answers) == (2, 1, {})


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (SourceUnavailableError("AWS is down. To fix: wait"), "AWS is down"),
        (RuntimeError("a bug"), "RuntimeError: a bug. To fix: report this"),
        (MemoryError(), "MemoryError"),
        ({ONE: SourceUnavailableError("no answer in eu-west-1"), TWO: 4.0}, "no answer in eu-west-1"),
    ],
)
async def test_a_list_that_fails_is_asked_again_soon_and_then_less_often(failure: Any, reason: str):
    """As a whole or in part; the other list is not affected, and what was to be impossible stops nothing."""
    world = World(failure, {AZURE: 2.0})
    world.prices.want([ONE, TWO, AZURE])
    await world.after(0)
    assert world.prices.answers[AZURE].price == 2.0
    answer = world.prices.answers[ONE]
    assert (answer.price, answer.unavailable) == (None, True)
    assert reason in answer.why
    for pause in (RETRY_SECONDS, 2 * RETRY_SECONDS, 4 * RETRY_SECONDS, 300.0, 300.0):
        asked = len(world.aws.asked)
        await world.after(pause - 1)
        assert len(world.aws.asked) == asked
        await world.after(1)
        assert len(world.aws.asked) == asked + 1
    world.aws.listed = {ONE: 1.0}
    await world.after(300)
    assert world.prices.answers[ONE].price == 1.0


async def test_one_price_that_is_refused_is_no_failure_of_the_list():
    """It is asked for with the others, at the usual time."""
    world = World({ONE: 1.0, TWO: PriceLogError("no such type. To fix: correct it")})
    world.prices.want([ONE, TWO])
    await world.after(0)
    assert (world.prices.answers[TWO].why, world.prices.answers[TWO].unavailable) == (
        "no such type. To fix: correct it",
        False,
    )
    await world.after(RETRY_SECONDS)
    assert len(world.aws.asked) == 1


async def test_what_is_wanted_and_unwanted_while_a_list_is_asked_is_asked_for_at_once_and_forgotten():
    """Not at the list's next time."""
    world = World({ONE: 1.0, TWO: 4.0})
    world.aws.meanwhile = lambda: world.prices.want([TWO])
    world.prices.want([ONE])
    await world.after(0)
    assert world.prices.answers == {}
    world.aws.meanwhile = lambda: None
    await world.after(0)
    assert world.aws.asked == [[ONE], [TWO]]
    assert {one: answer.price for one, answer in world.prices.answers.items()} == {TWO: 4.0}


async def test_a_clock_that_is_set_back_does_not_put_a_list_off():
    """By a day: it is asked again within its usual pause."""
    world = World({ONE: 1.0})
    world.prices.want([ONE])
    await world.after(0)
    await world.after(-86_400)
    await world.after(300)
    assert len(world.aws.asked) == 2


async def test_the_loop_waits_for_something_to_ask_and_asks():
    """It is woken by what is wanted, and says that there are answers."""
    world = World({ONE: 1.0})
    running = asyncio.create_task(world.prices.run())
    try:
        await asyncio.sleep(0)
        world.prices.want([ONE])
        async with asyncio.timeout(WAIT_SECONDS):
            await world.answered.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert world.prices.answers[ONE].price == 1.0
