"""Shortest job first (dissertation section 5.4.2).

    minimise_X  min_m  num_steps_m / throughput(m, X)

The minimum is reached by giving the job with the least num_steps_m / throughput(m, X_fastest) all of its
time on its fastest type, and does not determine the others' shares.  Ties: among those shares, the others
are served as by FIFO with the jobs in order of that length (equal ones in order of arrival).
Unit: seconds.
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.fifo import value_in_order
from ballast_policies.allocation.policy import Answer, nothing
from ballast_policies.allocation.solvers import linear


def _lengths(instance: Instance) -> np.ndarray:
    """(n,) seconds to the end at full speed; infinite where the job cannot run or has nothing to do."""
    steps, top = instance.steps(), instance.top
    lengths = np.full(len(steps), np.inf)
    np.divide(steps, top, out=lengths, where=(top > 0) & (steps > 0))
    return lengths


def solve(instance: Instance) -> Answer:
    """Shares that finish the shortest job soonest, then serve the others in order of length."""
    lengths = _lengths(instance)
    if not np.isfinite(lengths).any():
        return nothing(instance)
    arrival = instance.arrival_order()
    order = arrival[np.argsort(lengths[arrival], kind="stable")]
    value = value_in_order(instance, order)
    solution = linear.maximise(instance, value=value + _precedence(instance, value, int(order[0])))
    return Answer(x=solution.x, solver=linear.SOLVER, bound=float(lengths[order[0]]))


def _precedence(instance: Instance, value: np.ndarray, job: int) -> np.ndarray:
    """(columns,) worth to add so that ``job`` runs at its full speed, before all others."""
    columns = instance.columns
    # A GPU's price is at most the largest value per GPU of any column, a job's time at most its best column.
    column, _, gpus = columns.entries()
    enough = 2.0 * (instance.gpus[job] * float((value[column] / gpus).max()) + float(value.max()))
    rate = np.where(columns.first == job, columns.rate_first, 0.0)
    rate = np.where(columns.second == job, columns.rate_second, rate)
    added: np.ndarray = np.where(rate >= instance.top[job] * (1 - 1e-12), enough, 0.0)
    return added


def objective(instance: Instance, x: np.ndarray) -> float:
    """Seconds until the first job ends; 0 with nothing to do."""
    lengths = _lengths(instance)
    busy = np.isfinite(lengths)
    if not busy.any():
        return 0.0
    speed, steps = instance.throughput(x)[busy], instance.steps()[busy]
    return float(np.divide(steps, speed, out=np.full(len(steps), np.inf), where=speed > 0).min())
