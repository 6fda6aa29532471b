"""Minimise makespan (dissertation section 5.4.2).

    minimise_X  max_m  num_steps_m / throughput(m, X)

as one exact LP: maximise t with throughput(m, X) >= num_steps_m t; the makespan is 1 / t, in seconds.
(No bisection, so no slack and no smallest makespan.)  Weights do not enter.  Jobs that can run
nowhere, and jobs with no steps left, do not count.  Ties as in ``max_min_fairness``.
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.max_min_fairness import fill_idle_capacity
from ballast_policies.allocation.policy import Answer, nothing
from ballast_policies.allocation.solvers import linear


def solve(instance: Instance) -> Answer:
    """Shares that finish the last job soonest."""
    slope = np.where(instance.runnable, instance.steps(), 0.0)
    if not (slope > 0).any():
        return nothing(instance)
    raised = linear.maximise(instance, slope=slope)
    return Answer(
        x=fill_idle_capacity(instance, raised.x, slope * raised.t, raised),
        solver=raised.solver,
        bound=1.0 / raised.bound,
        # d(1/t)/dC = -(1/t^2) dt/dC: seconds saved by one GPU more.
        shadow_prices=raised.shadow_prices / raised.t**2 if raised.t > 0 else None,
    )


def objective(instance: Instance, x: np.ndarray) -> float:
    """Seconds until the last job ends; 0 with nothing to do."""
    steps = np.where(instance.runnable, instance.steps(), 0.0)
    busy = steps > 0
    if not busy.any():
        return 0.0
    speed = instance.throughput(x)[busy]
    return float((steps[busy] / speed).max()) if (speed > 0).all() else float("inf")
