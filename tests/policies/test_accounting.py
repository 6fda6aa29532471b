"""What running costs, and isolated shares."""

import numpy as np
import pytest
from ballast_policies.accounting import isolated_seconds, isolated_share, jobs_alike


def test_isolated_seconds_are_steps_over_the_isolated_speed():
    """Themis's t_isolated of the progress so far."""
    assert isolated_seconds(100.0, 4.0) == 25.0


def test_an_isolated_share_is_the_dissertations_x_isolated():
    """Section 5.4.1: capacity_j / (n gpus_m), scaled down to at most all of the time."""
    capacity = np.array([8.0, 4.0])
    assert capacity * isolated_share(2.0, jobs=12, total_gpus=12.0) == pytest.approx(capacity / 24)
    alone = capacity * isolated_share(1.0, jobs=1, total_gpus=12.0)
    assert alone.sum() == pytest.approx(1.0)
    assert alone[0] / alone[1] == pytest.approx(2.0)


def test_a_job_owns_its_weights_part_and_of_equal_weights_exactly_one_nth():
    """Whatever the weights are, to the last bit where they are equal."""
    weights = np.array([1.0, 2.0, 5.0])
    assert 1 / jobs_alike(weights, weights) == pytest.approx(weights / 8)
    for each in (1.0, 0.1, 1 / 3, 7e14):
        assert (jobs_alike(np.full(7, each), np.full(7, each)) == 7).all()
