"""Max-min fairness over mixed GPUs: heterogeneity-aware LAS (dissertation section 5.4.1).

    maximise_X  min_m  gpus_m throughput(m, X) / (w_m throughput(m, X_equal))

over the shares X within time and capacity (5.1)-(5.3), as one LP: the level t that every job reaches.
w_m is the job's weight; X_equal gives every job capacity_j / sum(capacity) of its time on type j.
Jobs that can run nowhere get nothing and do not count in the minimum.  Unit: 1.

Ties: GPUs that are idle at these levels go where they add most to the sum of the levels, without weights
(``idle_capacity``).
"""

import numpy as np

from ballast_policies.allocation.fairness.idle_capacity import raise_least_level
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Answer, nothing


def solve(instance: Instance) -> Answer:
    """Shares that maximise the least level."""
    runs = instance.runnable
    if not runs.any():
        return nothing(instance)
    slope = np.divide(instance.weights, instance.level_scale, out=np.zeros(len(runs)), where=runs)
    return raise_least_level(instance, slope)


def objective(instance: Instance, x: np.ndarray) -> float:
    """The least level; 0 where no job can run."""
    runs = instance.runnable
    return float(instance.levels(instance.throughput(x))[runs].min()) if runs.any() else 0.0
