"""Costs expected at a step: the median of noise, the line of a trend, the level of a jump."""

import math

import numpy as np
import pytest
from ballast_policies.planning.following.looking import DEVIATIONS, expected_costs
from ballast_policies.planning.partition import PlanningError
from hypothesis import given
from hypothesis import strategies as st

costs = st.floats(0, 1e3, allow_subnormal=False)
series = st.integers(1, 8).flatmap(lambda count: st.lists(costs, min_size=count, max_size=count))
ahead = st.floats(1, 64)


def growing(count):
    """Steps that were measured: one after another at first, then with gaps."""
    return st.lists(st.integers(1, 8), min_size=count, max_size=count).map(
        lambda gaps: np.cumsum(gaps).tolist()
    )


def one(steps, values, at):
    (found,) = expected_costs(steps, [[value] for value in values], at)
    return found


@given(value=costs, steps=st.integers(1, 8).flatmap(growing), ahead=ahead)
def test_what_does_not_change_is_expected_to_stay(value, steps, ahead):
    """Constant in, constant out."""
    assert one(steps, [value] * len(steps), steps[-1] + ahead) == value


@given(values=series, data=st.data(), ahead=ahead)
def test_it_never_leaves_what_was_measured_by_far(values, data, ahead):
    """Not below 0, and not further from the median than twice the furthest measurement."""
    steps = data.draw(growing(len(values)))
    found, median = one(steps, values, steps[-1] + ahead), float(np.median(values))
    furthest = max(abs(value - median) for value in values)
    assert found >= 0
    assert abs(found - median) <= DEVIATIONS * furthest * (1 + 1e-9)
    assert found <= DEVIATIONS * max(values) * (1 + 1e-9)


@given(
    start=st.floats(25, 100),
    slope=st.floats(-0.5, 0.5).filter(lambda slope: abs(slope) > 1e-3),
    count=st.integers(5, 8),
    gap=st.integers(1, 4),
    disturbed=st.booleans(),
)
def test_a_trend_is_followed(start, slope, count, gap, disturbed):
    """To half of the steps that were measured beyond the last one; of eight, one may be disturbed."""
    steps = [gap * number for number in range(count)]
    values = [start + slope * step for step in steps]
    if disturbed and count == 8:
        values[3] = 10 * start
    at = steps[-1] + (steps[-1] - steps[0]) / 2
    assert one(steps, values, at) == pytest.approx(start + slope * at)


@pytest.mark.parametrize("before", [8, 4, 1, 0])
@pytest.mark.parametrize(("old", "new"), [(9.0, 1.0), (1.0, 9.0), (4.0, 0.0)])
def test_a_jump_is_reached_as_soon_as_by_the_median_and_not_passed(old, new, before):
    """Also where the levels are noisy: nothing is drawn out of a jump."""
    generator = np.random.default_rng(0)
    for noise in (0.0, 0.02):
        values = [old] * before
        for _ in range(9):
            values = [*values[-7:], new]
            noisy = [value * (1 + noise * generator.standard_normal()) for value in values]
            found, median = one(range(len(noisy)), noisy, len(noisy) + 3), float(np.median(noisy))
            assert abs(found - new) <= abs(median - new) + 3 * noise * max(old, new)
            assert min(noisy) <= found <= max(noisy) or abs(found - median) <= 0.2 * abs(median)


def test_noise_moves_it_hardly_more_than_the_median():
    """Over 4,000 series of noise alone, the error's root mean square is at most a third larger."""
    generator = np.random.default_rng(1)
    noisy = generator.lognormal(0, 0.1, (8, 4000))
    found = np.array(expected_costs(range(8), noisy, 11.5))
    median = np.median(noisy, axis=0)
    off, usual = (float(np.sqrt(((each - 1) ** 2).mean())) for each in (found, median))
    assert off <= 4 / 3 * usual
    # A trend is seen in one series in fifty.
    assert (found != median).mean() < 0.02


def test_series_are_independent():
    generator = np.random.default_rng(2)
    both = generator.lognormal(0, 0.1, (8, 20)) * np.linspace(1, 2, 8)[:, None] ** np.arange(20)
    together = expected_costs(range(8), both, 10)
    assert together == tuple(one(range(8), column, 10) for column in both.T)


@pytest.mark.parametrize(
    ("steps", "measured", "at", "field"),
    [
        ([0, 1], [[1.0], [math.nan]], 2, "measured"),
        ([0, 1], [[1.0], [math.inf]], 2, "measured"),
        ([0, 1], [[1.0, 2.0], [1.0]], 2, "measured"),
        ([], [], 2, "measured"),
        ([0], [[1.0], [1.0]], 2, "measured"),
        ([1, 1], [[1.0], [1.0]], 2, "steps"),
        ([0, 2], [[1.0], [1.0]], 1, "at"),
        ([0, 2], [[1.0], [1.0]], math.nan, "at"),
        ([0, 2], [[1.0], [1.0]], math.inf, "at"),
    ],
)
def test_what_is_no_measurement_is_refused(steps, measured, at, field):
    with pytest.raises(PlanningError, match=f"^{field}: .*To fix: "):
        expected_costs(steps, measured, at)
