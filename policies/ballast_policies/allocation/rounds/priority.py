"""Who is next: the allocation's shares against the time received (dissertation section 5.5).

priority[m, j] = X[m, j] / f[m, j]: the fraction of time that job m should run on type j over the
fraction that it has run there.  Above 1 it is behind its share, below 1 ahead.  Half a round is
added to what every job has had, so that a job that has had nothing has a finite priority, in the
order of its share.  Where X is 0 the priority is 0: such a job runs only where GPUs would idle.
"""

import numpy as np

SHARE_EPSILON = 1e-6
"""A smaller fraction is a solver's rounding, not a wish."""


def priorities(
    shares: np.ndarray, received_seconds: np.ndarray, *, elapsed_seconds: float, round_seconds: float
) -> np.ndarray:
    """priority[m, j].

    Args:
        shares: X[m, j], fractions of time.
        received_seconds: t[m, j], seconds that job m has run on j since the shares were decided.
        elapsed_seconds: since the shares were decided; the denominator of f.
        round_seconds: length of a round.
    """
    fraction = (received_seconds + 0.5 * round_seconds) / max(elapsed_seconds, round_seconds)
    priority: np.ndarray = np.where(shares > SHARE_EPSILON, shares / fraction, 0.0)
    return priority


def by_urgency(priority: np.ndarray, *ties: np.ndarray) -> np.ndarray:
    """Positions of flat ``priority`` from high to low; equal ones by each of ``ties`` from low to high."""
    order: np.ndarray = np.lexsort((*reversed(ties), -priority))
    return order
