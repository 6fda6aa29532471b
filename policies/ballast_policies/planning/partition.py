"""Contiguous partitions of a model's layers over ranks, and the moves from one to another.

Notation: ``seconds[i]`` is the load of layer i (seconds per step); a partition of L layers over p
ranks is its p + 1 bounds, 0 and L included; rank r holds layers bounds[r] to bounds[r + 1] - 1.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike


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

    def reversed(self) -> "Partition":
        """The same cut of the layers in the reverse order."""
        return Partition(bounds=tuple(self.layers - bound for bound in reversed(self.bounds)))


def sums_of(values: ArrayLike) -> np.ndarray:
    """[..., j]: sum of the first j of the last axis, shape (..., L + 1)."""
    sums = np.cumsum(np.asarray(values, dtype=float), axis=-1)
    return np.concatenate([np.zeros((*sums.shape[:-1], 1)), sums], axis=-1)


def imbalance(loads: Sequence[float] | np.ndarray) -> float:
    """Largest load over the mean load, less 1; 0 is perfectly even."""
    loads = np.asarray(loads, dtype=float)
    mean = loads.mean()
    return float(loads.max() / mean - 1.0) if mean > 0 else 0.0


def even_partition(layers: int, ranks: int) -> Partition:
    """The same number of layers on each rank, up to one. Raises PlanningError: fewer layers than ranks."""
    check_counts(layers, ranks)
    return Partition(bounds=tuple(layers * rank // ranks for rank in range(ranks + 1)))


def check_counts(layers: int, ranks: int) -> None:
    """Refuse fewer layers than ranks. Raises PlanningError: some rank would have no layer."""
    if ranks < 1 or layers < ranks:
        raise PlanningError(
            f"{layers} layers cannot be cut into {ranks} stages: each stage needs at least one layer"
        )


StageLoads = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""(rank, first layers k, end layers j), which broadcast -> load of layers k..j-1; infinite: no choice."""

ENDS_AT_ONCE = 64
"""Values of j in one array operation: larger arrays leave the processor's caches."""


@dataclasses.dataclass(frozen=True, slots=True)
class CutStep:
    """Stages of layers k..j-1 on a rank, K of ``first`` and J of ``ends``.

    ``before``: best value of the first k layers on the ranks before, (K,); ``loads``: of the stages, (J, K).
    """

    rank: int
    first: np.ndarray
    ends: np.ndarray
    before: np.ndarray
    loads: np.ndarray


def best_cuts(
    ranks: int, layers: int, loads: StageLoads, choose: Callable[[CutStep], tuple[np.ndarray, np.ndarray]]
) -> tuple[float, Partition]:
    """The best of all partitions, by dynamic programming: its value, infinite where there is none.

        best[r, j] = the chosen of f(best[r - 1, k], load of layers k..j-1 on rank r), k < j

    O(p L^2), vectorised over k and j. ``choose``: f by j and k, (J, K), and the index of each j's k, (J,).
    """
    best = np.array([0.0] + [np.inf] * layers)
    cuts = np.zeros((ranks, layers + 1), dtype=int)
    for rank in range(ranks):
        before, best = best, np.full(layers + 1, np.inf)
        last = layers - (ranks - 1 - rank)
        for begin in range(rank + 1 if rank < ranks - 1 else last, last + 1, ENDS_AT_ONCE):
            ends = np.arange(begin, min(begin + ENDS_AT_ONCE, last + 1))
            first = np.arange(rank, ends[-1] if rank else 1)
            here = np.where(first < ends[:, None], loads(rank, first, ends[:, None]), np.inf)
            value, chosen = choose(CutStep(rank, first, ends, before[first], here))
            best[ends], cuts[rank, ends] = value[np.arange(len(ends)), chosen], first[chosen]
    bounds = [layers]
    for cut in reversed(cuts):
        bounds.append(int(cut[bounds[-1]]))
    return float(best[-1]), Partition(bounds=tuple(reversed(bounds)))


def smallest_largest(step: CutStep) -> tuple[np.ndarray, np.ndarray]:
    """Choice for :func:`best_cuts`: the smallest largest load; of equal ones the first cut."""
    value = np.maximum(step.before, step.loads)
    return value, value.argmin(axis=1)


def moved_layers(before: Partition, after: Partition) -> tuple[int, ...]:
    """The layers whose rank changes; both partitions count ranks in the same numbering.

    Raises:
        PlanningError: the partitions are of different models.
    """
    if before.layers != after.layers:
        raise PlanningError(
            f"partitions of {before.layers} and of {after.layers} layers have no moves between"
        )
    return tuple(layer for layer in range(before.layers) if before.rank_of(layer) != after.rank_of(layer))
