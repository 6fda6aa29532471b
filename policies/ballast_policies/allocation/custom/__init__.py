"""Policies that users write: an objective and constraints in cvxpy, over shares and throughputs."""

from ballast_policies.allocation.custom.cluster import ClusterView
from ballast_policies.allocation.custom.function import own_policy

__all__ = ["ClusterView", "own_policy"]
