"""What layers are about to cost, from the last steps in which they were measured.

The median of the last steps tells what layers cost in the middle of them.  Where costs drift, that is some
steps ago, dozens where few steps are measured.  So a drift is followed to the step that comes: by Sen's slope
(1968; the median of the slopes of all pairs), for costs of which Kendall's test (1938) says that they rise or
fall.  Both are of ranks and medians: a step that was disturbed moves them no more than the median.
"""

from collections.abc import Sequence

import numpy as np

_SIGNIFICANT = {5: 10, 6: 13, 7: 17, 8: 18}
"""By number of steps, pairs that rise less pairs that fall from which there is a trend: without one, so many
come by chance in one case of 30 to 60."""


def expected_seconds(rows: Sequence[Sequence[float]], steps: Sequence[int], at: float) -> list[float]:
    """What each entry is expected to be at step ``at``: on its trend where it has one, else its median.

    Args:
        rows: measured seconds, shape (n, K), n at least 1.
        steps: at which they were measured, ascending, shape (n,).
        at: not before the last of them.
    """
    values, times = np.asarray(rows, dtype=float), np.asarray(steps, dtype=float)
    medians = np.median(values, axis=0)
    needed = _SIGNIFICANT.get(len(values))
    if needed is None:
        return [float(value) for value in medians]
    first, second = np.triu_indices(len(values), 1)
    rises = values[second] - values[first]
    slopes = np.median(rises / (times[second] - times[first])[:, None], axis=0)
    begins = np.median(values - np.outer(times, slopes), axis=0)
    trends = np.abs(np.sign(rises).sum(axis=0)) >= needed
    # No further below or above what was measured than the measured ones are apart.
    lowest, highest = values.min(axis=0), values.max(axis=0)
    reach = highest - lowest
    expected = np.clip(begins + slopes * at, np.maximum(lowest - reach, 0.0), highest + reach)
    return [float(value) for value in np.where(trends, expected, medians)]
