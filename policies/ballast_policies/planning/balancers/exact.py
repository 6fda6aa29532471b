"""The contiguous partition whose largest rank load is smallest, by dynamic programming.

With S[j] the summed seconds of the first j layers,

    d[r, j] = min over k < j of max(d[r - 1, k], (S[j] - S[k]) / speed_r)

where layers k..j-1 must fit the memory of rank r.  Where ranks differ in speed, several partitions with the
smallest largest load D differ in their sum of loads, the other part of a step (``planning.step_time``).
The smallest sum is then found by the same recursion, with loads above D left out:

    s[r, j] = min over k < j of s[r - 1, k] + (S[j] - S[k]) / speed_r

Where a layer takes other seconds on each rank, S is that of the rank.

Where no rank is faster than the one before it and memory is no limit, D is also the least load with which
ranks that take as many layers as they may, one after the other, take all of them.  Their sum of loads is then
the smallest, too: every rank but the last has the most layers before its end that any partition has.
"""

import bisect
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.planning.partition import (
    CutStep,
    Partition,
    PlanningError,
    StageLoads,
    best_cuts,
    check_counts,
    smallest_largest,
    sums_of,
)
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity, TakenBytes

ALIKE = 1 + 1e-12
"""Ratio up to which two sums of the same seconds differ by rounding alone."""

CLOSE = 1e-3
"""Part by which bounds of the largest load differ, below which the next larger loads are tried one by one."""


def exact_partition(seconds: Sequence[float], ranks: int, capacity: RankCapacity = UNLIMITED) -> Partition:
    """The partition with the smallest largest load; of several, the one with the smallest sum of loads.

    Of several of these, the one whose last rank begins earliest, then the rank before it, and so on.

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
    speeds, limit = capacity.speed_array(ranks), capacity.memory_array(ranks)
    taken = capacity.taken(layers, ranks)
    loads = loads_on_ranks(load, ranks, speeds, taken, limit)
    largest, found = best_cuts(ranks, layers, loads, smallest_largest)
    if not np.isfinite(largest):
        whole = min(float(taken(rank, 0, layers)) for rank in range(ranks))
        raise PlanningError(
            f"{layers} layers of {int(whole)} bytes do not fit {ranks} ranks with "
            f"{limit.tolist()} bytes: use more ranks, or ranks with more memory"
        )
    if speeds.min() < speeds.max():
        found = best_cuts(ranks, layers, loads, functools.partial(_smallest_sum, largest))[1]
    return found


def loads_on_ranks(
    seconds: Sequence[float] | np.ndarray,
    ranks: int,
    speeds: Sequence[float] | np.ndarray | None = None,
    taken: TakenBytes | None = None,
    memory: np.ndarray | None = None,
) -> StageLoads:
    """Seconds of stages within the memory; ``seconds``: by layer, (L,), or by rank and layer, (p, L)."""
    S = sums_of(np.broadcast_to(seconds, (ranks, np.shape(seconds)[-1])))
    speed = np.ones(ranks) if speeds is None else speeds
    limit = None if memory is None or np.isinf(memory).all() else memory * ROUNDING

    def loads(rank: int, first: np.ndarray, ends: np.ndarray) -> np.ndarray:
        found: np.ndarray = (S[rank, ends] - S[rank, first]) / speed[rank]
        if limit is not None and taken is not None:
            found[taken(rank, np.minimum(first, ends - 1), ends) > limit[rank]] = np.inf
        return found

    return loads


def _smallest_sum(largest: float, step: CutStep) -> tuple[np.ndarray, np.ndarray]:
    """The smallest sum of loads, none of them above ``largest``."""
    value = np.where(step.loads <= largest * ALIKE, step.before + step.loads, np.inf)
    # The first of those that differ by rounding alone.
    return value, (value <= value.min(axis=1, keepdims=True) * ALIKE).argmax(axis=1)


def partition_by_rank(
    rank_seconds: np.ndarray,
    *,
    taken: TakenBytes | None = None,
    memory: Sequence[float] | None = None,
) -> Partition:
    """The contiguous partition whose largest load is smallest, seconds given for each rank and layer.

    Args:
        rank_seconds: seconds of each layer on each rank, shape (p, L).
        taken: bytes of layers on a rank.
        memory: bytes that each rank can hold; needs ``taken``.

    Raises:
        PlanningError: fewer layers than ranks, memory without bytes, or nothing fits the memory.
    """
    ranks, layers = rank_seconds.shape
    check_counts(layers, ranks)
    if memory is not None and (taken is None or len(memory) != ranks):
        raise PlanningError(f"memory needs bytes of the layers on each of {ranks} ranks, and as many limits")
    limit = None if memory is None else np.asarray(memory, dtype=float)
    loads = loads_on_ranks(rank_seconds, ranks, None, taken, limit)
    largest, found = best_cuts(ranks, layers, loads, smallest_largest)
    if not np.isfinite(largest):
        raise PlanningError(
            f"{layers} layers do not fit the memory of {ranks} ranks: "
            "use more ranks, fewer microbatches in flight, or ranks with more memory"
        )
    return found


def fill_in_order(seconds: Sequence[float], speeds: Sequence[float]) -> Partition:
    """A partition with the loads of :func:`exact_partition`, by filling: O(p log L) for each load tried.

    Args:
        seconds: load of each layer, shape (L,), >= 0.
        speeds: of each rank, shape (p,), p <= L; none is above the one before it.
    """
    S, ranks = [0.0, *itertools.accumulate(seconds)], len(speeds)
    low = S[-1] / sum(speeds)
    high = low + max(seconds) / speeds[-1]
    _, high, _ = _filled(S, speeds, high * ALIKE)
    load = low
    while low < high:
        found, largest, more = _filled(S, speeds, load)
        if len(found) > ranks and found[-1] == len(seconds):
            high = largest
        else:
            low = more
        load = (low + high) / 2 if high > low * (1 + CLOSE) else low
    return Partition(bounds=tuple(_filled(S, speeds, high * ALIKE)[0]))


def _filled(S: Sequence[float], speeds: Sequence[float], load: float) -> tuple[list[int], float, float]:
    """(bounds of ranks that take up to ``load``, the largest of their loads, the least that takes more).

    Each leaves a layer for every rank after it. The bounds end at a rank that cannot take one.
    """
    bounds, begin, largest, more = [0], 0, 0.0, float("inf")
    for last, speed in enumerate(speeds, start=len(S) - len(speeds)):
        before = S[begin]
        end = bisect.bisect_right(S, before + load * speed, begin, last + 1) - 1
        # As loads are counted, whatever the sum was rounded to.
        while end < last and (over := (S[end + 1] - before) / speed) <= load:
            end += 1
        while (taken := (S[end] - before) / speed) > load:
            end, over = end - 1, taken
        if end < last and over < more:
            more = over
        if end == begin:
            break
        largest = max(largest, taken)
        bounds.append(end)
        begin = end
    return bounds, largest, more
