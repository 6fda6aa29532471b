"""Max-min fairness in dollars.

    maximise_X  min_m  throughput(m, X) c_m / w_m          within time and capacity (5.1)-(5.3)

c_m is what a step of job m costs where its steps are cheapest, in USD. So throughput(m, X) c_m is what the
job's progress is worth: the USD an hour that it would have to pay for the same progress on the GPUs that give
it most for its money. Jobs get equal worth, by weight: a job whose steps are dear on every GPU is not put
behind, as by steps per dollar, and a fast GPU counts only for what it saves. One LP. Jobs that can run
nowhere get nothing and do not count. Unit: USD an hour. Ties as in ``max_min_fairness``.
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.cost.min_cost import cheapest
from ballast_policies.allocation.policies.max_min_fairness import raise_least_level
from ballast_policies.allocation.policy import Answer, nothing
from ballast_policies.allocation.problem import ProblemError


def _usd_per_step(instance: Instance) -> np.ndarray:
    """(n,) c_m; 0 where the job cannot run. Raises ProblemError: a price is 0."""
    for gpu_type, price in instance.usd_per_hour.items():
        if price == 0:
            raise ProblemError(f"prices.{gpu_type}: 0, and the worth of steps needs a positive price")
    least = cheapest(instance)
    return np.where(np.isfinite(least), least, 0.0)


def solve(instance: Instance) -> Answer:
    """Shares that maximise the least worth. Raises ProblemError: a price is 0."""
    runs = instance.runnable
    if not runs.any():
        return nothing(instance)
    worth = _usd_per_step(instance) * 3600.0
    slope = np.divide(instance.weights, worth, out=np.zeros(len(runs)), where=runs & (worth > 0))
    return raise_least_level(instance, slope)


def objective(instance: Instance, x: np.ndarray) -> float:
    """The least worth by weight, in USD an hour; 0 where no job can run."""
    runs = instance.runnable
    if not runs.any():
        return 0.0
    worth = instance.throughput(x) * _usd_per_step(instance) * 3600.0 / instance.weights
    return float(worth[runs].min())
