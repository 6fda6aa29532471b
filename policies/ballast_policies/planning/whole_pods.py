"""Pods that stay in a repack, where a pod holds several positions of the pipeline."""

from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.repack import RepackDecision


def kept_positions(
    decision: RepackDecision,
    partition: Partition,
    block: int,
    layer_bytes: Sequence[float],
    nodes: Sequence[tuple[str, ...]] = (),
) -> tuple[int, ...]:
    """Today's positions that stay, in the order of their new ones: whole blocks of neighbours, the first too.

    Of all choices that keep the order of the blocks, those on the fewest nodes, so that whole nodes become
    free; among these the one for which the fewest bytes travel. The ranks are alike in speed and memory, so
    that the decision's partition holds on any of them.

    Args:
        decision: to repack, onto a multiple of ``block`` positions.
        partition: the one in force.
        block: neighbouring positions that fill whole pods together, and stay or go together.
        layer_bytes: of each layer, shape (L,).
        nodes: of each position; empty: not known. A node is taken to have ranks that follow each other.

    Raises:
        PlanningError: the positions do not fill whole blocks.
    """
    if block == 1 and len(set(nodes)) < 2:
        return decision.kept_ranks
    after = decision.partition
    if partition.ranks % block or after.ranks % block:
        raise PlanningError(
            f"{partition.ranks} and {after.ranks} positions are no multiples of the {block} that fill whole "
            "pods. To fix: a number of stages that fills them"
        )
    stay = _bytes_that_stay(partition, after, block, np.asarray(layer_bytes, dtype=float))
    on = [frozenset().union(*nodes[i : i + block]) for i in range(0, len(nodes), block)]
    new_nodes = np.array([[len(here - before) for here in on] for before in on])
    kept = _best_increasing(stay, new_nodes * (1.0 + stay.sum()) if on else np.zeros((1, 1)))
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


def _best_increasing(value: np.ndarray, cost: np.ndarray) -> list[int]:
    """For each row a column, growing from row to row and 0 for the first, with the largest sum of values.

    ``cost``: less what each column costs after another, shape (columns, columns) or (1, 1).
    """
    rows, columns = value.shape
    following = np.where(np.tri(columns, k=-1, dtype=bool).T, -cost, -np.inf)
    best = np.full((rows, columns), -np.inf)
    best[0, 0] = value[0, 0]
    for row in range(1, rows):
        best[row] = (best[row - 1][:, None] + following).max(axis=0) + value[row]
    chosen = [int(np.argmax(best[-1]))]
    for row in range(rows - 2, -1, -1):
        chosen.append(int(np.argmax(best[row] + following[:, chosen[-1]])))
    return chosen[::-1]
