"""Pods that stay in a repack, where a pod holds several positions of the pipeline."""

from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.repack import RepackDecision


def kept_positions(
    decision: RepackDecision, partition: Partition, block: int, layer_bytes: Sequence[float]
) -> tuple[int, ...]:
    """Today's positions that stay, in the order of their new ones: whole blocks of neighbours, the first too.

    Of all choices that keep the order of the blocks, the one for which the fewest bytes travel. The ranks are
    alike in speed and memory, so that the decision's partition holds on any of them.

    Args:
        decision: to repack, onto a multiple of ``block`` positions.
        partition: the one in force.
        block: neighbouring positions that fill whole pods together, and stay or go together.
        layer_bytes: of each layer, shape (L,).

    Raises:
        PlanningError: the positions do not fill whole blocks.
    """
    if block == 1:
        return decision.kept_ranks
    after = decision.partition
    if partition.ranks % block or after.ranks % block:
        raise PlanningError(
            f"{partition.ranks} and {after.ranks} positions are no multiples of the {block} that fill whole "
            "pods. To fix: a number of stages that fills them"
        )
    stay = _bytes_that_stay(partition, after, block, np.asarray(layer_bytes, dtype=float))
    kept = _best_increasing(stay)
    return tuple(old * block + offset for old in kept for offset in range(block))


def _bytes_that_stay(before: Partition, after: Partition, block: int, layer_bytes: np.ndarray) -> np.ndarray:
    """(new blocks, old blocks): bytes that need not travel if the new one is on the ranks of the old one."""
    total = np.concatenate([[0.0], np.cumsum(layer_bytes)])
    first, last = np.array(before.bounds[:-1]), np.array(before.bounds[1:])
    found = np.zeros((after.ranks // block, before.ranks // block))
    for new in range(after.ranks):
        low, high = np.maximum(first, after.bounds[new]), np.minimum(last, after.bounds[new + 1])
        overlap = np.where(high > low, total[np.maximum(high, low)] - total[low], 0.0)
        found[new // block] += overlap[new % block :: block]
    return found


def _best_increasing(value: np.ndarray) -> list[int]:
    """For each row a column, growing from row to row and 0 for the first, with the largest sum of values."""
    rows, columns = value.shape
    best = np.full((rows, columns), -np.inf)
    best[0, 0] = value[0, 0]
    for row in range(1, rows):
        before = np.maximum.accumulate(best[row - 1])
        best[row, 1:] = before[:-1] + value[row, 1:]
    chosen = [int(np.argmax(best[-1]))]
    for row in range(rows - 2, -1, -1):
        chosen.append(int(np.argmax(best[row, : chosen[-1]])))
    return chosen[::-1]
