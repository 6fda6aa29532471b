"""Minimise makespan within a budget (dissertation section 6.4.3), as one exact LP.

    minimise_X,M  M      subject to  throughput(m, X) M >= num_steps_m            for every job m
                                     M sum_m cost(m, X) <= budget                 in all
                                     M cost(m, X) <= budget_m                     for jobs with a budget
                                     time and capacity (5.1)-(5.3)

The dissertation searches for M; with y = M X, the seconds on each column, everything is linear in (y, M).
Each job's cost is that of its steps: a job that would be done early pays no more for it.

A budget below what the steps cost where they are cheapest counts as that: nothing is cheaper, and no job is
left out. Without budgets it is ``makespan``. Weights do not enter. Objective: seconds until the last job
ends. The bound rests on the duals by weak duality, as in ``solvers.linear``.

Ties: jobs that need not be slower are speeded up on the types that they have, as far as these are idle,
which changes no cost.
"""

import dataclasses
import math

import highspy
import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.cost.min_cost import cheapest, usd_per_step
from ballast_policies.allocation.policies.makespan import objective
from ballast_policies.allocation.policy import Answer, nothing
from ballast_policies.allocation.solvers.simplex import SOLVER, SolverError, optimum, set_entries

__all__ = ["objective", "solve"]

SLACK = 1e-9
"""Relative: a budget is at least so much above the least cost, so that rounding leaves a solution."""

MOST_BUDGETS = 1e12
"""No job runs where its steps cost more than this many budgets: HiGHS takes no number above 1e15."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Limits:
    """USD that the steps of each job (n,), and of all together, may cost: at least what they must."""

    own: np.ndarray
    all: float


def _limits(instance: Instance, steps: np.ndarray, busy: np.ndarray) -> _Limits:
    # A budget and a cost of 0: HiGHS divides by it.
    least = np.zeros(len(steps))
    least[busy] = np.maximum(cheapest(instance)[busy] * steps[busy] * (1 + SLACK), 1e-300)
    own = np.where(np.isnan(instance.budgets), math.inf, np.maximum(instance.budgets, least))
    return _Limits(own=own, all=max(instance.budget, float(least.sum())))


def solve(instance: Instance) -> Answer:
    """Shares that finish the last job soonest within the budgets.

    Raises:
        SolverError: HiGHS ended without an optimum.
    """
    steps = np.where(instance.runnable, instance.steps(), 0.0)
    columns = instance.columns
    kept = np.flatnonzero((steps[columns.first] > 0) & ~columns.use(instance.capacity <= 0))
    busy = np.unique(columns.first[kept])
    if not len(busy):
        return nothing(instance)
    limits = _limits(instance, steps, busy)
    usd = steps[columns.first] * usd_per_step(instance)
    within = usd <= MOST_BUDGETS * np.minimum(limits.own[columns.first], limits.all)
    kept = kept[within[kept]]
    seconds, bound, shadow = _program(instance, steps, kept, busy, limits)
    x = np.zeros(len(columns))
    x[kept] = seconds / bound
    x = instance.feasible(x)
    return Answer(
        x=instance.feasible(_speeded_up(instance, x, busy)), solver=SOLVER, bound=bound, shadow_prices=shadow
    )


def _program(
    instance: Instance, steps: np.ndarray, kept: np.ndarray, busy: np.ndarray, limits: _Limits
) -> tuple[np.ndarray, float, np.ndarray]:
    """(seconds on each kept column, proven lower bound on the makespan, seconds saved by one GPU more)."""
    columns = instance.columns.take(kept)
    row = np.full(len(steps), -1)
    row[busy] = np.arange(len(busy))
    job, here, n, k, c = (
        row[columns.first],
        np.arange(len(kept)),
        len(busy),
        len(instance.capacity),
        len(kept),
    )
    fastest = np.zeros(n)
    np.maximum.at(fastest, job, columns.rate_first)
    alone = steps[busy] / fastest
    unit = float(alone.sum())
    # w = seconds / (the job's seconds alone on its fastest): of order one for every job, long or short.
    part = (alone / unit)[job]
    rate = columns.rate_first / fastest[job]
    usd = part * unit * columns.spending(instance.prices()) / 3600.0
    of_own, of_all = usd / limits.own[busy][job], usd / limits.all
    column, kind, gpus = columns.entries()
    # Rows: steps, time, GPUs, the budgets of jobs, the budget of all. Columns: w, the makespan in units.
    entries = [
        (job, here, rate),
        (n + job, here, part),
        (n + np.arange(n), np.full(n, c), np.full(n, -1.0)),
        (2 * n + kind, column, gpus * part[column]),
        (2 * n + np.arange(k), np.full(k, c), -instance.capacity),
        (2 * n + k + job, here, of_own),
        (np.full(c, 3 * n + k), here, of_all),
    ]
    lp, infinite = highspy.HighsLp(), highspy.kHighsInf
    lp.num_col_, lp.num_row_ = c + 1, 3 * n + k + 1
    lp.col_cost_ = np.append(np.zeros(c), 1.0)
    lp.col_lower_, lp.col_upper_ = np.zeros(c + 1), np.full(c + 1, infinite)
    lp.row_lower_ = np.concatenate([np.ones(n), np.full(2 * n + k + 1, -infinite)])
    lp.row_upper_ = np.concatenate([np.full(n, infinite), np.zeros(n + k), np.ones(n + 1)])
    set_entries(lp, *(np.concatenate(each) for each in zip(*entries, strict=True)))
    found = optimum(lp)
    if found is None:
        raise SolverError("makespan within a budget: HiGHS found no optimum")
    w, duals = found
    # Weak duality: any multipliers of the right sign give a bound, made feasible by mu and a scale.
    done, others = np.maximum(duals[:n], 0.0), np.maximum(-duals[n:], 0.0)
    prices, own, every = others[n : n + k], others[n + k : -1], float(others[-1])
    gain = done[job] * rate - part * columns.cost(prices) - own[job] * of_own - every * of_all
    mu = np.zeros(n)
    np.maximum.at(mu, job, gain / part)
    total = float(mu.sum() + prices @ instance.capacity)
    proven = (float(done.sum() - own.sum()) - every) / total if total > 0 else 0.0
    least = max(float(alone.max()) / unit, proven)
    shadow = prices * least / total * unit if total > 0 else np.zeros(k)
    return np.maximum(w[:-1], 0.0) * part * unit, least * unit, shadow


def _speeded_up(instance: Instance, x: np.ndarray, busy: np.ndarray) -> np.ndarray:
    """``x`` with each job's shares raised together, one after the other, slowest first, as GPUs are idle."""
    columns = instance.columns
    left = np.maximum(instance.capacity - instance.gpus_used(x), 0.0)
    time, speed = instance.time_used(x), instance.throughput(x)
    column, kind, gpus = columns.entries()
    order = np.argsort(columns.first[column], kind="stable")
    column, kind, gpus = column[order], kind[order], gpus[order]
    begin = np.searchsorted(columns.first[column], np.arange(len(time) + 1))
    x = x.copy()
    remaining = np.divide(instance.steps(), speed, out=np.zeros_like(speed), where=speed > 0)
    for m in sorted(busy.tolist(), key=lambda m: (-remaining[m], m)):
        entries = slice(begin[m], begin[m + 1])
        used = np.bincount(kind[entries], weights=gpus[entries] * x[column[entries]], minlength=len(left))
        if time[m] <= 0 or time[m] >= 1:
            continue
        takes = used > 0
        more = min(1.0 / time[m] - 1.0, float((left[takes] / used[takes]).min(initial=math.inf)))
        if more > 0 and math.isfinite(more):
            x[np.unique(column[entries])] *= 1.0 + more
            left = np.maximum(left - more * used, 0.0)
    return x
