"""Among partitions that are good enough, the one for which the fewest bytes travel.

Notation as in ``partition``: m[r, i] is what moving layer i to rank r costs (its bytes, or 1; 0 where
it is there already), and limit the largest load allowed:

    d[r, j] = min over k of d[r - 1, k] + sum of m[r, k..j-1],  load of k..j-1 on r <= limit
"""

from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.partition import Partition, PlanningError, exact_partition


def nearest_partition(
    partition: Partition,
    seconds: Sequence[float],
    *,
    slack: float = 0.0,
    speeds: Sequence[float] | None = None,
    bytes: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    rank_bytes: Sequence[Sequence[float]] | None = None,
) -> Partition:
    """The partition within ``slack`` of the smallest possible largest load that moves the fewest bytes.

    Args:
        partition: the one in force.
        seconds: load of each layer, shape (L,).
        slack: relative excess over the optimum that is accepted, 0.02 is 2 %.
        speeds: relative speed of each rank.
        bytes: bytes of each layer; default: every layer counts the same.
        memory: bytes that each rank can hold.
        rank_bytes: what each layer takes on each rank, shape (p, L), if not ``bytes``.

    Raises:
        PlanningError: no partition fits the memory, or ``slack`` is negative.
    """
    if slack < 0:
        raise PlanningError(f"slack {slack} is negative: it is how much worse than optimal is accepted")
    ranks, layers = partition.ranks, partition.layers
    optimal = exact_partition(
        seconds, ranks, speeds=speeds, bytes=bytes, memory=memory, rank_bytes=rank_bytes
    )
    # A hair above, so that the optimum itself is never lost to rounding.
    limit = float(optimal.loads(seconds, speeds).max()) * (1 + slack) * (1 + 1e-12)
    S = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=float))])
    weight = np.ones(layers) if bytes is None else np.asarray(bytes, dtype=float)
    held = np.zeros((ranks, layers + 1))
    held[:, 1:] = np.cumsum(weight if rank_bytes is None else np.asarray(rank_bytes, dtype=float), axis=-1)
    best = np.full((ranks + 1, layers + 1), np.inf)
    cut = np.zeros((ranks + 1, layers + 1), dtype=int)
    best[0, 0] = 0.0
    for rank in range(1, ranks + 1):
        stays = np.zeros(layers, dtype=bool)
        stays[partition.bounds[rank - 1] : partition.bounds[rank]] = True
        M = np.concatenate([[0.0], np.cumsum(np.where(stays, 0.0, weight))])
        speed = 1.0 if speeds is None else speeds[rank - 1]
        cap = np.inf if memory is None else memory[rank - 1]
        for end in range(rank, layers - (ranks - rank) + 1):
            first = np.arange(rank - 1, end)
            value = best[rank - 1, first] + M[end] - M[first]
            taken = held[rank - 1, end] - held[rank - 1, first]
            value[((S[end] - S[first]) / speed > limit) | (taken > cap)] = np.inf
            k = int(np.argmin(value))
            best[rank, end], cut[rank, end] = value[k], first[k]
    bounds = [layers]
    for rank in range(ranks, 0, -1):
        bounds.append(int(cut[rank, bounds[-1]]))
    return Partition(bounds=tuple(reversed(bounds)))
