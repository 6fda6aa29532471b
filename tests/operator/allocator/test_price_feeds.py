"""Price feeds while the API server does not answer, refuses, or holds a malformed status."""

import datetime
import json
from typing import Any

import pytest
from ballast_operator.allocator.costs.price_feeds import MOST_NAMED, READ_SECONDS, PriceFeeds, prices_current
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.read import read_cluster_policy
from ballast_operator.errors import Forbidden, NotFound, Unavailable
from ballast_policies.prices.feed import FeedProblem

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
GOOD = json.dumps({"pricePerGpuHour": 1.0, "time": "2026-01-01T00:00:00Z"})
SAVED = {"pool": "p0", "feed": "m0/p0", "pricePerGpuHour": 1, "time": "2026-01-01T00:00:00Z"}


class Answers:
    """An API server that gives one answer to every question, and counts them."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, []

    async def get(self, kind: object, namespace: str, name: str) -> Any:
        self.asked.append((namespace, name))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def policy(count: int = 1, *, maps: int = 1) -> ClusterPolicy:
    pools = [
        {
            "name": f"p{index}",
            "nodeSelector": {"pool": str(index)},
            "gpuType": "v100",
            "priceFeed": {"configMap": f"m{index % maps}"},
        }
        for index in range(count)
    ]
    return read_cluster_policy({"metadata": {"name": "default"}, "spec": {"nodePools": pools}})


def later(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


async def test_each_configmap_is_read_once_in_a_while_however_many_pools_read_it():
    """And only by its name, in the operator's namespace."""
    cluster = Answers({"data": {"p0": GOOD, "p1": GOOD}})
    feeds = PriceFeeds(cluster, "system")
    for second in range(int(READ_SECONDS)):
        await feeds.read(policy(2), None, later(second))
    assert cluster.asked == [("system", "m0")]
    assert feeds.next_at == later(READ_SECONDS).timestamp()
    await feeds.read(policy(2), None, later(READ_SECONDS))
    assert len(cluster.asked) == 2
    await feeds.read(policy(2, maps=2), None, later(READ_SECONDS + 1))  # a new one is read at once
    assert cluster.asked[2:] == [("system", "m0"), ("system", "m1")]
    await feeds.read(policy(2), None, START)  # the clock has been set back
    assert len(cluster.asked) == 5


async def test_an_api_server_that_does_not_answer_changes_no_price():
    """After a first answer there is no problem to report; before it the problem is named, for every pool."""
    cluster = Answers({"data": {"p0": GOOD}})
    feeds = PriceFeeds(cluster, "system")
    await feeds.read(policy(), None, START)
    cluster.answer = Unavailable("no answer")
    older = {"prices": [{**SAVED, "pricePerGpuHour": 3}]}
    (entry,) = await feeds.read(policy(), older, later(20))
    assert (entry.reading.problem, entry.reading.known.price) == (None, 1.0)
    cluster.answer = NotFound("gone")
    (entry,) = await feeds.read(policy(), older, later(40))
    assert (entry.reading.problem, entry.reading.known.price) == (FeedProblem.MISSING, 1.0)
    cluster.answer = Unavailable("no answer")
    cluster.asked.clear()
    found = await PriceFeeds(cluster, "system").read(policy(10, maps=5), None, START)
    assert len(cluster.asked) == 1
    assert {entry.reading.problem for entry in found} == {FeedProblem.MISSING}
    assert "no answer. To fix:" in found[0].reading.message


@pytest.mark.parametrize("error", [NotFound("gone"), Forbidden("no right")])
async def test_a_configmap_that_cannot_be_read_is_named_with_what_to_do(error: Exception):
    """In a condition that stays short with many pools."""
    found = await PriceFeeds(Answers(error), "system").read(policy(100), None, START)
    _, value, _, message = prices_current(found)
    assert not value
    assert message.count("To fix:") == MOST_NAMED
    assert message.endswith("and 95 more pools")


@pytest.mark.parametrize(
    ("status", "price"),
    [
        (None, None),
        ([], None),
        ({"prices": None}, None),
        ({"prices": 5}, None),
        ({"prices": [None, 3, {"pool": "p0"}]}, None),
        ({"prices": [{**SAVED, "pricePerGpuHour": -1}]}, None),
        ({"prices": [{**SAVED, "feed": "other/p0"}]}, None),
        ({"prices": [{**SAVED, "pool": "p1"}]}, None),
        ({"prices": [None, SAVED]}, 1.0),
    ],
)
async def test_a_new_operator_takes_the_price_of_this_feed_from_the_status(status: Any, price: float | None):
    """Neither malformed entries nor those of another feed count."""
    (entry,) = await PriceFeeds(Answers(NotFound("gone")), "system").read(policy(), status, START)
    assert (None if entry.reading.known is None else entry.reading.known.price) == price
