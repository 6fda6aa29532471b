"""The order of ranks on GPUs of different types.

A layer may be 3 x faster on one type and 1.2 x on another, so the order of the ranks matters too: a
slow GPU belongs where the layers lose least on it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ballast_policies.planning.balancers.exact import partition_by_rank
from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.rank_capacity import TakenBytes


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


def arrange_ranks(
    seconds_by_type: Mapping[str, Sequence[float]],
    gpus: Mapping[str, int],
    *,
    taken: TakenBytes | None = None,
    memory_by_type: Mapping[str, float] | None = None,
    most_orders: int = 2000,
) -> Arrangement:
    """The order of GPU types along the pipeline, and the cuts, with the smallest largest load.

    GPUs of a type follow each other, as the ranks of a gang in several pools do. All orders are tried where
    there are at most ``most_orders``; beyond, swaps of two types, best first, until none helps.

    Args:
        seconds_by_type: GPU type -> seconds per step of each layer on it, shape (L,).
        gpus: GPU type -> how many ranks of it.
        taken: bytes of layers at a place of the pipeline.
        memory_by_type: GPU type -> bytes that one holds; needs ``taken``.
        most_orders: limit of the exhaustive search.

    Raises:
        PlanningError: a type without seconds, no GPU at all, fewer layers than GPUs, or no order
            found whose memory is enough.
    """
    unknown = sorted(set(gpus) - set(seconds_by_type))
    if unknown:
        raise PlanningError(f"no layer seconds for GPU types {unknown}; known: {sorted(seconds_by_type)}")
    types = [gpu_type for gpu_type, count in sorted(gpus.items()) for _ in range(count)]
    if not types:
        raise PlanningError("no GPUs to arrange: give at least one of a type")
    layers = len(seconds_by_type[types[0]])
    if layers < len(types):
        raise PlanningError(f"{layers} layers cannot be cut into {len(types)} stages, one a GPU")

    def arranged(turns: Sequence[str]) -> Arrangement | None:
        order = [gpu_type for gpu_type in turns for _ in range(gpus[gpu_type])]
        matrix = np.array([seconds_by_type[gpu_type] for gpu_type in order], dtype=float)
        memory = None if memory_by_type is None else [memory_by_type[gpu_type] for gpu_type in order]
        try:
            partition = partition_by_rank(matrix, taken=taken, memory=memory)
        except PlanningError:
            return None
        loads = [matrix[rank, a:b].sum() for rank, (a, b) in enumerate(itertools.pairwise(partition.bounds))]
        return Arrangement(gpu_types=tuple(order), partition=partition, loads=tuple(map(float, loads)))

    starts = sorted(gpus), sorted(gpus, key=lambda gpu_type: sum(seconds_by_type[gpu_type]))
    tried = [
        arranged(order) for order in itertools.islice(itertools.permutations(starts[0]), most_orders + 1)
    ]
    if len(tried) > most_orders:
        tried = _swapped([*starts, *(start[::-1] for start in starts)], arranged)
    fitting = [arrangement for arrangement in tried if arrangement is not None]
    if not fitting:
        raise PlanningError(
            f"{layers} layers do not fit the memory of {len(types)} ranks in any order tried: "
            "use more ranks, fewer microbatches in flight, or ranks with more memory"
        )
    return min(fitting, key=_badness)


def _badness(arrangement: Arrangement | None) -> tuple[float, ...]:
    """The largest load, then the sum (which fills the pipeline), then a unique order; worst: no fit."""
    if arrangement is None:
        return (float("inf"),)
    return (max(arrangement.loads), sum(arrangement.loads), *arrangement.loads)


def _swapped(
    starts: Sequence[Sequence[str]], arranged: Callable[[Sequence[str]], Arrangement | None]
) -> list[Arrangement | None]:
    """Where swapping two types leads from each start."""
    found = []
    for start in starts:
        order, best = tuple(start), arranged(start)
        while True:
            swaps = {
                (*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :])
                for i in range(len(order))
                for j in range(i + 1, len(order))
            }
            scored = [(arranged(swap), swap) for swap in sorted(swaps)]
            better, next_order = min(scored, key=lambda pair: _badness(pair[0]), default=(None, order))
            if _badness(better) >= _badness(best):
                break
            order, best = next_order, better
        found.append(best)
    return found
