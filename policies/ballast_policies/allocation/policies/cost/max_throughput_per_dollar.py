"""Throughput per dollar, linear form (Gavel's reading of dissertation section 6.4.2).

    maximise_X  sum_m sum_j  T_mj / (gpus_m c_j)  X_mj     within time and capacity (5.1)-(5.3)

c_j is the price of one GPU of type j, and a gang pays for all of its GPUs.  A pair counts the steps of
both and pays once.  Not normalised: jobs with short steps win.  Unit: (steps/s) / (USD/h).
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Answer
from ballast_policies.allocation.problem import ProblemError
from ballast_policies.allocation.solvers import linear


def _value(instance: Instance) -> np.ndarray:
    columns, prices = instance.columns, instance.prices()
    for gpu_type, price in instance.usd_per_hour.items():
        if price == 0:
            raise ProblemError(f"prices.{gpu_type}: 0, and steps per dollar need a positive price")
    value: np.ndarray = (columns.rate_first + columns.rate_second) / columns.spending(prices)
    return value


def solve(instance: Instance) -> Answer:
    """Shares that maximise the sum of throughputs per dollar. Raises ProblemError: a price is 0."""
    solution = linear.maximise(instance, value=_value(instance))
    return Answer(
        x=solution.x, solver=linear.SOLVER, bound=solution.bound, shadow_prices=solution.shadow_prices
    )


def objective(instance: Instance, x: np.ndarray) -> float:
    """Sum of steps/s per USD/h."""
    return float(_value(instance) @ x)
