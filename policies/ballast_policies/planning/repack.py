"""Repacking: the same layers on fewer ranks (DynMo supplement, Algorithm 3, corrected).

The published loop moves all layers of one rank onto any other with room; it lacks a break and does
not keep the order of layers.  Here neighbours merge, so stages stay contiguous: for each number of
ranks the subset with the smallest largest load is found exactly, under the memory limits, and among
equals the one for which the fewest bytes travel; where its step is too long and speeds differ, one
whose step is not.  Rank 0 always stays (it hosts the rendezvous).

Where a pod holds several positions of the pipeline, whole pods stay (:func:`kept_positions`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from ballast_policies.planning.balancers.subset import KeptRanks, RankSubsets
from ballast_policies.planning.partition import Partition, PlanningError, sums_of
from ballast_policies.planning.rank_capacity import SPEED_TOLERANCE, RankCapacity
from ballast_policies.planning.step_time import predict_step_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepackDecision:
    """The ranks to keep, or the reason to keep all.

    Attributes:
        repack: True: ``kept_ranks`` are enough.
        kept_ranks: today's rank numbers, in the order of their new ranks; the first is 0.
        partition: over the kept ranks, in the new numbering; the one in force where nothing is repacked.
        step_seconds_before, step_seconds_after: predicted.
        why: the reason as text, with numbers.
    """

    repack: bool
    kept_ranks: tuple[int, ...]
    partition: Partition
    step_seconds_before: float
    step_seconds_after: float
    why: str


def repack(
    subsets: RankSubsets,
    *,
    microbatches: int,
    min_ranks: int = 1,
    target_ranks: int | None = None,
    max_slowdown: float = 0.1,
    reference_step_seconds: float | None = None,
    schedulable: Callable[[int], bool] | None = None,
) -> RepackDecision:
    """The fewest ranks, or the number asked for, if the step is at most (1 + max_slowdown) x the reference.

    Args:
        subsets: of the ranks in force, by measured seconds per step of each layer.
        microbatches: per step.
        min_ranks: never fewer.
        target_ranks: this many ranks or all of today's; None: the fewest that are enough.
        max_slowdown: how much slower a step may get, relative to the reference.
        reference_step_seconds: what "no slower" means; default: today's prediction. A job whose
            layers got cheaper may give its step time of before the change.
        schedulable: whether the job's schedule exists on that many ranks; default: on any number.
    """
    partition, seconds, capacity = subsets.partition, subsets.seconds, subsets.capacity
    before = predict_step_seconds(partition.loads(seconds, capacity.speeds), microbatches)
    reference = before if reference_step_seconds is None else reference_step_seconds
    limit = reference * (1 + max_slowdown)
    reasons = []
    fewest, most = max(1, min_ranks), partition.ranks
    if target_ranks is not None:
        fewest, most = max(fewest, target_ranks), min(most, target_ranks + 1)
    needed = _ranks_needed(seconds, capacity.speeds, microbatches, limit)
    for ranks in range(fewest, most):
        if ranks < needed:
            # No choice of ranks and cuts can be fast enough: finding the best one takes long.
            reasons.append(f"{ranks}: over the limit of {limit:.4f} s a step, however the layers are cut")
            continue
        if schedulable is not None and not schedulable(ranks):
            reasons.append(f"{ranks}: the schedule does not exist on {ranks} ranks")
            continue
        load = _largest_load(seconds, subsets.speeds, microbatches, limit, ranks)
        if subsets.fits(ranks) and not subsets.enough(ranks, load):
            reasons.append(f"{ranks}: over the limit of {limit:.4f} s a step, however the layers are cut")
            continue
        kept = subsets.best(ranks)
        if kept is None:
            reasons.append(f"{ranks}: the layers do not fit the memory of any {ranks} ranks with rank 0")
            continue
        after = _step_seconds(kept, seconds, capacity, microbatches)
        if after > limit and capacity.speeds is not None:  # a larger load may make a shorter step
            faster = subsets.within_step(ranks, microbatches, limit)
            if faster is not None:
                kept, after = faster, _step_seconds(faster, seconds, capacity, microbatches)
        if after <= limit:
            return _release(partition, kept, before=before, after=after, limit=limit)
        reasons.append(f"{ranks}: {after:.4f} s a step, over the limit of {limit:.4f} s")
    why = "; ".join(reasons) or f"{max(partition.ranks, fewest)} is the least allowed"
    return RepackDecision(
        repack=False,
        kept_ranks=tuple(range(partition.ranks)),
        partition=partition,
        step_seconds_before=before,
        step_seconds_after=before,
        why=f"cannot do with fewer ranks: {why}",
    )


def _step_seconds(
    kept: KeptRanks, seconds: Sequence[float], capacity: RankCapacity, microbatches: int
) -> float:
    own = None if capacity.speeds is None else [capacity.speeds[rank] for rank in kept.ranks]
    return predict_step_seconds(kept.partition.loads(seconds, own), microbatches)


def _ranks_needed(
    seconds: Sequence[float], speeds: Sequence[float] | None, microbatches: int, limit: float
) -> float:
    """A number of ranks below which every step is over ``limit``; infinite where any number is.

    The step is at least ``((m - 1) max load + sum of loads) / m``, and loads are least on ranks as fast as
    the fastest: layers are put on one such rank after the other, each as full as the limit lets it be.
    """
    fastest = 1.0 if speeds is None else max(speeds)
    loads = [second / fastest for second in seconds]
    # Rounding must not rule out what is exactly at the limit.
    room = microbatches * limit * (1 + 1e-9) - sum(loads)
    if microbatches == 1:
        return 1 if room >= 0 else math.inf
    most = room / (microbatches - 1)
    needed, held = 1, 0.0
    for load in loads:
        if load > most:
            return math.inf
        if held + load > most:
            needed, held = needed + 1, 0.0
        held += load
    return needed


def _largest_load(
    seconds: Sequence[float], speeds: np.ndarray, microbatches: int, limit: float, ranks: int
) -> float:
    """A load above which every step on ``ranks`` ranks is over ``limit``.

    With a largest load of c, the sum of the loads is least where the fastest ranks have c each: with K of
    them full, c = work / (sum of their speeds), and linear in between; with it the step is convex in c.
    """
    work = float(np.sum(seconds))
    total = np.cumsum(np.sort(speeds)[::-1][:ranks])
    full = work / total[::-1]
    sums = np.arange(ranks, 0, -1) * full

    def over(load: float) -> bool:
        step = (microbatches - 1) * load + float(np.interp(load, full, sums))
        return step > microbatches * limit * (1 + 1e-9)

    below = [float(load) for load in full if not over(float(load))]
    if not below:
        # The step is least at one of these loads: it is over the limit whatever the load.
        return float(full[0])
    low = below[-1]
    high = max(float(full[-1]), microbatches * limit / max(1, microbatches - 1)) * (1 + 1e-6)
    if not over(high):
        return math.inf
    while high > low * (1 + 1e-9):
        middle = (low + high) / 2
        low, high = (low, middle) if over(middle) else (middle, high)
    return high


def _release(
    partition: Partition, kept: KeptRanks, *, before: float, after: float, limit: float
) -> RepackDecision:
    return RepackDecision(
        repack=True,
        kept_ranks=kept.ranks,
        partition=kept.partition,
        step_seconds_before=before,
        step_seconds_after=after,
        why=(
            f"{len(kept.ranks)} of {partition.ranks} ranks are enough: {before:.4f} -> {after:.4f} s a step, "
            f"limit {limit:.4f} s"
        ),
    )


def kept_positions(
    decision: RepackDecision,
    partition: Partition,
    block: int,
    layer_bytes: Sequence[float],
    nodes: Sequence[tuple[str, ...]] = (),
    speeds: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Today's positions that stay, in the order of their new ones: whole blocks of neighbours, the first too.

    Of all choices that keep the order of the blocks, those on the fewest nodes, so that whole nodes become
    free; among these the one for which the fewest bytes travel. The ranks are alike in memory and, but for
    noise, no slower than the decision's, so that its partition holds on them; empty: there are none such.

    Args:
        decision: to repack, onto a multiple of ``block`` positions.
        partition: the one in force.
        block: neighbouring positions that fill whole pods together, and stay or go together.
        layer_bytes: of each layer, shape (L,).
        nodes: of each position; empty: not known. A node is taken to have ranks that follow each other.
        speeds: of each position; None: alike.

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
    stay = _bytes_that_stay(partition, after, block, layer_bytes)
    on = [frozenset().union(*nodes[i : i + block]) for i in range(0, len(nodes), block)]
    new_nodes = np.array([[len(here - before) for here in on] for before in on])
    cost = new_nodes * (1.0 + stay.sum()) if on else np.zeros((1, 1))
    if speeds is not None:
        here = np.reshape(speeds, (-1, block)) * (1 + SPEED_TOLERANCE)
        slower = here < np.take(speeds, decision.kept_ranks).reshape(-1, 1, block)
        stay[slower.any(axis=2)] = -np.inf
    kept = _best_increasing(stay, cost)
    return tuple(old * block + offset for old in kept for offset in range(block))


def _bytes_that_stay(
    before: Partition, after: Partition, block: int, layer_bytes: Sequence[float]
) -> np.ndarray:
    """(new blocks, old blocks): bytes that need not travel if the new one is on the ranks of the old one."""
    total = sums_of(layer_bytes)
    first, last = np.array(before.bounds[:-1]), np.array(before.bounds[1:])
    found = np.zeros((after.ranks // block, before.ranks // block))
    for new in range(after.ranks):
        low, high = np.maximum(first, after.bounds[new]), np.minimum(last, after.bounds[new + 1])
        overlap = np.where(high > low, total[np.maximum(high, low)] - total[low], 0.0)
        found[new // block] += overlap[new % block :: block]
    return found


def _best_increasing(value: np.ndarray, cost: np.ndarray) -> list[int]:
    """Column for each row, growing from row to row and 0 for the first, with the largest sum of values.

    ``cost``: less what each column costs after another, shape (columns, columns) or (1, 1). Empty: no sum is
    finite.
    """
    rows, columns = value.shape
    following = np.where(np.tri(columns, k=-1, dtype=bool).T, -cost, -np.inf)
    best = np.full((rows, columns), -np.inf)
    best[0, 0] = value[0, 0]
    for row in range(1, rows):
        best[row] = (best[row - 1][:, None] + following).max(axis=0) + value[row]
    if np.isinf(best[-1]).all():
        return []
    chosen = [int(np.argmax(best[-1]))]
    for row in range(rows - 2, -1, -1):
        chosen.append(int(np.argmax(best[row] + following[:, chosen[-1]])))
    return chosen[::-1]
