"""How often machines are lost, and how often to save."""

import math

import numpy as np
import pytest
from ballast_policies.prices.hazard import (
    Hazard,
    RestartCosts,
    checkpoint_interval,
    daly_interval,
    steps_between_checkpoints,
)
from hypothesis import given
from hypothesis import strategies as st


def test_daly_2006_equation_37():
    """Computed by hand for C = 60 s, M = 3600 s; and M where a checkpoint takes longer than twice M."""
    expected = math.sqrt(432000) * (1 + math.sqrt(60 / 7200) / 3 + 60 / 7200 / 9) - 60
    assert daly_interval(60.0, 3600.0) == pytest.approx(expected)
    assert daly_interval(7200.0, 3600.0) == 3600.0


@given(st.floats(1, 600), st.floats(3600, 1e6))
def test_dalys_interval_is_near_the_best(checkpoint, mean_time):
    """Of the exact expected time with exponential failures (Daly 2006, equation 20)."""

    def overhead(tau):
        return mean_time * (math.exp((tau + checkpoint) / mean_time) - 1) / tau

    best = min(
        overhead(daly_interval(checkpoint, mean_time) * factor) for factor in (0.5, 0.7, 0.9, 1.1, 1.4, 2)
    )
    assert overhead(daly_interval(checkpoint, mean_time)) <= best * 1.0001


@pytest.mark.parametrize("times", [(0, 1), (1, 0), (-1, 1), (1, math.inf), (math.nan, 1)])
def test_impossible_times_are_refused(times):
    with pytest.raises(ValueError, match="positive"):
        daly_interval(*times)


def test_the_uncertainty_shrinks_with_what_was_seen():
    """The same rate from a hundred times as many hours is a narrower range."""
    few, many = Hazard(preemptions=2, hours=20.0), Hazard(preemptions=200, hours=2000.0)

    def width(hazard):
        return hazard.quantile_per_hour(0.95) - hazard.quantile_per_hour(0.05)

    assert width(many) < width(few) / 5
    for hazard in (few, many):
        assert hazard.quantile_per_hour(0.05) < hazard.per_hour < hazard.quantile_per_hour(0.95)


@given(st.floats(0.02, 1.0), st.floats(1.0, 1000.0), st.integers(0, 2**32 - 1))
def test_bounds_of_95_percent_cover_95_percent(rate, hours, seed):
    """At every rate, however long machines were watched: counted over 400 draws, within their noise."""
    counts = np.random.default_rng(seed).poisson(rate * hours, 400)
    bounds = {
        n: [Hazard(preemptions=n, hours=hours).quantile_per_hour(p) for p in (0.025, 0.975)]
        for n in set(counts.tolist())
    }
    covered = sum(low <= rate <= high for low, high in (bounds[n] for n in counts.tolist()))
    assert covered >= 400 * 0.95 - 4 * math.sqrt(400 * 0.95 * 0.05)


def test_a_rate_of_hours_shows_after_ten_of_them():
    """Six machines lost in 10.2 hours are one in 1.7 h, nearly: what was expected before weighs an hour."""
    seen = Hazard(preemptions=6, hours=10.2)
    assert 1.0 / seen.per_hour == pytest.approx(1.7, rel=0.1)
    low, high = (1 / seen.quantile_per_hour(p) for p in (0.975, 0.025))
    assert (low, high) == pytest.approx((0.78, 4.63), abs=0.01)  # Garwood's table: 2.202 and 13.06


@given(st.integers(0, 50), st.floats(0, 100) | st.just(0.0))
def test_the_bounds_are_numbers_around_the_rate(preemptions, hours):
    """Also where a machine was lost in no time at all."""
    hazard = Hazard(preemptions=preemptions, hours=hours)
    low, high = hazard.quantile_per_hour(0.025), hazard.quantile_per_hour(0.975)
    assert 0 <= low <= hazard.per_hour <= high < math.inf


def test_a_pool_without_history_has_the_rate_of_its_class():
    """And moves away from it as it is watched."""
    others = Hazard(preemptions=1000, hours=1000.0)
    assert Hazard().per_hour_in_class(others) == pytest.approx(others.per_hour, rel=0.02)
    watched = Hazard(preemptions=0, hours=500.0)
    assert watched.per_hour_in_class(others.plus(watched)) < 0.02


@given(st.floats(0, 5), st.floats(60, 7200), st.floats(0, 300))
def test_more_preemptions_never_make_time_more_useful(rate, interval, notice):
    costs = RestartCosts(startup_seconds=180, checkpoint_seconds=30, notice_seconds=notice)
    now = costs.useful_part(rate, interval)
    assert 0 <= costs.useful_part(rate + 0.1, interval) <= now < 1


@pytest.mark.parametrize(("notice", "lost"), [(0.0, 1800.0), (30.0, 1830.0), (36.0, 36.0), (120.0, 36.0)])
def test_a_preemption_takes_half_an_interval_where_the_notice_is_too_short_to_save(notice, lost):
    """One an hour, with checkpoints of 36 s every hour, start-ups of three minutes (Daly 2006, section 2)."""
    costs = RestartCosts(startup_seconds=180, checkpoint_seconds=36, notice_seconds=notice)
    useful = 3600 / 3636 * (1 - lost / 3600) / (1 + 180 / 3600)
    assert costs.useful_part(1.0, 3600.0) == pytest.approx(useful)


@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_checkpoints_are_by_daly_only_where_a_notice_is_too_short_to_save(rate):
    """Else no preemption takes work: an hour, as on machines that stay."""
    interval = {
        notice: checkpoint_interval(rate, RestartCosts(checkpoint_seconds=30, notice_seconds=notice))
        for notice in (29.0, 30.0)
    }
    assert interval == {
        29.0: daly_interval(30.0, 3600.0 / rate),
        30.0: checkpoint_interval(0.0, RestartCosts()),
    }


def test_steps_between_checkpoints_by_young_1974_and_daly_2006():
    """Four machines that are each lost every eight hours: Daly's interval in steps, near Young's."""
    mean = 8 * 3600 / 4
    steps = steps_between_checkpoints(checkpoint_seconds=5.0, step_seconds=0.5, failures_per_hour=4 / 8)
    assert steps == round(daly_interval(5.0, mean) / 0.5)
    assert steps == pytest.approx(math.sqrt(2 * 5.0 * mean) / 0.5, rel=0.03)


@pytest.mark.parametrize(
    ("checkpoint", "step", "failures", "steps"),
    [
        (1e-3, 1.0, 100.0, 60),  # at least a minute
        (600.0, 1.0, 1e-5, 86_400),  # at most a day
        (5.0, 1.0, 0.0, 3600),  # nothing is lost: every hour
        (5.0, 1e5, 1.0, 1),  # a step is longer than the interval
        (7200.0, 1.0, 1.0, 3600),  # a checkpoint takes longer than a machine lasts: its mean time
    ],
)
def test_steps_between_checkpoints_are_bounded(checkpoint, step, failures, steps):
    found = steps_between_checkpoints(
        checkpoint_seconds=checkpoint, step_seconds=step, failures_per_hour=failures
    )
    assert found == steps
