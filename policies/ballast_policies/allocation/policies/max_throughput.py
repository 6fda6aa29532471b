"""Maximise total throughput (dissertation sections 5.3.1 and 6.4.1).

    maximise_X  sum_m throughput(m, X)      within time and capacity (5.1)-(5.3).

Not normalised: jobs with short steps win.  Weights do not enter.  Unit: steps per second.
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Answer
from ballast_policies.allocation.solvers import linear


def solve(instance: Instance) -> Answer:
    """Shares that maximise the sum of all throughputs."""
    columns = instance.columns
    solution = linear.maximise(instance, value=columns.rate_first + columns.rate_second)
    return Answer(
        x=solution.x, solver=linear.SOLVER, bound=solution.bound, shadow_prices=solution.shadow_prices
    )


def objective(instance: Instance, x: np.ndarray) -> float:
    """Steps per second of all jobs together."""
    return float(instance.throughput(x).sum())
