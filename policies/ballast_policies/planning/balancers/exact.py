"""The contiguous partition whose largest rank load is smallest, by dynamic programming.

With S[j] the summed seconds of the first j layers,

    d[r, j] = min over k < j of max(d[r - 1, k], (S[j] - S[k]) / speed_r)

where layers k..j-1 must fit the memory of rank r.  O(p L^2), vectorised over k.
"""

from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.partition import Partition, PlanningError, check_counts
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity


def exact_partition(seconds: Sequence[float], ranks: int, capacity: RankCapacity = UNLIMITED) -> Partition:
    """The partition with the smallest largest load; of several, the one with the earliest second bounds.

    Args:
        seconds: load of each layer, shape (L,), >= 0.
        ranks: p <= L.
        capacity: speed and memory of the ranks.

    Raises:
        PlanningError: fewer layers than ranks, shapes that do not match, or no partition fits the memory.
    """
    load = np.asarray(seconds, dtype=float)
    layers = len(load)
    check_counts(layers, ranks)
    if not np.isfinite(load).all() or (load < 0).any():
        raise PlanningError(f"seconds must be finite and at least 0, got {list(seconds)}")
    speed = capacity.speed_array(ranks)
    S = np.concatenate([[0.0], np.cumsum(load)])
    B, limit = capacity.cumulative_bytes(layers, ranks), capacity.memory_array(ranks)
    best = np.full((ranks + 1, layers + 1), np.inf)
    cut = np.zeros((ranks + 1, layers + 1), dtype=int)
    best[0, 0] = 0.0
    for rank in range(1, ranks + 1):
        for end in range(rank, layers - (ranks - rank) + 1):
            first = np.arange(rank - 1, end)
            value = np.maximum(best[rank - 1, first], (S[end] - S[first]) / speed[rank - 1])
            value[B[rank - 1, end] - B[rank - 1, first] > limit[rank - 1]] = np.inf
            k = int(np.argmin(value))
            best[rank, end], cut[rank, end] = value[k], first[k]
    if not np.isfinite(best[ranks, layers]):
        raise PlanningError(
            f"{layers} layers of {int(B[:, -1].min())} bytes do not fit {ranks} ranks with {limit.tolist()} "
            "bytes: use more ranks, or ranks with more memory"
        )
    return Partition(bounds=bounds_of(cut))


def bounds_of(cut: np.ndarray) -> tuple[int, ...]:
    """The bounds that a table of choices leads to.

    Args:
        cut: [r, j], shape (p + 1, L + 1): first layer of rank r - 1 where the first j layers are on
            the first r ranks.
    """
    bounds = [cut.shape[1] - 1]
    for rank in range(cut.shape[0] - 1, 0, -1):
        bounds.append(int(cut[rank, bounds[-1]]))
    return tuple(reversed(bounds))
