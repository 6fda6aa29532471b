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

from ballast_policies.planning.balancers.exact import ALIKE, exact_partition, loads_on_ranks
from ballast_policies.planning.partition import CutStep, Partition, best_cuts, sums_of
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
    speeds, weight = capacity.speed_array(ranks), capacity.weights(layers)
    taken, memory = capacity.taken(layers, ranks), capacity.memory_array(ranks)
    loads = loads_on_ranks(seconds, ranks, speeds, taken, memory)
    stays = np.repeat(np.arange(ranks), np.diff(partition.bounds))
    moved = [sums_of(np.where(stays == rank, 0.0, weight)) for rank in range(ranks)]
    sums = np.full((ranks + 1, layers + 1), np.inf)
    sums[0, 0] = 0.0
    alike = speeds.min() == speeds.max()

    def fewest_bytes(step: CutStep) -> tuple[np.ndarray, np.ndarray]:
        M = moved[step.rank]
        value = step.before + M[step.ends, None] - M[step.first]
        refused = step.loads > largest
        value[refused] = np.inf
        totals = np.zeros_like(value)
        if not alike:
            totals = np.where(refused, np.inf, sums[step.rank, step.first] + step.loads)
            # Those that differ by rounding alone are told apart by their bytes.
            value[totals > totals.min(axis=1, keepdims=True) * ALIKE] = np.inf
        chosen = value.argmin(axis=1)
        sums[step.rank + 1, step.ends] = totals[np.arange(len(chosen)), chosen]
        return value, chosen

    return best_cuts(ranks, layers, loads, fewest_bytes)[1]
