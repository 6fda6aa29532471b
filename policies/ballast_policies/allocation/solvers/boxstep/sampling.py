"""A sample of jobs that stands for all of them: systematic, in strata, by size."""

import numpy as np


def stratified(
    size: np.ndarray, stratum: np.ndarray, rank: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """A deterministic sample with probabilities in proportion to size.

    Args:
        size: (n,) > 0; jobs so large that they would be drawn more than once are all taken.
        stratum: (n,) whole numbers; every stratum gets its part of the sample.
        rank: (n,) order within a stratum, over which the sample is spread evenly.
        most: jobs in the sample, about.

    Returns:
        (positions in order, weight of each: how many of its size it stands for).
    """
    n = len(size)
    if n <= most:
        return np.arange(n), np.ones(n)
    certain = np.zeros(n, dtype=bool)
    while True:
        left = most - int(certain.sum())
        step = size[~certain].sum() / max(left, 1)
        larger = ~certain & (size >= step)
        if not larger.any() or left <= 1:
            break
        certain |= larger
    order = np.lexsort((rank, stratum))
    order = order[~certain[order]]
    along = np.cumsum(size[order])
    points = (np.arange(max(left, 1)) + 0.5) * step
    drawn = order[np.minimum(np.searchsorted(along, points), len(order) - 1)]
    drawn = np.unique(drawn)
    chosen = np.sort(np.concatenate([np.flatnonzero(certain), drawn]))
    weight = np.where(certain[chosen], 1.0, step / size[chosen])
    return chosen, weight
