"""Prices over time."""

import numpy as np
import pytest
from ballast_lab.prices.history import Point, PriceSeries, series
from hypothesis import given
from hypothesis import strategies as st


def test_the_last_good_price_stays_and_has_an_age():
    """A feed that falls silent still has a price, and says how old it is."""
    prices, _ = series([Point(time=100.0, usd=1.0), Point(time=200.0, usd=2.0)])
    quote = prices.quote(5000.0, stale_after=3600.0)
    assert (quote.usd, quote.age, quote.stale) == (2.0, 4800.0, True)
    assert not prices.quote(250.0, stale_after=3600.0).stale
    assert not prices.quote(99.0).offered


def test_an_outlier_does_not_replace_the_price():
    """A tenfold slip of the keyboard is counted and left out."""
    prices, outliers = series(
        [Point(time=0.0, usd=1.0), Point(time=10.0, usd=100.0), Point(time=20.0, usd=0.001)],
        on_demand_usd=3.0,
    )
    assert prices.quote(30.0).usd == 1.0
    assert [point.time for point in outliers] == [10.0, 20.0]


def test_not_offered_is_a_price_of_none():
    """Azure leaves the cell empty; from then on there is nothing to rent."""
    prices, _ = series([Point(time=0.0, usd=1.0), Point(time=10.0, usd=None)])
    assert prices.quote(5.0).offered
    assert not prices.quote(10.0).offered
    with pytest.raises(ValueError, match="no price"):
        prices.usd_between(5.0, 15.0)


@given(
    st.dictionaries(st.integers(0, 10**6), st.floats(0.01, 100), min_size=1, max_size=20),
    st.floats(0, 1),
)
def test_a_bill_can_be_cut_anywhere(points, cut):
    """What two parts of a stay cost is what the whole costs."""
    prices, _ = series([Point(time=float(t), usd=usd) for t, usd in points.items()])
    start, end = float(min(points)), float(min(points)) + 2e6
    middle = start + cut * (end - start)
    whole = prices.usd_between(start, end)
    parts = (prices.usd_between(start, middle) if middle > start else 0.0) + prices.usd_between(middle, end)
    assert parts == pytest.approx(whole)
    assert min(points.values()) <= whole / (end - start) * 3600 * (1 + 1e-9)


@given(st.permutations([Point(time=float(t), usd=1.0 + t) for t in range(6)]))
def test_order_and_repetition_do_not_matter(points):
    """AWS answers newest first, and scrapes overlap."""
    prices, _ = series([*points, *points[:3]])
    assert np.array_equal(prices.usd, 1.0 + np.arange(6))


def test_a_history_whose_times_do_not_increase_is_refused():
    """A series is a function of time."""
    with pytest.raises(ValueError, match="increasing"):
        PriceSeries(np.array([1.0, 1.0]), np.array([1.0, 1.0]))
