"""First in, first out, each on its fastest type (dissertation section 5.4.2).

    maximise_X  sum_m  gpus_m (M - m) throughput(m, X) / throughput(m, X_fastest)

with the M jobs counted m = 0, 1, ... in order of arrival (``elapsed``; equal ones as given).  The factor
gpus_m is the one that section 5.4.1 adds for gangs: without it, eight late jobs of one GPU would
push an early gang of eight aside; of an elastic job it is the size of its fastest configuration.
Weights do not enter.  Unit: 1.
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Answer
from ballast_policies.allocation.solvers import linear


def solve(instance: Instance) -> Answer:
    """Shares that serve the earliest jobs first."""
    solution = linear.maximise(instance, value=value_in_order(instance, instance.arrival_order()))
    return Answer(
        x=solution.x, solver=linear.SOLVER, bound=solution.bound, shadow_prices=solution.shadow_prices
    )


def objective(instance: Instance, x: np.ndarray) -> float:
    """The weighted sum of relative speeds."""
    return float(value_in_order(instance, instance.arrival_order()) @ x)


def value_in_order(instance: Instance, order: np.ndarray) -> np.ndarray:
    """(columns,) of the objective above, with the jobs counted in ``order``."""
    columns, fastest = instance.columns, np.where(instance.fastest > 0, instance.fastest, 1.0)
    place = np.empty(len(order))
    place[order] = len(order) - np.arange(len(order))
    value = place[columns.first] * columns.rate_first / fastest[columns.first]
    shared = columns.second >= 0
    value[shared] += (place[columns.second] * columns.rate_second / fastest[columns.second])[shared]
    value_of_columns: np.ndarray = instance.gpus[columns.first] * value
    return value_of_columns
