"""Matrix completion: a row more, without a whole fit."""

import numpy as np
import pytest
from ballast_policies.throughput.completion import complete


def test_one_row_more_is_nearly_what_a_whole_fit_says():
    """With many rows the columns' factors are known; the row's known entries stay as they were given."""
    random = np.random.default_rng(3)
    rows, columns = random.normal(size=(60, 2)), random.normal(size=(5, 2))
    values = 1.0 + rows @ columns.T
    known = random.random(values.shape) < 0.8
    known[-1] = [True, False, True, True, False]
    without = complete(values[:-1], known[:-1])
    whole = complete(values, known)
    found = without.row(values[-1], known[-1])
    assert found[[0, 2, 3]] == pytest.approx(values[-1][[0, 2, 3]])
    assert found == pytest.approx(whole.values[-1], abs=0.15)
