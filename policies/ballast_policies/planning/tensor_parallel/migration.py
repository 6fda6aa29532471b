"""Lightweight migration: which columns of a straggler each helper computes (IV-A and IV-B).

The straggler broadcasts its migrated columns to the group; every helper works out its own share
without another message, and adds its results before the all-reduce that happens anyway.
"""

from math import ceil


def helper_columns(migrated: int, *, ranks: int, straggler: int, rank: int) -> range:
    """Which of the ``migrated`` columns ``rank`` computes.

    r' = (r + e - r_k) mod e in 1..e-1, m = ceil(L_mig / (e - 1)): columns m (r' - 1) to m r' - 1,
    clipped.  Empty for the straggler itself.

    Raises:
        ValueError: ranks outside the group, or a group of one, which has no helper.
    """
    if ranks < 2 or not (0 <= straggler < ranks and 0 <= rank < ranks):
        raise ValueError(f"rank {rank} and straggler {straggler} must be two of {ranks} ranks (at least 2)")
    position = (rank + ranks - straggler) % ranks
    if position == 0:
        return range(0)
    share = ceil(migrated / (ranks - 1))
    return range(min(migrated, share * (position - 1)), min(migrated, share * position))
