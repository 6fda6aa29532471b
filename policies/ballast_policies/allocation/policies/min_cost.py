"""Minimise total cost (dissertation section 6.4.2).

    maximise_X  sum_m  throughput(m, X) / cost(m, X),     cost(m, X) = sum_j gpus_m c_j X_mj

c_j is the price of one GPU of type j. A job's ratio does not change when its whole row of X is scaled,
and rows meet only in the capacities; so the exact optimum is known: every job runs on nothing but the
types where its steps are cheapest, for however little time. (The sum of ratios is not a
linear-fractional program; maximising one total ratio instead would run a single job.)

Ties: the amounts are open, so they are shared fairly: max-min fairness on those types, with levels as
in ``max_min_fairness``. Objective: USD to finish all remaining steps, each at the cost per step of the
job's shares.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.answer import Answer, nothing
from ballast_policies.allocation.fairness.raising import raise_demands
from ballast_policies.allocation.instance import Instance

SAME_COST = 1e-9
"""Relative difference of cost per step up to which two types are equally cheap."""


def cheapest(problem: Instance) -> np.ndarray:
    """(n,) USD per step on the cheapest type; infinite where the job cannot run."""
    with np.errstate(divide="ignore"):
        per_step = np.where(
            problem.T > 0, problem.gpus[:, None] * problem.prices() / 3600.0 / problem.T, np.inf
        )
    least: np.ndarray = per_step.min(axis=1, initial=np.inf)
    return least


def on_cheapest_types(problem: Instance, allowed: np.ndarray | None = None) -> np.ndarray:
    """(columns,) x: max-min fair shares on each job's cheapest types, for the jobs ``allowed`` (n,)."""
    columns, least = problem.columns, cheapest(problem)
    cost = columns.gpus * problem.prices()[columns.kind] / 3600.0 / columns.rate_first
    kept = (columns.second < 0) & (cost <= least[columns.first] * (1 + SAME_COST))
    if allowed is not None:
        kept &= allowed[columns.first]
    x = np.zeros(len(columns))
    wanted = problem.runnable & (np.bincount(columns.first[kept], minlength=len(least)) > 0)
    # A type without a GPU left carries nobody; who can only go there waits.
    kept &= problem.capacity[columns.kind] > 0
    wanted &= np.bincount(columns.first[kept], minlength=len(least)) > 0
    if not wanted.any():
        return x
    slope = np.divide(problem.weights, problem.level_scale, out=np.zeros(len(least)), where=wanted)
    part = dataclasses.replace(problem, columns=columns.take(kept))
    x[kept] = raise_demands(part, base=np.zeros(len(least)), slope=slope).x
    return x


def solve(problem: Instance) -> Answer:
    """Fair shares on each job's cheapest types."""
    if not problem.runnable.any():
        return nothing(problem)
    x = on_cheapest_types(problem)
    return Answer(x=x, solver="closed form and HiGHS", bound=_usd(problem, cheapest(problem)))


def objective(problem: Instance, x: np.ndarray) -> float:
    """USD to finish all remaining steps at the cost per step of ``x``; jobs without shares at their least."""
    columns, n = problem.columns, len(problem.gpus)
    spent = np.bincount(
        columns.first, weights=columns.gpus * problem.prices()[columns.kind] / 3600.0 * x, minlength=n
    )
    speed = problem.throughput(x)
    return _usd(problem, np.divide(spent, speed, out=cheapest(problem), where=speed > 0))


def _usd(problem: Instance, per_step: np.ndarray) -> float:
    runs = np.isfinite(per_step)
    return float(problem.steps()[runs] @ per_step[runs])
