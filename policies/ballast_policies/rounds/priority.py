"""Priorities: what the shares promise against the time received (dissertation section 5.5).

priority[m, j] = X[m, j] / f[m, j]: the fraction of time that job m should run on type j over the
fraction that it has run there. Shares change whenever jobs come and go, so both are kept as
seconds, in an account: promised[m, j] is the integral of X[m, j] over time, and
priority = (promised + X r/2) / (received + r/2). For constant shares this orders as X / f does. Half a
round r is added so that a job that has had nothing has a finite priority, in the order of its
share. Above 1 a job is behind, below 1 ahead. Where X is 0 the priority is 0: such a job runs
only where GPUs would idle.
"""

import numpy as np

SHARE_EPSILON = 1e-6
"""A smaller fraction is a solver's rounding error."""


def priorities(
    shares: np.ndarray, promised: np.ndarray, received: np.ndarray, *, round_seconds: float
) -> np.ndarray:
    """priority[m, j], without unit.

    Args:
        shares: X[m, j], fractions of time, as they are now.
        promised: seconds that job m should have run on type j, by its shares so far.
        received: seconds that it has run there, over the same time.
        round_seconds: length r of a round.
    """
    half = 0.5 * round_seconds
    priority: np.ndarray = np.where(
        shares > SHARE_EPSILON, (promised + shares * half) / (received + half), 0.0
    )
    return priority


def by_urgency(priority: np.ndarray, *ties: np.ndarray) -> np.ndarray:
    """Positions of flat ``priority`` from high to low; equal ones by each of ``ties`` from low to high.

    Priorities are compared in single precision, so that sums that differ in their last bits are ties.
    """
    order: np.ndarray = np.lexsort((*reversed(ties), -priority.astype(np.float32)))
    return order
