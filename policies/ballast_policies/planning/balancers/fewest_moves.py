"""The balancer that moves the fewest bytes, among partitions close to the optimum.

Notation as in ``exact``: m[r, i] is the cost of moving layer i to rank r (its bytes, or 1; 0 where
it is there already), and limit the largest load allowed:

    d[r, j] = min over k of d[r - 1, k] + sum of m[r, k..j-1],  load of k..j-1 on r <= limit

Where ranks differ in speed, the sum of loads, the other part of a step (``planning.step_time``), differs by
partition, too.  It is compared before the bytes; and where it could win a per cent of a step, a few larger
limits are tried: with few microbatches, filling the pipeline may count for more than its slowest rank.
"""

from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.balancers.exact import ALIKE, ENDS_AT_ONCE, bounds_of, exact_partition
from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity
from ballast_policies.planning.step_time import predict_step_seconds

_LARGER_LIMITS = 12
_WORTH = 0.01
"""Part of a step that has to be within reach before larger limits are tried."""


def nearest_partition(
    partition: Partition,
    seconds: Sequence[float],
    capacity: RankCapacity = UNLIMITED,
    *,
    microbatches: int | None = None,
) -> Partition:
    """The partition with the smallest possible largest load that moves the fewest bytes.

    Where ranks differ in speed: of those with the smallest sum of loads; with ``microbatches``, of those with
    the shortest predicted step, to a twelfth of what can be won.

    Args:
        partition: the one in force.
        seconds: load of each layer, shape (L,).
        capacity: speed and memory of the ranks; without bytes of the layers, all count the same.
        microbatches: of a step.

    Raises:
        PlanningError: no partition fits the memory.
    """
    optimal = exact_partition(seconds, partition.ranks, capacity)
    smallest = float(optimal.loads(seconds, capacity.speeds).max())
    best = _fewest_moves(partition, seconds, capacity, smallest)
    speeds = capacity.speed_array(partition.ranks)
    if microbatches is None or speeds.min() == speeds.max():
        return best

    def step(each: Partition) -> float:
        return predict_step_seconds(each.loads(seconds, capacity.speeds), microbatches)

    # All layers on the fastest rank have the smallest sum; more than that wins no larger load may cost.
    within_reach = float(best.loads(seconds, capacity.speeds).sum()) - sum(seconds) / float(speeds.max())
    if within_reach / microbatches < _WORTH * step(best):
        return best
    most = within_reach / max(1, microbatches - 1)
    for number in range(1, _LARGER_LIMITS + 1):
        limit = smallest + most * number / _LARGER_LIMITS
        best = min(best, _fewest_moves(partition, seconds, capacity, limit), key=step)
    return best


def _fewest_moves(
    partition: Partition, seconds: Sequence[float], capacity: RankCapacity, largest: float
) -> Partition:
    """The one without a load above ``largest`` that has the smallest sum, where speeds differ, then bytes."""
    ranks, layers = partition.ranks, partition.layers
    # A hair above, so that the optimum itself is never lost to rounding.
    largest *= 1 + 1e-12
    S = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=float))])
    speeds, limit = capacity.speed_array(ranks), capacity.memory_array(ranks) * ROUNDING
    weight, taken = capacity.weights(layers), capacity.taken(layers, ranks)
    best = np.full((ranks + 1, layers + 1), np.inf)
    sums = np.full((ranks + 1, layers + 1), np.inf)
    cut = np.zeros((ranks + 1, layers + 1), dtype=int)
    best[0, 0] = sums[0, 0] = 0.0
    alike = speeds.min() == speeds.max()
    for rank in range(1, ranks + 1):
        stays = np.zeros(layers, dtype=bool)
        stays[partition.bounds[rank - 1] : partition.bounds[rank]] = True
        M = np.concatenate([[0.0], np.cumsum(np.where(stays, 0.0, weight))])
        last = layers - (ranks - rank)
        for begin in range(rank, last + 1, ENDS_AT_ONCE):
            ends = np.arange(begin, min(begin + ENDS_AT_ONCE, last + 1))[:, None]
            first = np.arange(rank - 1, ends[-1, 0])
            value = best[rank - 1, first] + M[ends] - M[first]
            loads = (S[ends] - S[first]) / speeds[rank - 1]
            too_large = taken(rank - 1, np.minimum(first, ends - 1), ends) > limit[rank - 1]
            refused = (loads > largest) | too_large | (first >= ends)
            value[refused] = np.inf
            totals = np.zeros_like(value)
            if not alike:
                totals = np.where(refused, np.inf, sums[rank - 1, first] + loads)
                # Those that differ by rounding alone are told apart by their bytes.
                value[totals > totals.min(axis=1, keepdims=True) * ALIKE] = np.inf
            chosen = value.argmin(axis=1)
            rows = np.arange(len(ends))
            best[rank, ends[:, 0]], sums[rank, ends[:, 0]] = value[rows, chosen], totals[rows, chosen]
            cut[rank, ends[:, 0]] = first[chosen]
    return Partition(bounds=bounds_of(cut))
