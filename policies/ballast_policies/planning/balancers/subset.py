"""The best subset of the ranks in force, and a contiguous partition of the layers over it.

For ranks considered so far, ranks kept of them (c) and layers placed (j):

    d[c, j] = min(d[c, j] without this rank,
                  min over k of combine(d[c - 1, k], cost of layers k..j-1 on this rank))

once with the largest load (which gives the smallest possible one, c*), then, among the choices within
c*, with the bytes that travel.  Rank 0 is always kept.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity


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
        capacity: speed and memory of the ranks in force, and bytes of each layer.
        bytes_on: for n kept ranks, bytes of each layer on the first to the n-th of them, shape (n, L),
            if not ``capacity.layer_bytes``.
    """

    def __init__(
        self,
        partition: Partition,
        seconds: Sequence[float],
        capacity: RankCapacity = UNLIMITED,
        *,
        bytes_on: Callable[[int], Sequence[Sequence[float]]] | None = None,
    ) -> None:
        memory = capacity.memory
        if memory is not None and (capacity.layer_bytes is None or len(memory) != partition.ranks):
            raise PlanningError(f"memory needs bytes of the layers and a limit for {partition.ranks} ranks")
        self.partition = partition
        self.S = _sums(seconds)
        self.weight = capacity.weights(partition.layers)
        self.speeds = capacity.speed_array(partition.ranks)
        self.memory, self.bytes_on = memory, bytes_on
        # Whether the bytes of a layer depend on the position of a kept rank in the pipeline.
        self.varies = memory is not None and bytes_on is not None
        self._tables: dict[int, _Table] = {}

    def smallest_load(self, ranks: int) -> float | None:
        """The largest load of the best ``ranks`` ranks; None where the memory of no choice is enough."""
        value = self._loads(ranks).value(ranks)
        return value if np.isfinite(value) else None

    def best(self, ranks: int, *, slack: float = 0.0) -> KeptRanks | None:
        """Within ``slack`` of the smallest largest load, the choice for which the fewest bytes travel."""
        load = self.smallest_load(ranks)
        if load is None:
            return None
        limit = load * (1 + slack) * (1 + 1e-12)

        held = self._held(ranks)

        def price(rank: int, place: int) -> np.ndarray:
            return np.where(self._load(rank, held[place]) <= limit, self._moved(rank), np.inf)

        return _Table(self, np.add, price).choice(ranks)

    def _loads(self, ranks: int) -> "_Table":
        """The largest loads; one table does for any number of ranks, where bytes do not depend on it."""
        number = ranks if self.varies else 0
        if number not in self._tables:
            held = self._held(ranks)
            self._tables[number] = _Table(self, np.maximum, lambda rank, place: self._load(rank, held[place]))
        return self._tables[number]

    def _held(self, ranks: int) -> np.ndarray:
        """[place, j]: bytes of the first j layers at each place of a pipeline of ``ranks`` ranks.

        Rows beyond the last position repeat it.
        """
        rows = np.broadcast_to(self.weight, (self.partition.ranks, self.partition.layers))
        if self.bytes_on is not None:
            given = np.asarray(self.bytes_on(ranks), dtype=float)
            if given.shape != (ranks, self.partition.layers):
                raise PlanningError(
                    f"bytes_on({ranks}) has the shape {given.shape}: give {ranks} rows of "
                    f"{self.partition.layers} layers"
                )
            rows = given[np.minimum(np.arange(self.partition.ranks), ranks - 1)]
        return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)

    def _load(self, rank: int, held: np.ndarray) -> np.ndarray:
        """[k, j]: load of layers k..j-1 on ``rank``; infinite where they do not fit its memory."""
        load: np.ndarray = (self.S[None, :] - self.S[:, None]) / self.speeds[rank]
        if self.memory is not None:
            load = np.where(held[None, :] - held[:, None] <= self.memory[rank], load, np.inf)
        return load

    def _moved(self, rank: int) -> np.ndarray:
        """[k, j]: bytes that travel if layers k..j-1 are on ``rank``."""
        away = self.weight.copy()
        away[self.partition.bounds[rank] : self.partition.bounds[rank + 1]] = 0.0
        M = _sums(away)
        between: np.ndarray = M[None, :] - M[:, None]
        return between


class _Table:
    """The recursion of the module for one way to combine costs, with the choices for the way back."""

    def __init__(self, owner: RankSubsets, combine: np.ufunc, cost: Callable[[int, int], np.ndarray]) -> None:
        ranks, width = owner.partition.ranks, owner.partition.layers + 1
        self.ranks, self.layers = ranks, width - 1
        best = np.full((ranks + 1, width), np.inf)
        best[0, 0] = 0.0
        # taken[rank][c, j]: first layer of this rank where it is kept as the c-th, else -1.
        self.taken = np.full((ranks, ranks + 1, width), -1)
        upper = np.tril_indices(width)
        for rank in range(ranks):
            following = best.copy()
            if rank == 0:
                following[0, 0] = np.inf
            for kept in range(1, rank + 2):
                if kept == 1 or owner.varies:
                    price = cost(rank, kept - 1)
                value = combine(best[kept - 1][:, None], price)
                value[upper] = np.inf
                first = np.argmin(value, axis=0)
                least = value[first, np.arange(width)]
                better = least < following[kept]
                following[kept] = np.where(better, least, following[kept])
                self.taken[rank, kept] = np.where(better, first, -1)
            best = following
        self.best = best

    def value(self, ranks: int) -> float:
        return float(self.best[ranks, self.layers])

    def choice(self, ranks: int) -> KeptRanks | None:
        if not np.isfinite(self.value(ranks)):
            return None
        kept: list[int] = []
        bounds = [self.layers]
        for rank in range(self.ranks - 1, -1, -1):
            first = int(self.taken[rank, ranks - len(kept), bounds[-1]]) if len(kept) < ranks else -1
            if first >= 0:
                kept.append(rank)
                bounds.append(first)
        return KeptRanks(ranks=tuple(reversed(kept)), partition=Partition(bounds=tuple(reversed(bounds))))


def _sums(values: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
