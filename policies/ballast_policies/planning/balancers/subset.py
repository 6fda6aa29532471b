"""The best subset of the ranks in force, and a contiguous partition of the layers over it.

Whether ``n`` kept ranks with loads of at most c are enough: of the first r ranks, k of which are kept, the
layers reach as far as

    F_r[k] = max(F_{r-1}[k], as far as rank r gets from F_{r-1}[k-1])

since a rank that holds less has no more to do.  The smallest such c, c*, is found by halving an interval, and
at the end among the loads that layers can have in it.  Then, among the choices within c*, the fewest bytes
travel where

    d[k, j] = min(d[k, j] without rank r, min over i of d[k-1, i] + bytes of layers i..j-1 that are not on r)

with load and bytes of layers i..j-1 within the limits, a window of i that moves with j.  Rank 0 is always
kept.  What layers take can depend on where they are: the first of four stages holds more microbatches than
the last.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ballast_policies.planning.partition import Partition, PlanningError, sums_of
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity

_NEAR = 1e-4
"""Relative width of the interval in which all loads that layers can have are looked at."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlaceBytes:
    """Bytes that layers take at n places of a pipeline.

    Attributes:
        rows: bytes of each layer at each place, shape (n, L).
        reserved: bytes needed besides, whichever the layers are, shape (n,).
    """

    rows: Sequence[Sequence[float]]
    reserved: Sequence[float]


class _PlaceMemory:
    """Limits of the ranks' memory, and what layers take at each place.

    Args:
        limits: bytes of each rank in force, shape (R,).
        layers: how many.
        bytes_on: for n kept ranks, what layers take on the first to the n-th of them.
    """

    def __init__(self, limits: Sequence[float], layers: int, bytes_on: Callable[[int], PlaceBytes]) -> None:
        self._limits, self._layers, self._bytes_on = limits, layers, bytes_on
        self._sums: dict[int, np.ndarray] = {}
        self._reserved: dict[int, np.ndarray] = {}
        self._flat: dict[int, np.ndarray] = {}

    def sums(self, ranks: int) -> np.ndarray:
        """[place, j]: bytes of the first j layers at each of ``ranks`` places.

        Raises:
            PlanningError: ``bytes_on`` answers with another shape than (ranks, L).
        """
        if ranks not in self._sums:
            at_places, wanted = self._bytes_on(ranks), (ranks, self._layers)
            rows = np.asarray(at_places.rows, dtype=float)
            if rows.shape != wanted:
                raise PlanningError(f"bytes_on({ranks}) has the shape {rows.shape}: give {wanted}")
            self._reserved[ranks] = np.asarray(at_places.reserved, dtype=float)
            self._sums[ranks] = sums_of(rows)
        return self._sums[ranks]

    def room(self, rank: int, places: np.ndarray, ranks: int) -> np.ndarray:
        """Bytes that the layers of ``rank`` may take at each place."""
        self.sums(ranks)
        room: np.ndarray = self._limits[rank] - self._reserved[ranks][places]
        return room

    def search(
        self, ranks: int, places: np.ndarray, values: np.ndarray, side: Literal["left", "right"]
    ) -> np.ndarray:
        """``searchsorted`` of each value in the bytes of the first layers at its place."""
        sums = self.sums(ranks)
        # One search in all rows: each is shifted above the one before.
        width, shift = sums.shape[1], 2 * float(sums.max()) + 1
        if ranks not in self._flat:
            self._flat[ranks] = (sums + shift * np.arange(len(sums))[:, None]).ravel()
        within = np.clip(values, -1, shift - 1) + shift * places
        return np.asarray(np.searchsorted(self._flat[ranks], within, side=side) - width * places)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptRanks:
    """Ranks that stay, and the layers that each holds.

    Attributes:
        ranks: their present numbers, ascending; the first is 0.
        partition: over them, in their order.
    """

    ranks: tuple[int, ...]
    partition: Partition


class RankSubsets:
    """The best subsets of every size of the ranks in force.

    Args:
        partition: the one in force.
        seconds: load of each layer, shape (L,).
        capacity: speed and memory of the ranks in force, and bytes of each layer, which travel.
        bytes_on: for n kept ranks, what layers take on the first to the n-th of them, with the activations of
            the microbatches in flight there; read where there is memory.

    Raises:
        PlanningError: memory without bytes, or for another number of ranks.
    """

    def __init__(
        self,
        partition: Partition,
        seconds: Sequence[float],
        capacity: RankCapacity = UNLIMITED,
        *,
        bytes_on: Callable[[int], PlaceBytes] | None = None,
    ) -> None:
        self.partition, self.seconds, self.capacity = partition, seconds, capacity
        self.S = sums_of(seconds)
        self.weight = capacity.weights(partition.layers)
        self.speeds = capacity.speed_array(partition.ranks)
        self.memory: _PlaceMemory | None = None
        if (limits := capacity.memory) is not None:
            if bytes_on is None or len(limits) != partition.ranks:
                raise PlanningError(
                    f"memory needs bytes of the layers and a limit for {partition.ranks} ranks"
                )
            self.memory = _PlaceMemory(limits, partition.layers, bytes_on)
        self._alike = bool((self.speeds == self.speeds[0]).all())

    def smallest_load(self, ranks: int) -> float | None:
        """The largest load of the best ``ranks`` ranks; None where the memory of no choice is enough."""
        if not 1 <= ranks <= min(self.partition.ranks, self.partition.layers):
            return None
        low = float(self.S[-1] / np.sort(self.speeds)[::-1][:ranks].sum())
        found = self._within(ranks, np.inf)
        if found is None:
            return None
        high = found
        # Near the least possible load first: the best is seldom far above it.
        step = 1.02
        while high > low * (1 + _NEAR):
            middle = min(low * step, (low + high) / 2)
            found = self._within(ranks, middle)
            if found is None:
                low, step = middle, step * step
            else:
                high, step = found, math.inf
        loads = _loads_between(self.S, self.speeds, low, high)
        if not len(loads):
            return high
        best = bisect.bisect_left(
            loads[:-1], 1, key=lambda each: self._within(ranks, float(each)) is not None
        )
        return float(loads[best])

    def fits(self, ranks: int) -> bool:
        """True if the memory of some ``ranks`` ranks holds the layers."""
        return self.memory is None or self._within(ranks, np.inf) is not None

    def enough(self, ranks: int, load: float) -> bool:
        """True if some ``ranks`` ranks have loads of at most ``load``."""
        return self._within(ranks, load) is not None

    def best(self, ranks: int) -> KeptRanks | None:
        """Choice for which the fewest bytes travel, of those with the smallest largest load."""
        load = self.smallest_load(ranks)
        return None if load is None else self._nearest(ranks, load * (1 + 1e-12), self._moved)

    def within_step(self, ranks: int, microbatches: int, seconds: float) -> KeptRanks | None:
        """A choice of which a step, ``((m - 1) max load + sum of loads) / m``, takes at most ``seconds``.

        The least sum within a largest load of c bounds the largest load of all choices within c that are fast
        enough, so c falls until one is found, or none has loads of at most c.
        """
        load, room = math.inf, microbatches * seconds * (1 + 1e-12)
        while load > 0 and (found := self._nearest(ranks, load, self._time)) is not None:
            speeds = [float(self.speeds[rank]) for rank in found.ranks]
            loads = found.partition.loads(np.diff(self.S).tolist(), speeds)
            if (microbatches - 1) * loads.max() + loads.sum() <= room:
                return found
            if microbatches == 1:
                return None
            load = float(room - loads.sum()) / (microbatches - 1)
        return None

    def _reach(
        self, rank: int, load: float, places: np.ndarray, starts: np.ndarray, ranks: int
    ) -> np.ndarray:
        """End of the layers that ``rank`` holds from each start on, at each place."""
        ends: np.ndarray = (
            np.searchsorted(self.S, self.S[starts] + load * self.speeds[rank], side="right") - 1
        )
        if self.memory is not None:
            room = self.memory.sums(ranks)[places, starts] + self.memory.room(rank, places, ranks)
            ends = np.minimum(ends, self.memory.search(ranks, places, room, side="right") - 1)
        return np.asarray(ends)

    def _within(self, ranks: int, load: float) -> float | None:
        """The largest load of a choice, or a bound on it, at most ``load``; None: there is no choice."""
        if self.memory is None and self._alike:
            return self._within_alike(ranks, load)
        limit = load * (1 + 1e-12)
        found = self._as_far_as_possible(ranks, limit)
        if found is not None or self._as_far_as_possible(ranks, limit, empty=True) is None:
            return found
        return load if self._reachable(ranks, limit) else None

    def _as_far_as_possible(self, ranks: int, limit: float, *, empty: bool = False) -> float | None:
        """The largest load where each rank holds as much as it can; None: they do not hold all layers.

        With ``empty`` ranks may hold nothing, so that None then means that no choice holds all.
        """
        count, layers = self.partition.ranks, self.partition.layers
        rows = np.full((count + 1, ranks + 1), -1)
        rows[0, 0] = 0
        for rank in range(count):
            before, after = rows[rank], rows[rank + 1]
            if rank:
                after[:] = before
            kept = self._kept(rank, ranks)
            kept = kept[before[kept - 1] >= 0]
            if not len(kept):
                continue
            starts = before[kept - 1]
            ends = self._reach(rank, limit, kept - 1, starts, ranks)
            if empty:
                ends = np.maximum(ends, starts)
            else:
                ends = np.minimum(ends, layers - (ranks - kept))
                ends[ends <= starts] = -1
            after[kept] = np.maximum(after[kept], ends)
        if rows[count, ranks] < layers:
            return None
        if empty:
            return limit
        largest, end, left = 0.0, layers, ranks
        for rank in range(count - 1, -1, -1):
            if not left or (rank and rows[rank, left] >= end):
                continue
            start = min(int(rows[rank, left - 1]), end - 1)
            largest = max(largest, float((self.S[end] - self.S[start]) / self.speeds[rank]))
            end, left = start, left - 1
        return largest

    def _reachable(self, ranks: int, limit: float) -> bool:
        """True if some choice holds all layers, looking at every number of layers after every rank.

        Holding as much as possible can be wrong where the next rank cannot hold the layer that comes then.
        """
        count, width = self.partition.ranks, self.partition.layers + 1
        ends = np.arange(width)
        reached = np.zeros((ranks + 1, width), dtype=bool)
        reached[0, 0] = True
        for rank in range(count):
            kept = self._kept(rank, ranks)
            number = np.zeros((len(kept), width + 1), dtype=int)
            number[:, 1:] = np.cumsum(reached[kept - 1], axis=1)
            first = np.minimum(self._first(rank, limit, kept - 1, ranks), ends)
            some = number[:, :-1] > np.take_along_axis(number, first, axis=1)
            if rank:
                reached[kept] |= some
            else:
                reached[:] = False
                reached[kept] = some
        return bool(reached[ranks, -1])

    def _kept(self, rank: int, ranks: int) -> np.ndarray:
        """Numbers of ranks that may be kept up to ``rank``: fewer could not become enough."""
        return np.arange(max(1, ranks - (self.partition.ranks - 1 - rank)), min(rank + 1, ranks) + 1)

    def _within_alike(self, ranks: int, load: float) -> float | None:
        """The same for ranks of one speed without a limit of memory: any of them will do."""
        layers, room = self.partition.layers, load * self.speeds[0] * (1 + 1e-12)
        start, largest = 0, 0.0
        for left in range(ranks - 1, -1, -1):
            end = int(np.searchsorted(self.S, self.S[start] + room, side="right")) - 1
            end = min(end, layers - left)
            if end <= start:
                return None
            largest = max(largest, float((self.S[end] - self.S[start]) / self.speeds[0]))
            start = end
        return largest if start == layers else None

    def _nearest(self, ranks: int, limit: float, cost: Callable[[int], np.ndarray]) -> KeptRanks | None:
        """The choice with loads of at most ``limit`` and the least cost.

        ``cost``: of the first j layers on a rank, [j].
        """
        count, width = self.partition.ranks, self.partition.layers + 1
        ends = np.arange(width)
        tables = [np.full((ranks + 1, width), np.inf)]
        tables[0][0, 0] = 0.0
        for rank in range(count):
            before = tables[-1]
            after = before.copy() if rank else np.full_like(before, np.inf)
            kept = self._kept(rank, ranks)
            own = cost(rank)
            least = _window_least(before[kept - 1] - own, self._first(rank, limit, kept - 1, ranks), ends)
            after[kept] = np.minimum(after[kept], own + least)
            tables.append(after)
        if not np.isfinite(tables[-1][ranks, -1]):
            return None
        chosen: list[int] = []
        bounds = [width - 1]
        for rank in range(count - 1, -1, -1):
            left, end = ranks - len(chosen), bounds[-1]
            before, after = tables[rank], tables[rank + 1]
            if not left or (rank and before[left, end] <= after[left, end]):
                continue
            first = int(self._first(rank, limit, np.array([left - 1]), ranks)[0, end])
            values = before[left - 1, first:end] - cost(rank)[first:end]
            chosen.append(rank)
            bounds.append(first + int(np.argmin(values)))
        return KeptRanks(ranks=tuple(reversed(chosen)), partition=Partition(bounds=tuple(reversed(bounds))))

    def _first(self, rank: int, limit: float, places: np.ndarray, ranks: int) -> np.ndarray:
        """[place, j]: the first i so that layers i..j-1 are within the limits on ``rank``."""
        loads = self.S - limit * self.speeds[rank]
        first = np.searchsorted(self.S, loads, side="left")
        # Rounding: exactly those whose load is within the limit.
        over = (self.S - self.S[np.minimum(first, len(self.S) - 1)]) / self.speeds[rank] > limit
        first = first + over
        below = np.maximum(first - 1, 0)
        first = np.where((self.S - self.S[below]) / self.speeds[rank] <= limit, below, first)
        if self.memory is None:
            return np.broadcast_to(first, (len(places), len(first)))
        held = self.memory.sums(ranks)
        rows = np.broadcast_to(places[:, None], (len(places), held.shape[1]))
        room = held[places] - self.memory.room(rank, places, ranks)[:, None]
        return np.asarray(np.maximum(first, self.memory.search(ranks, rows, room, side="left")))

    def _time(self, rank: int) -> np.ndarray:
        """[j]: seconds that the first j layers take on ``rank``."""
        return np.asarray(self.S / self.speeds[rank])

    def _moved(self, rank: int) -> np.ndarray:
        """[j]: bytes that travel if the first j layers are on ``rank``."""
        away = self.weight.copy()
        away[self.partition.bounds[rank] : self.partition.bounds[rank + 1]] = 0.0
        return sums_of(away)


def _window_least(values: np.ndarray, first: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[k, j]: the least of values[k, first[k, j] .. j - 1]; infinite where there is none."""
    widths = ends - first
    level = np.frexp(np.maximum(widths, 1))[1] - 1
    layers = [values]
    for size in range(int(level.max())):
        step = 1 << size
        wider = layers[-1].copy()
        wider[:, :-step] = np.minimum(wider[:, :-step], layers[-1][:, step:])
        layers.append(wider)
    stacked = np.stack(layers)
    rows = np.arange(len(values))[:, None]
    begin = np.minimum(first, len(ends) - 1)
    last = np.maximum(ends - (1 << level), 0)
    least: np.ndarray = np.minimum(stacked[level, rows, begin], stacked[level, rows, last])
    return np.where(widths > 0, least, np.inf)


def _loads_between(sums: np.ndarray, speeds: np.ndarray, low: float, high: float) -> np.ndarray:
    """Every load that some layers have on some rank, above ``low`` and up to ``high`` seconds, ascending.

    ``sums``: seconds of the first j layers, shape (L + 1,); ``speeds``: of the ranks, shape (p,).
    """
    found = []
    for speed in np.unique(speeds):
        first = np.searchsorted(sums, sums + low * speed * (1 - 1e-12), side="right")
        end = np.searchsorted(sums, sums + high * speed * (1 + 1e-12), side="right")
        count = np.maximum(end - first, 0)
        begin = np.repeat(np.arange(len(sums)), count)
        ends = np.arange(len(begin)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        found.append((sums[ends] - sums[begin]) / speed)
    return np.unique(np.concatenate(found))
