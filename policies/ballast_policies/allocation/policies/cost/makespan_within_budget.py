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

import math

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.cost.min_cost import cheapest
from ballast_policies.allocation.policies.makespan import objective
from ballast_policies.allocation.policy import Answer, nothing
from ballast_policies.allocation.solvers.simplex import SOLVER, SolverError

__all__ = ["objective", "solve"]

SLACK = 1e-9
"""Relative: a budget is at least so much above the least cost, so that rounding leaves a solution."""

MOST_BUDGETS = 1e12
"""No job runs where its steps cost more than this many budgets: HiGHS takes no number above 1e15."""


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
    kept = kept[_within_reach(instance, steps, busy)[kept]]
    seconds, bound, shadow = _program(instance, steps, kept, busy)
    x = np.zeros(len(columns))
    x[kept] = seconds / bound
    x = instance.feasible(x)
    return Answer(
        x=instance.feasible(_speeded_up(instance, x, busy)), solver=SOLVER, bound=bound, shadow_prices=shadow
    )


def _program(
    instance: Instance, steps: np.ndarray, kept: np.ndarray, busy: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray]:
    """(seconds on each kept column, proven lower bound on the makespan, seconds saved by one GPU more)."""
    from scipy import sparse
    from scipy.optimize import linprog

    columns = instance.columns.take(kept)
    row = np.full(len(steps), -1)
    row[busy] = np.arange(len(busy))
    job, here, n, k = row[columns.first], np.arange(len(kept)), len(busy), len(instance.capacity)
    alone = steps[busy] / instance.fastest[busy]
    unit = float(alone.sum())
    # w = seconds / (the job's seconds alone on its fastest): of order one for every job, long or short.
    part = (alone / unit)[job]
    rate = columns.rate_first / instance.fastest[columns.first]
    cost = part * unit * columns.spending(instance.prices()) / 3600.0
    limits, owner = _limits(instance, steps, busy)
    finish = sparse.csr_array((-rate, (job, here)), shape=(n, len(here)))
    time = sparse.csr_array((part, (job, here)), shape=(n, len(here)))
    column, kind, gpus = columns.entries()
    use = sparse.csr_array((gpus * part[column], (kind, column)), shape=(k, len(here)))
    spends = [sparse.csr_array((cost * ((owner_of < 0) | (job == owner_of)))[None, :]) for owner_of in owner]
    spend = sparse.vstack([*spends, sparse.csr_array((0, len(here)))], format="csr")
    scale = np.maximum(limits, 1e-300)
    spend = sparse.csr_array(spend.multiply((1.0 / scale)[:, None])) if len(limits) else spend
    last = np.concatenate([np.zeros(n), -np.ones(n), -instance.capacity, np.zeros(len(limits))])
    matrix = sparse.hstack(
        [sparse.vstack([finish, time, use, spend]), sparse.csr_array(last[:, None])], format="csr"
    )
    right = np.concatenate([-np.ones(n), np.zeros(n + k), np.ones(len(limits))])
    goal = np.append(np.zeros(len(here)), 1.0)
    found = linprog(goal, A_ub=matrix, b_ub=right, method="highs")
    if found.x is None or found.status != 0:
        raise SolverError(f"makespan within a budget: {found.message}")
    # Weak duality: any multipliers of the right sign give a bound, made feasible by mu and a scale.
    duals = np.maximum(-found.ineqlin.marginals, 0.0)
    done, prices, dear = duals[:n], duals[2 * n : 2 * n + k], duals[2 * n + k :]
    gain = done[job] * rate - use.T @ prices - spend.T @ dear
    mu = np.zeros(n)
    np.maximum.at(mu, job, gain / part)
    total = float(mu.sum() + prices @ instance.capacity)
    least = float(max(alone.max() / unit, (done.sum() - dear.sum()) / total if total > 0 else 0.0))
    shadow = prices * least / total * unit if total > 0 else np.zeros(k)
    return np.maximum(found.x[:-1], 0.0) * part * unit, least * unit, shadow


def _within_reach(instance: Instance, steps: np.ndarray, busy: np.ndarray) -> np.ndarray:
    """(columns,) whether all of the job's steps cost at most MOST_BUDGETS of each budget there."""
    columns = instance.columns
    usd = steps[columns.first] * columns.spending(instance.prices()) / 3600.0 / columns.rate_first
    most = np.full(len(steps), np.inf)
    for limit, owner in zip(*_limits(instance, steps, busy), strict=True):
        jobs = busy if owner < 0 else busy[owner]
        most[jobs] = np.minimum(most[jobs], limit)
    within: np.ndarray = usd <= MOST_BUDGETS * most[columns.first]
    return within


def _limits(instance: Instance, steps: np.ndarray, busy: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """(USD of each budget that there is, whose it is: position in ``busy``, or -1 for that of all)."""
    least = cheapest(instance)[busy] * steps[busy]
    limits, owner = [], []
    own = instance.budgets[busy]
    for place in np.flatnonzero(~np.isnan(own)).tolist():
        limits.append(max(float(own[place]), float(least[place]) * (1 + SLACK)))
        owner.append(place)
    if math.isfinite(instance.budget):
        limits.append(max(instance.budget, float(least.sum()) * (1 + SLACK)))
        owner.append(-1)
    return np.array(limits), owner


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
