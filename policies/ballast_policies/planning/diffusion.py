"""Diffusion with chain moves: small steps from the partition in force towards an even one.

DynMo's diffusion (supplement, Algorithm 2) moves single layers between any two ranks and so breaks
contiguity.  Here layers only cross boundaries, in chains: a rank passes its last layers to its neighbour,
which passes as many as it must to stay below the largest load (and within its memory), and so on, with at
least one layer left for each; or the other way round.  A chain ends at the first rank that can keep what it
gets, or, so that it can go through a rank with the largest load, at the first after that one.  A step is
taken if the loads, sorted from the largest, fall in lexicographic order; the best such step first.  Each
accepted step lowers that potential, so the loop ends.

It ends at the smallest largest load: where a partition P* has a smaller one, the rank with the largest load
gives up layers there, say to its right, so its last boundary is further left in P*.  Go back from it to the
first boundary a whose place in P* is right of where boundary a - 1 is now.  The chain that moves a there and
goes through the rank exists, since the places in P* are one, and all ranks in it stay below the largest load.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.planning.partition import Partition, sums_of
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity

_MOST_STEPS = 1000
"""Most steps; diffusion ends before, where the largest load is as small as it can be."""


def diffuse(
    partition: Partition, seconds: Sequence[float], capacity: RankCapacity = UNLIMITED
) -> tuple[Partition, ...]:
    """The partitions passed through, without the first; empty where no step is an improvement.

    ``seconds``: load of each layer; ``capacity``: no step exceeds the memory.

    Raises:
        PlanningError: memory without bytes, or shapes that do not match.
    """
    passed: list[Partition] = []
    chains = _Chains(seconds, partition.ranks, capacity)
    now, potential = partition, chains.potential(partition.bounds)
    while len(passed) < _MOST_STEPS:
        steps = [(chains.potential(bounds), bounds) for bounds in chains.steps(now.bounds)]
        least, bounds = min(steps, default=(potential, ()))
        if not least < potential:
            break
        now, potential = Partition(bounds=bounds), least
        passed.append(now)
    return tuple(passed)


Bounds = tuple[int, ...]


class _Chains:
    """All partitions one chain away, for given layers and ranks.

    ``mirrored`` are the same from right to left.
    """

    def __init__(self, seconds: Sequence[float], ranks: int, capacity: RankCapacity) -> None:
        load = np.asarray(seconds, dtype=float)
        self.layers, self.ranks = len(load), ranks
        self.speeds = capacity.speed_array(ranks)
        # Relative to a constant, so that rounding errors do not count as progress.
        self.scale = float(load.sum() / self.speeds.sum()) or 1.0
        self.right = _Direction(load, self.speeds, capacity.cumulative_bytes(self.layers, ranks), capacity)
        self.left = self.right.mirrored()

    def potential(self, bounds: Bounds) -> tuple[float, ...]:
        loads = np.diff(self.right.S[list(bounds)]) / self.speeds
        return tuple(np.round(np.sort(loads)[::-1] / self.scale, 12).tolist())

    def steps(self, bounds: Bounds) -> Iterator[Bounds]:
        """Each once, those to the right first."""
        largest = float((np.diff(self.right.S[list(bounds)]) / self.speeds).max())
        yield from self.right.chains(bounds, largest)
        for mirrored in self.left.chains(self._mirror(bounds), largest):
            yield self._mirror(mirrored)

    def _mirror(self, bounds: Bounds) -> Bounds:
        return tuple(self.layers - bound for bound in reversed(bounds))


class _Direction:
    """Chains to the right, over layers and ranks in one order."""

    def __init__(
        self, load: np.ndarray, speeds: np.ndarray, held: np.ndarray, capacity: RankCapacity
    ) -> None:
        self.load, self.speeds, self.held, self.capacity = load, speeds, held, capacity
        self.memory = capacity.memory_for_layers(len(speeds)) * ROUNDING
        self.S = sums_of(load)
        self.limited = bool(np.isfinite(self.memory).any())

    def mirrored(self) -> "_Direction":
        held = (self.held[:, -1:] - self.held[:, ::-1])[::-1]
        other = _Direction(self.load[::-1], self.speeds[::-1], held, self.capacity)
        other.memory = self.memory[::-1]
        return other

    def chains(self, bounds: Bounds, largest: float) -> Iterator[Bounds]:
        """Rank ``first - 1`` passes some of its last layers on, later ranks none, one, or as they must."""
        busiest = int(np.argmax(np.diff(self.S[list(bounds)]) / self.speeds))
        for first in range(1, len(self.speeds)):
            yield from self._single_layers(list(bounds), first)
        for until in (0, busiest):
            reach, latest = self._tables(bounds, largest, until)
            for first in range(1, until + 1 if until else len(self.speeds)):
                for start in range(bounds[first] - 1, bounds[first - 1], -1):
                    chain = self._forced(list(bounds), first, start, reach, latest, until)
                    if chain is not None:
                        yield chain

    def _tables(self, bounds: Bounds, largest: float, until: int) -> tuple[np.ndarray, np.ndarray]:
        """Limits of a rank's layers in a chain that ends at rank ``until`` or later; shapes (p, L + 1).

        By rank and first layer, where its layers end at the latest; by rank and layer, the last layer up to
        that one at which the rank may begin so that it and those after it have room, or -1.
        """
        ranks, layers = len(self.speeds), len(self.load)
        reach, latest = np.empty((ranks, layers + 1), dtype=int), np.full((ranks, layers + 1), -1)
        every = np.arange(layers + 1)
        for rank in reversed(range(ranks)):
            most = self.S + largest * (1 - 1e-12) * self.speeds[rank]
            reach[rank] = np.searchsorted(self.S, most) - 1
            if self.limited:
                row = self.held[rank]
                room = np.searchsorted(row, row + self.memory[rank], side="right") - 1
                reach[rank] = np.minimum(reach[rank], room)
            begins = (reach[rank] >= bounds[rank + 1]) & (rank >= until)
            if rank + 1 < ranks:
                begins |= latest[rank + 1, reach[rank]] > every
            begins &= every < bounds[rank]
            latest[rank] = np.maximum.accumulate(np.where(begins, every, -1))
        return reach, latest

    def _single_layers(self, bounds: list[int], first: int) -> Iterator[Bounds]:
        for boundary in range(first, len(self.speeds)):
            bounds[boundary] -= 1
            if bounds[boundary] <= bounds[boundary - 1]:
                return
            if self._fits(bounds):
                yield tuple(bounds)

    def _fits(self, bounds: list[int]) -> bool:
        if not self.limited:
            return True
        ranks = np.arange(len(self.speeds))
        return bool((self.held[ranks, bounds[1:]] - self.held[ranks, bounds[:-1]] <= self.memory).all())

    def _forced(
        self, bounds: list[int], first: int, start: int, reach: np.ndarray, latest: np.ndarray, until: int
    ) -> Bounds | None:
        """Boundary ``first`` moves to ``start``; later ranks pass as little as leaves room for the rest."""
        if latest[first, start] != start:
            return None
        for rank in range(first, len(self.speeds)):
            bounds[rank] = start
            if rank >= until and reach[rank, start] >= bounds[rank + 1]:
                break
            start = int(latest[rank + 1, reach[rank, start]])
        return tuple(bounds)
