"""A policy of your own: urgent jobs count for more, and each job gets half of its equal share.

    ballast allocate --policy deadline_first:deadline_first --input jobs.json

in this folder.  How a cluster uses it: docs/policy-of-your-own.md.
"""

from typing import Any

import cvxpy as cp
import numpy as np
from ballast_policies.allocation.custom import ClusterView


def deadline_first(cluster: ClusterView) -> Any:
    """Maximise progress weighted by urgency; no job is below half of its equal share."""
    fastest = cluster.speeds.max(axis=1)
    needed = cluster.steps_remaining / np.maximum(cluster.deadlines, 60.0)  # steps/s, 0 without a deadline
    urgency = 1.0 + 4.0 * np.minimum(1.0, needed / fastest)
    share = min(1.0, cluster.capacity.sum() / cluster.gpus.sum())
    enough = cluster.throughput >= 0.5 * share * cluster.equal
    return cp.Maximize((urgency / fastest) @ cluster.throughput), [enough]
