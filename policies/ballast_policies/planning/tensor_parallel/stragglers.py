"""Detection of the stragglers of a tensor-parallel group, with a tolerance against noise."""

from collections.abc import Sequence

import numpy as np

TOLERANCE = 0.05
"""Relative; the paper compares exactly, and then any noise makes all ranks but the fastest stragglers."""


def stragglers(seconds: Sequence[float], *, tolerance: float = TOLERANCE) -> tuple[int, ...]:
    """Ranks slower than the fastest by more than ``tolerance``, slowest first (SEMI, Algorithm 2, line 4)."""
    T = np.asarray(seconds, dtype=float)
    late = np.flatnonzero(T.min() * (1 + tolerance) < T)
    return tuple(int(rank) for rank in late[np.argsort(-T[late], kind="stable")])


def mean_is_stale(seconds_at_last_mean: float, seconds: float, *, change: float = 0.1) -> bool:
    """True where this rank's own time has changed enough for the group to exchange times again.

    The mean needs a collective; each rank watches only itself between two of them (III-A: over 10 %).
    """
    return abs(seconds - seconds_at_last_mean) > change * seconds_at_last_mean
