"""Lightweight migration: the columns of a straggler that each helper computes (IV-A and IV-B).

The straggler broadcasts its migrated columns to the group; every helper determines its own share
without another message, and adds its results before the all-reduce, which is needed in any case.
"""

from collections.abc import Collection
from math import ceil


def helper_columns(
    migrated: int, *, ranks: int, straggler: int, rank: int, migrating: Collection[int] = ()
) -> range:
    """Which of the ``migrated`` columns ``rank`` computes.

    r' = (r + e - r_k) mod e in 1..e-1, m = ceil(L_mig / (e - 1)): columns m (r' - 1) to m r' - 1,
    clipped.  Empty for the straggler itself.  Where several ranks migrate they do not help each other:
    r' then counts the e - x helpers alone, and m = ceil(L_mig / (e - x)), as in equation 3.

    Args:
        migrated: L_mig.
        ranks: e.
        straggler: r_k.
        rank: r.
        migrating: all ranks that migrate, with or without ``straggler``.

    Raises:
        ValueError: ranks outside the group, or a group without a rank that can help.
    """
    if ranks < 2 or not (0 <= straggler < ranks and 0 <= rank < ranks):
        raise ValueError(f"rank {rank} and straggler {straggler} must be two of {ranks} ranks (at least 2)")
    absent = {straggler, *migrating}
    positions = [p for p in range(1, ranks) if (straggler + p) % ranks not in absent]
    if not positions:
        raise ValueError(f"all of {ranks} ranks migrate: none is left to help")
    if rank in absent:
        return range(0)
    helper = positions.index((rank + ranks - straggler) % ranks)
    share = ceil(migrated / len(positions))
    return range(min(migrated, share * helper), min(migrated, share * (helper + 1)))
