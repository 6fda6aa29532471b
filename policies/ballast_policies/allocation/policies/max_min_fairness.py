"""Max-min fairness over mixed GPUs: heterogeneity-aware LAS (dissertation section 5.4.1).

    maximise_X  min_m  gpus_m throughput(m, X) / (w_m throughput(m, X_equal))

over the shares X within time and capacity (5.1)-(5.3), as one LP: the level t that every job reaches.
w_m is the job's weight; X_equal gives every job capacity_j / sum(capacity) of its time on type j.
Jobs that can run nowhere get nothing and do not count in the minimum.  Unit: 1.

Ties: no GPU stays idle that a job could use. A max-min objective does not determine the levels above the
minimum, and solvers return different optima. So among the shares that meet every job's demand, those that

    maximise   sum_m  gpus_m throughput(m, X) / throughput(m, X_equal),

the sum of the levels without their weights. Its optimum is Pareto efficient: every job's throughput has a
positive worth. A job's worth on a type is its speed there relative to its average type, so that few jobs tie,
which keeps large programs easy (docs/decisions/0402). Where no GPU is idle that a job could use, nothing
changes and nothing is solved.
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Answer, nothing
from ballast_policies.allocation.solvers import linear
from ballast_policies.allocation.solvers.dense_program import dot


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


def raise_least_level(instance: Instance, slope: np.ndarray) -> Answer:
    """Maximise t with ``throughput(m, X) >= slope_m t``, as one LP; ties as above.

    ``slope``: (n,) steps/s of each job at level 1; 0: the job does not count.
    """
    raised = linear.maximise(instance, slope=slope)
    return Answer(
        x=fill_idle_capacity(instance, raised.x, slope * raised.t, raised),
        solver=raised.solver,
        bound=raised.bound,
        shadow_prices=raised.shadow_prices,
    )


IDLE = 1e-6
"""GPUs or fraction of time below which the rest is not distributed."""


def fill_idle_capacity(
    instance: Instance, x: np.ndarray, demand: np.ndarray, raised: linear.LinearSolution
) -> np.ndarray:
    """``x``, or better shares that still give every job ``demand`` (n,) steps/s to a relative 1e-9.

    ``raised``: the program that found the demanded speeds the largest possible.
    """
    speed = instance.throughput(x)
    if not _usable(instance, x, speed):
        return x
    # A solver takes smaller demands for none, and would leave a job with a second's work to wait for good.
    least = np.minimum(speed, linear.SMALLEST_SLOPE * instance.top)
    base = np.where(demand > 0, np.maximum(demand, least), 0.0) * (1 - 1e-9)
    value = normalized_throughput(instance)
    if instance.elastic.any() and (raised.level_duals[instance.runnable] > 0).all():
        # By complementary slackness no job can get more where every job has a multiplier.
        return x
    try:
        more = linear.maximise(
            instance, value=value, base=base, feasible_x=None if instance.elastic.any() else x
        ).x
    except linear.SolverError:
        # Infeasible by rounding only: x meets the demands to within 2e-9, and is optimal without this, too.
        return x
    return more if dot(value, more) > dot(value, x) * (1 + IDLE) else x


def normalized_throughput(instance: Instance) -> np.ndarray:
    """(columns,) gpus x steps/s / steps/s of the equal share, of all the jobs on each column."""
    columns, scale = instance.columns, instance.level_scale
    value: np.ndarray = scale[columns.first] * columns.rate_first
    shared = columns.second >= 0
    value[shared] += (scale[columns.second] * columns.rate_second)[shared]
    return value


def _usable(instance: Instance, x: np.ndarray, speed: np.ndarray) -> bool:
    """True if an idle type could serve a job whose ``speed`` (n,) is not its highest."""
    slow = speed < instance.fastest * (1 - IDLE)
    if instance.elastic.any():
        # GPUs in use may be idle as good as: a larger size than the job's speed needs.
        return bool(slow.any())
    idle = instance.capacity - instance.gpus_used(x) > IDLE
    columns = instance.columns
    return bool((idle[columns.kind] & slow[columns.first]).any())
