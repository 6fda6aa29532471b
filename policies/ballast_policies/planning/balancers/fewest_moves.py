"""The balancer that moves the fewest bytes, among partitions close to the optimum.

Notation as in ``exact``: m[r, i] is the cost of moving layer i to rank r (its bytes, or 1; 0 where
it is there already), and limit the largest load allowed:

    d[r, j] = min over k of d[r - 1, k] + sum of m[r, k..j-1],  load of k..j-1 on r <= limit
"""

from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.balancers.exact import bounds_of, exact_partition
from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity


def nearest_partition(
    partition: Partition,
    seconds: Sequence[float],
    capacity: RankCapacity = UNLIMITED,
    *,
    slack: float = 0.0,
) -> Partition:
    """The partition within ``slack`` of the smallest possible largest load that moves the fewest bytes.

    Args:
        partition: the one in force.
        seconds: load of each layer, shape (L,).
        capacity: speed and memory of the ranks; without bytes of the layers, all count the same.
        slack: relative excess over the optimum that is accepted, 0.02 is 2 %.

    Raises:
        PlanningError: no partition fits the memory, or ``slack`` is negative.
    """
    if slack < 0:
        raise PlanningError(f"slack {slack} is negative: it is how much worse than optimal is accepted")
    ranks, layers = partition.ranks, partition.layers
    optimal = exact_partition(seconds, ranks, capacity)
    # A hair above, so that the optimum itself is never lost to rounding.
    largest = float(optimal.loads(seconds, capacity.speeds).max()) * (1 + slack) * (1 + 1e-12)
    S = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=float))])
    speeds, limit = capacity.speed_array(ranks), capacity.memory_array(ranks)
    weight, held = capacity.weights(layers), capacity.cumulative_bytes(layers, ranks)
    best = np.full((ranks + 1, layers + 1), np.inf)
    cut = np.zeros((ranks + 1, layers + 1), dtype=int)
    best[0, 0] = 0.0
    for rank in range(1, ranks + 1):
        stays = np.zeros(layers, dtype=bool)
        stays[partition.bounds[rank - 1] : partition.bounds[rank]] = True
        M = np.concatenate([[0.0], np.cumsum(np.where(stays, 0.0, weight))])
        for end in range(rank, layers - (ranks - rank) + 1):
            first = np.arange(rank - 1, end)
            value = best[rank - 1, first] + M[end] - M[first]
            taken = held[rank - 1, end] - held[rank - 1, first]
            too_slow = (S[end] - S[first]) / speeds[rank - 1] > largest
            value[too_slow | (taken > limit[rank - 1])] = np.inf
            k = int(np.argmin(value))
            best[rank, end], cut[rank, end] = value[k], first[k]
    return Partition(bounds=bounds_of(cut))
