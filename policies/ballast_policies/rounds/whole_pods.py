"""Pods with several GPUs: claims that a pool has the GPUs for, but no node enough of them together."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ballast_policies.rounds.selection import Claims


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unplaced:
    """A gang whose pods found no nodes in a pool.

    Attributes:
        job: its index.
        pool: index of the pool.
        gpus: size of the gang.
        gpus_per_pod: GPUs of each of its pods.
        barred: taints of nodes on which it must not be started.
    """

    job: int
    pool: int
    gpus: int
    gpus_per_pod: int
    barred: frozenset[str]


def without_room(
    claims: Claims,
    stays: np.ndarray,
    names: Sequence[str],
    unplaced: Sequence[Unplaced],
    gpus_per_pod: Mapping[str, int],
    not_tolerated: Mapping[str, frozenset[str]],
) -> np.ndarray:
    """(C,) claims that find no nodes, since a gang that is no harder to place has found none in the pool.

    Args:
        claims: of the round.
        stays: (C,) whether the job runs in that pool now: it has its nodes.
        names: job index -> name.
        unplaced: gangs that found no nodes.
        gpus_per_pod: job -> GPUs of each of its pods, where it is not 1.
        not_tolerated: job -> taints of nodes on which it must not be started.
    """
    per_pod = np.array([gpus_per_pod.get(name, 1) for name in names], dtype=np.int64)
    found = np.zeros(len(claims), dtype=bool)
    for gang in unplaced:
        harder = per_pod >= gang.gpus_per_pod
        if gang.barred:
            # As few nodes as this gang may use, or fewer.
            harder &= np.array([gang.barred <= not_tolerated.get(name, frozenset()) for name in names])
        as_hard = harder[claims.job] & (claims.gpus >= gang.gpus) & ~stays
        found |= (claims.column == gang.pool) & (as_hard | (claims.job == gang.job))
    return found
