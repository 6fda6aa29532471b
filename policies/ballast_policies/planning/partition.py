"""Contiguous partitions of a model's layers, and the exact min-max one.

Notation: ``seconds[i]`` is the load of layer i (seconds per step); a partition of L layers over p
ranks is its p + 1 bounds, 0 and L included; rank r holds layers bounds[r] to bounds[r + 1] - 1.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


class PlanningError(ValueError):
    """No plan exists for what was asked; the text says why and what to change."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Layers bounds[r] (inclusive) to bounds[r + 1] (exclusive) on rank r; every rank has at least one.

    Raises:
        PlanningError: the bounds do not start at 0 or do not grow.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0:
            raise PlanningError(f"bounds {self.bounds} must begin with 0 and name at least one rank")
        if any(end <= first for first, end in itertools.pairwise(self.bounds)):
            raise PlanningError(f"bounds {self.bounds} must grow: each rank needs at least one layer")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.bounds) - 1

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.bounds[-1]

    def rank_of(self, layer: int) -> int:
        """The rank that holds ``layer``."""
        return int(np.searchsorted(self.bounds, layer, side="right")) - 1

    def loads(self, seconds: Sequence[float], speeds: Sequence[float] | None = None) -> np.ndarray:
        """Load of each rank, shape (ranks,): sum of its layers' seconds over its speed (default 1)."""
        totals = np.add.reduceat(np.asarray(seconds, dtype=float), self.bounds[:-1])
        return totals if speeds is None else totals / np.asarray(speeds, dtype=float)


def imbalance(loads: Sequence[float] | np.ndarray) -> float:
    """Largest load over the mean load, less 1; 0 is perfectly even."""
    loads = np.asarray(loads, dtype=float)
    mean = loads.mean()
    return float(loads.max() / mean - 1.0) if mean > 0 else 0.0


def speed_up_ceiling(before: Sequence[float] | np.ndarray, after: Sequence[float] | np.ndarray) -> float:
    """Largest load before over largest load after: no rebalancing between the two gains more."""
    return float(np.max(before) / np.max(after))


def even_partition(layers: int, ranks: int) -> Partition:
    """The same number of layers on each rank, up to one.

    Raises:
        PlanningError: fewer layers than ranks.
    """
    _check_counts(layers, ranks)
    return Partition(bounds=tuple(layers * rank // ranks for rank in range(ranks + 1)))


def exact_partition(
    seconds: Sequence[float],
    ranks: int,
    *,
    speeds: Sequence[float] | None = None,
    bytes: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    rank_bytes: Sequence[Sequence[float]] | None = None,
) -> Partition:
    """The contiguous partition whose largest rank load is smallest, by dynamic programming.

    d[r, j] = min over k < j of max(d[r - 1, k], (S[j] - S[k]) / speed_r), where layers k..j-1 must
    fit the memory of rank r.  O(ranks x layers^2), vectorised over k.  Among optimal partitions, the
    one whose second bounds are earliest: the same input gives the same answer.

    Args:
        seconds: load of each layer, shape (L,), >= 0.
        ranks: p <= L.
        speeds: relative speed of each rank, shape (p,); default all 1.
        bytes: bytes of each layer, shape (L,).
        memory: bytes that each rank can hold, shape (p,); needs ``bytes`` or ``rank_bytes``.
        rank_bytes: bytes that each layer takes on each rank, shape (p, L), where they differ (microbatches
            in flight do); held against ``memory`` in place of ``bytes``.

    Raises:
        PlanningError: fewer layers than ranks, shapes that do not match, or no partition fits the memory.
    """
    load = np.asarray(seconds, dtype=float)
    layers = len(load)
    _check_counts(layers, ranks)
    if not np.isfinite(load).all() or (load < 0).any():
        raise PlanningError(f"seconds must be finite and at least 0, got {list(seconds)}")
    speed = np.ones(ranks) if speeds is None else np.asarray(speeds, dtype=float)
    if speed.shape != (ranks,) or (speed <= 0).any():
        raise PlanningError(f"speeds must be {ranks} positive numbers, got {speed.tolist()}")
    S = np.concatenate([[0.0], np.cumsum(load)])
    B, cap = _memory(bytes, rank_bytes, memory, layers, ranks)
    best = np.full((ranks + 1, layers + 1), np.inf)
    cut = np.zeros((ranks + 1, layers + 1), dtype=int)
    best[0, 0] = 0.0
    for rank in range(1, ranks + 1):
        for end in range(rank, layers - (ranks - rank) + 1):
            first = np.arange(rank - 1, end)
            value = np.maximum(best[rank - 1, first], (S[end] - S[first]) / speed[rank - 1])
            value[B[rank - 1, end] - B[rank - 1, first] > cap[rank - 1]] = np.inf
            k = int(np.argmin(value))
            best[rank, end], cut[rank, end] = value[k], first[k]
    if not np.isfinite(best[ranks, layers]):
        raise PlanningError(
            f"{layers} layers of {int(B[:, -1].min())} bytes do not fit {ranks} ranks with {cap.tolist()} "
            "bytes: use more ranks, or ranks with more memory"
        )
    bounds = [layers]
    for rank in range(ranks, 0, -1):
        bounds.append(int(cut[rank, bounds[-1]]))
    return Partition(bounds=tuple(reversed(bounds)))


def _memory(
    bytes: Sequence[int] | None,
    rank_bytes: Sequence[Sequence[float]] | None,
    memory: Sequence[int] | None,
    layers: int,
    ranks: int,
) -> tuple[np.ndarray, np.ndarray]:
    """[rank, layer]: bytes of all layers before it, shape (p, L + 1); and each rank's limit."""
    sums = np.zeros((ranks, layers + 1))
    if memory is None:
        return sums, np.full(ranks, np.inf)
    held = bytes if rank_bytes is None else rank_bytes
    shape = (layers,) if rank_bytes is None else (ranks, layers)
    if held is None or np.shape(held) != shape or len(memory) != ranks:
        raise PlanningError(f"memory needs bytes for {layers} layers and a limit for each of {ranks} ranks")
    sums[:, 1:] = np.cumsum(np.asarray(held, dtype=float), axis=-1)
    return sums, np.asarray(memory, dtype=float)


def fits(
    partition: Partition,
    bytes: Sequence[int] | None,
    memory: Sequence[int] | None,
    rank_bytes: Sequence[Sequence[float]] | None = None,
) -> bool:
    """Whether every rank can hold its layers; arguments as of :func:`exact_partition`.

    Raises:
        PlanningError: memory without bytes, or shapes that do not match.
    """
    if memory is None:
        return True
    _, cap = _memory(bytes, rank_bytes, memory, partition.layers, partition.ranks)
    return bool((bytes_taken(partition, bytes, rank_bytes) <= cap).all())


def bytes_taken(
    partition: Partition,
    bytes: Sequence[int] | None,
    rank_bytes: Sequence[Sequence[float]] | None = None,
) -> np.ndarray:
    """What each rank holds under a partition, shape (p,); ``rank_bytes`` (p, L) go before ``bytes`` (L,)."""
    held = np.asarray(bytes if rank_bytes is None else rank_bytes, dtype=float)
    rows = np.broadcast_to(held, (partition.ranks, partition.layers))
    return np.array(
        [
            row[first:end].sum()
            for row, (first, end) in zip(rows, itertools.pairwise(partition.bounds), strict=True)
        ]
    )


def _check_counts(layers: int, ranks: int) -> None:
    if ranks < 1 or layers < ranks:
        raise PlanningError(
            f"{layers} layers cannot be cut into {ranks} stages: each stage needs at least one layer"
        )
