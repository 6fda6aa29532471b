"""Sizes of elastic gangs: every gang has its least size first, then GPUs that are left are shared out."""

from ballast_policies.rounds.sizes.changes import extra_nodes, kept_ranks, stays
from ballast_policies.rounds.sizes.settling import seconds_before_growth

__all__ = ["extra_nodes", "kept_ranks", "seconds_before_growth", "stays"]
