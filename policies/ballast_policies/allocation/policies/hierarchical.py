"""Hierarchical policies: teams with weights, fairness or FIFO inside, several levels (section 5.4.3).

    maximise_X  min_{m: w_m^job > 0}  (1 / w_m^job) (gpus_m throughput(m, X) / throughput(m, X_equal) - t_m)

stage by stage as in ``water_levels``, with t_m the value of the stage before, throughputs never falling, and
w^job made from the teams' weights and policies among the jobs that can still rise (``teams``): a
team's weight is shared by its rising jobs in proportion to their own (fairness), or all goes to the
first (fifo). Jobs without an entity stand beside the entities. Objective: the least volume per weight
that a member of the root has, volume being the sum of its jobs' levels (without their weights).
"""

import numpy as np

from ballast_policies.allocation.fairness.teams import tree
from ballast_policies.allocation.fairness.water_levels import fill
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Answer


def solve(instance: Instance) -> Answer:
    """Shares that fill teams and jobs in turn."""
    return fill(instance, tree(instance)).answer


def objective(instance: Instance, x: np.ndarray) -> float:
    """The least volume per weight of the members of the root that have a job that can run."""
    return tree(instance).least(instance.level_scale * instance.throughput(x), instance.runnable)
