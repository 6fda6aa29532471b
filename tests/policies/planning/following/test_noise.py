"""The gain from which layers move, where what is measured is noisy."""

import numpy as np
import pytest
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.rebalance import MOST, least_gain

CUT = Partition(bounds=(0, 6, 12, 18, 24))


def noisy(noise, *, steps=8, seed=0):
    """Measured seconds of 24 layers that do not change, shape (steps, 24)."""
    return np.random.default_rng(seed).lognormal(0, noise, (steps, 24))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("noise", "low", "high"), [(0.001, 0.02, 0.02), (0.1, 0.02, 0.06), (0.2, 0.03, 0.1)])
def test_noise_raises_the_gain_that_is_asked_for(noise, low, high, seed):
    """One and a half standard errors of a rank's load: of six layers with a tenth each, 3 % of it."""
    assert low <= least_gain(0.02, noisy(noise, seed=seed), CUT) <= high


def test_more_layers_a_rank_and_more_steps_leave_less_noise():
    """It falls as their root."""
    found = [
        np.mean([least_gain(1e-9, noisy(0.1, steps=steps, seed=seed), cut) for seed in range(50)])
        for cut, steps in [(Partition(bounds=tuple(range(25))), 8), (CUT, 8), (CUT, 32)]
    ]
    assert found[0] < MOST
    assert found[1] < 0.5 * found[0] and found[2] < 0.7 * found[1]


@pytest.mark.parametrize(
    ("measured", "min_gain"),
    [
        (np.linspace(1, 2, 8)[:, None] * np.ones(24), 0.02),
        (np.array([1.0, 1, 1, 1, 3, 1, 1, 1])[:, None] * np.ones(24), 0.02),
        (np.where(np.arange(8)[:, None] < 4, 1.0, 3.0) ** (np.arange(24) > 12), 0.02),
        (noisy(0.2, steps=2), 0.02),
        (noisy(0.2), 0.0),
        (noisy(0.2), 0.3),
        (np.zeros((8, 24)), 0.02),
    ],
    ids=["all slower", "one slow step", "a jump", "too few steps", "any gain", "a high gain", "nothing"],
)
def test_what_is_no_noise_asks_for_no_more(measured, min_gain):
    """Steps that change as a whole, loads that jump once, and gains that the user has settled."""
    assert least_gain(min_gain, measured, CUT) == min_gain


def test_stages_of_a_rank_count_together():
    """What one stage of a rank has lost to the other is no gain of a move."""
    measured = noisy(0.0)
    measured[::2, :6] *= 1.5
    measured[::2, 6:12] *= 0.5
    assert least_gain(0.02, measured, CUT, (0, 0, 1, 1)) == 0.02
    assert least_gain(0.02, measured, CUT, (0, 1, 0, 1)) == MOST
