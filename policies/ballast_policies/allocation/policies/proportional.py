"""Proportional shares: every job divides its time over the types as the cluster is made up.

    X_mj = s capacity_j / sum(capacity), with the largest s <= 1 that fits the capacity;
    0 where job m cannot run on type j.

With s = 1 this is X_equal of section 5.4.1, which levels are measured by; more gangs than GPUs make s
smaller.  Unlike isolated shares, a gang gets as much time as a single-GPU job.  Nothing is optimised.
Objective: the least level, as in max-min fairness.
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.isolated import on_own_columns
from ballast_policies.allocation.policies.max_min_fairness import objective
from ballast_policies.allocation.policy import Answer

__all__ = ["objective", "solve"]


def solve(instance: Instance) -> Answer:
    """The proportional shares."""
    total = instance.capacity.sum()
    if total == 0:
        return on_own_columns(instance, np.zeros_like(instance.T))
    # Gangs that are larger than a type take nothing of it, so the limit is that of the fullest type.
    demand = (instance.gpus[:, None] * (instance.T > 0)).sum(axis=0) / total
    scale = 1.0 / max(1.0, float(demand.max(initial=0.0)))
    X = np.broadcast_to(scale * instance.capacity / total, instance.T.shape)
    return on_own_columns(instance, X)
