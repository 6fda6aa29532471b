"""A pool's earlier prices are paid for the time in which they held."""

import datetime

import pytest
from ballast_operator.allocator.costs.bill import pool_infos
from ballast_operator.views.assignment import MOST_EARLIER

from tests.operator.views.builders import a_pool

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def at(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


def test_the_mean_price_is_over_the_time_that_each_price_held():
    """Before, between and after changes; no time at all costs the price of now."""
    pool = a_pool(1.0).changed(a_pool(4.0).pool, at=at(60)).changed(a_pool(2.0).pool, at=at(90))
    assert pool.mean_price(at(0), at(120)) == pytest.approx((60 * 1 + 30 * 4 + 30 * 2) / 120)
    assert pool.mean_price(at(0), at(30)) == pytest.approx(1.0)
    assert pool.mean_price(at(30), at(75)) == pytest.approx((30 * 1 + 15 * 4) / 45)
    assert pool.mean_price(at(70), at(100)) == pytest.approx((20 * 4 + 10 * 2) / 30)
    assert pool.mean_price(at(100), at(200)) == 2.0
    assert pool.mean_price(at(100), at(100)) == pool.mean_price(None, at(0)) == 2.0


def test_prices_that_changed_long_ago_are_given_up():
    """However often a price changes, a pool stays small."""
    pool = a_pool()
    for second in range(1000):
        pool = pool.changed(a_pool(float(second % 7)).pool, at=at(second))
    assert len(pool.earlier) == MOST_EARLIER


def test_a_pool_that_a_new_operator_sees_first_has_cost_what_the_bill_says():
    """The new price counts from now on."""
    listed = a_pool(3.0).pool
    status = {"bill": [{"pool": "p", "pricePerGpuHour": 1.0}]}
    (pool,) = pool_infos([listed], {}, status, at=at(60)).values()
    assert pool.mean_price(at(0), at(120)) == pytest.approx(2.0)
    (pool,) = pool_infos([listed], {}, None, at=at(60)).values()
    assert pool.mean_price(at(0), at(120)) == pytest.approx(3.0)
