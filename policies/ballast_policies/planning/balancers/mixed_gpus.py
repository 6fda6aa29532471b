"""Ranks of different GPU types: a layer may be 3 x faster on one type and 1.2 x on another.

The order of the ranks matters, too: a slow GPU serves best beside layers it is less slow at.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ballast_policies.planning.partition import Partition, PlanningError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Ranks in pipeline order, and the layers of each.

    Attributes:
        gpu_types: by rank.
        partition: layers to ranks.
        loads: seconds per step of each rank.
    """

    gpu_types: tuple[str, ...]
    partition: Partition
    loads: tuple[float, ...]


def partition_by_rank(rank_seconds: np.ndarray) -> Partition:
    """The contiguous partition whose largest load is smallest, seconds given for each rank and layer.

    d[r, j] = min over k of max(d[r - 1, k], sum of rank_seconds[r, k..j-1]).

    Args:
        rank_seconds: seconds of each layer on each rank, shape (p, L).

    Raises:
        PlanningError: fewer layers than ranks.
    """
    ranks, layers = rank_seconds.shape
    if layers < ranks:
        raise PlanningError(
            f"{layers} layers cannot be cut into {ranks} stages: each stage needs at least one layer"
        )
    best, bounds = np.concatenate([[0.0], np.full(layers, np.inf)]), []
    for rank in range(ranks):
        S = np.concatenate([[0.0], np.cumsum(rank_seconds[rank])])
        # value[j, k]: layers k..j-1 on this rank; only k < j is a stage.
        value = np.maximum(best[None, :], S[:, None] - S[None, :])
        value[np.triu_indices(layers + 1)] = np.inf
        bounds.append(np.argmin(value, axis=1))
        best = value.min(axis=1)
    cuts = [layers]
    for row in reversed(bounds):
        cuts.append(int(row[cuts[-1]]))
    return Partition(bounds=tuple(reversed(cuts)))


def arrange_ranks(
    seconds_by_type: Mapping[str, Sequence[float]],
    gpus: Mapping[str, int],
    *,
    most_orders: int = 2000,
) -> Arrangement:
    """The order of GPU types along the pipeline, and the cuts, with the smallest largest load.

    All distinct orders are tried where there are at most ``most_orders``; beyond, swaps of two
    ranks, best first, from three starting orders, until none helps.

    Args:
        seconds_by_type: GPU type -> seconds per step of each layer on it, shape (L,).
        gpus: GPU type -> how many ranks of it.
        most_orders: limit of the exhaustive search.

    Raises:
        PlanningError: a type without seconds, no GPU at all, or fewer layers than GPUs.
    """
    unknown = sorted(set(gpus) - set(seconds_by_type))
    if unknown:
        raise PlanningError(f"no layer seconds for GPU types {unknown}; known: {sorted(seconds_by_type)}")
    types = [gpu_type for gpu_type, count in sorted(gpus.items()) for _ in range(count)]
    if not types:
        raise PlanningError("no GPUs to arrange: give at least one of a type")

    def arranged(order: Sequence[str]) -> Arrangement:
        matrix = np.array([seconds_by_type[gpu_type] for gpu_type in order], dtype=float)
        partition = partition_by_rank(matrix)
        loads = [matrix[rank, a:b].sum() for rank, (a, b) in enumerate(_pairs(partition))]
        return Arrangement(gpu_types=tuple(order), partition=partition, loads=tuple(map(float, loads)))

    orders = _orders({gpu_type: types.count(gpu_type) for gpu_type in types})
    tried: list[Arrangement] = []
    for order in orders:
        if len(tried) == most_orders:
            return _swapped([types, types[::-1], _spread(types)], arranged)
        tried.append(arranged(order))
    return min(tried, key=_badness)


def _badness(arrangement: Arrangement) -> tuple[float, tuple[float, ...]]:
    # The second part is the fill of the pipeline; the third makes the answer unique.
    return max(arrangement.loads), (sum(arrangement.loads), *arrangement.loads)


def _swapped(
    starts: Sequence[Sequence[str]], arranged: Callable[[Sequence[str]], Arrangement]
) -> Arrangement:
    found = []
    for start in starts:
        best = arranged(start)
        while True:
            order = best.gpu_types
            swaps = [
                (*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :])
                for i in range(len(order))
                for j in range(i + 1, len(order))
                if order[i] != order[j]
            ]
            better = min((arranged(order) for order in swaps), key=_badness, default=best)
            if _badness(better) >= _badness(best):
                break
            best = better
        found.append(best)
    return min(found, key=_badness)


def _orders(counts: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Distinct orders of a multiset."""
    if not any(counts.values()):
        yield ()
        return
    for gpu_type, count in counts.items():
        if count:
            for rest in _orders({**counts, gpu_type: count - 1}):
                yield (gpu_type, *rest)


def _spread(types: Sequence[str]) -> list[str]:
    """Types in turn, as far as there are of each."""
    places = sorted(
        (index / types.count(gpu_type), gpu_type)
        for gpu_type in sorted(set(types))
        for index in range(types.count(gpu_type))
    )
    return [gpu_type for _, gpu_type in places]


def _pairs(partition: Partition) -> list[tuple[int, int]]:
    return list(zip(partition.bounds[:-1], partition.bounds[1:], strict=True))
