"""The part of a predicted gain that may be noise of the measurements."""

import math
from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.partition import Partition

STANDARD_ERRORS = 1.5
"""A gain below so many standard errors of the ranks' loads may be noise."""
MOST = 0.1
"""A gain of this is never taken for noise: steps of small layers on a shared machine tell no less."""
_FEWEST = 3
"""Measured steps of which noise can be told."""
_OF_A_MEDIAN = 1.25
"""Standard error of a median over that of a mean, of normal noise."""
_MEDIAN_CHANGE = 0.6745 * math.sqrt(2)
"""Median change from one measurement to the next, of normal noise with standard deviation 1."""


def least_gain(
    min_gain: float,
    measured: Sequence[Sequence[float]],
    partition: Partition,
    placement: Sequence[int] | None = None,
) -> float:
    """The gain below which nothing should move: ``min_gain``, or what noise may feign, up to ``MOST``.

    The cut that looks best of all is the one which noise has favoured most.  What counts is each rank's share
    of the work of all in a step, so that a step in which all were slower is no noise.  It is told from the
    changes between measured steps that follow each other: neither a trend nor a jump counts.

    Args:
        min_gain: in any case; 0: whatever gains at all.
        measured: seconds of each layer by measured step, shape (n, L).
        partition: the stages in force.
        placement: rank of each stage, shape (stages,); None: one stage a rank.
    """
    seconds = np.asarray(measured, dtype=float)
    if min_gain <= 0 or len(seconds) < _FEWEST:
        return min_gain
    stages = np.add.reduceat(seconds, partition.bounds[:-1], axis=1)
    ranks = np.arange(partition.ranks) if placement is None else np.asarray(placement)
    loads = np.zeros((len(seconds), int(ranks.max()) + 1))
    np.add.at(loads.T, ranks, stages.T)
    whole = loads.sum(axis=1, keepdims=True)
    if not (whole > 0).all():
        return min_gain
    shares = loads / whole
    deviation = np.median(np.abs(np.diff(shares, axis=0)), axis=0) / _MEDIAN_CHANGE
    error = _OF_A_MEDIAN * math.sqrt((deviation**2).mean() / len(seconds)) / shares.mean()
    return max(min_gain, min(MOST, STANDARD_ERRORS * float(error)))
