"""A price feed's value is read within limits, and what cannot be used leaves the last good price."""

import json

import pytest
from ballast_policies.prices.feed import FeedPrice, FeedProblem, read_feed

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
BEFORE = FeedPrice(price=0.5, time=NOW - 3600)


def entry(price: object = 0.74, time: object = "2025-12-31T23:50:00Z", **more: object) -> str:
    return json.dumps({"pricePerGpuHour": price, "time": time, **more})


def read(text: str | None, *, before: FeedPrice | None = BEFORE, on_demand: float | None = None):
    return read_feed(text, before, now=NOW, stale_after=7200.0, on_demand=on_demand)


def test_a_good_price_counts_with_its_time():
    """Zones other than UTC, and whole numbers, are as good."""
    reading = read(entry())
    assert (reading.known, reading.problem) == (FeedPrice(price=0.74, time=NOW - 600), None)
    assert read(entry(2, "2026-01-01T00:50:00+01:00")).known == FeedPrice(price=2.0, time=NOW - 600)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.74",
        "null",
        "[]",
        "{}",
        entry(None),
        entry("0.74"),
        entry(True),
        entry(0),
        entry(-1.0),
        entry(1e7),
        entry().replace("0.74", "NaN"),
        entry().replace("0.74", "Infinity"),
        entry().replace("0.74", "1e999"),
        entry().replace("0.74", "9" * 500),
        entry(time=5),
        entry(time=""),
        entry(time="yesterday"),
        entry(time="2025-12-31T23:50:00"),
        entry(time="0001-01-01T00:00:00+14:00"),
        entry(time="2026-01-01T00:10:00Z"),
        entry(time="9999-12-31T23:59:59-14:00"),
        entry(currency="EUR"),
        entry() + entry(),
        entry(more="x" * 2000),
        "[" * 900,
        '{"pricePerGpuHour": 1, "pricePerGpuHour": 2, "time": "2025-12-31T23:50:00Z"}',
        '{"pricePerGpuHour": 1, "time": "\\ud800"}',
    ],
)
def test_what_is_no_price_leaves_the_last_good_one(text: str):
    """The message is short and says what to write."""
    reading = read(text)
    assert (reading.known, reading.problem) == (BEFORE, FeedProblem.UNREADABLE)
    assert "To fix:" in reading.message
    assert len(reading.message) < 2000


def test_a_price_far_from_the_on_demand_price_is_not_used():
    """A fiftieth and twice are the bounds; without an on-demand price there are none."""
    for price in (0.01, 5.1):
        reading = read(entry(price), on_demand=2.5)
        assert (reading.known, reading.problem) == (BEFORE, FeedProblem.IMPLAUSIBLE)
        assert f"{price:g} is not between 0.05 and 5" in reading.message
        assert read(entry(price)).problem is None
    assert read(entry(0.05), on_demand=2.5).problem is None


def test_an_old_price_counts_and_is_called_old():
    """Old is better than none, or than an older one."""
    reading = read(entry(time="2025-12-31T21:00:00Z"))
    assert reading.known == FeedPrice(price=0.74, time=NOW - 3 * 3600)
    assert reading.problem is FeedProblem.STALE


def test_a_price_that_is_gone_is_still_known():
    assert (read(None).known, read(None).problem) == (BEFORE, FeedProblem.MISSING)
    assert read(None, before=None).known is None
