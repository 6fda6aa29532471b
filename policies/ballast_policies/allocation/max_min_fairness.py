"""Max-min fairness over unlike GPUs: Gavel's heterogeneity-aware LAS (dissertation section 5.4.1).

    maximise    t
    subject to  sum_j A[m, j] X[m, j] >= t               for every job m that can run
                sum_j X[m, j] <= 1                        for every job m
                sum_m gpus_m X[m, j] <= capacity_j        for every GPU type j
                X >= 0, and X[m, j] = 0 where job m cannot run on type j

with A[m, j] = gpus_m T[m, j] / (weight_m throughput_m(X_equal)).  One LP, solved by HiGHS; the gap
is the difference to the dual objective computed here from the row duals, so it does not rest on
the solver's own word.
"""

import time

import highspy
import numpy as np

from ballast_policies.allocation.problem import Allocation, Problem
from ballast_policies.allocation.result import (
    as_allocation,
    capacity_vector,
    normalised_rates,
    throughput_matrix,
)

NAME = "max-min-fairness"


def max_min_fairness(problem: Problem, *, time_limit_seconds: float = 60.0) -> Allocation:
    """Solve the LP exactly; jobs that can run nowhere get nothing and do not count in the minimum.

    Raises:
        RuntimeError: HiGHS ended without an optimal solution (its status is named).
    """
    started = time.perf_counter()
    A = normalised_rates(problem, throughput_matrix(problem))
    capacity = capacity_vector(problem)
    jobs, types = np.nonzero(A > 0)
    runnable = np.unique(jobs)
    X = np.zeros_like(A)
    if len(runnable) == 0:
        return as_allocation(
            problem, X, policy=NAME, objective=0.0, status="optimal", gap=0.0, solver="none", started=started
        )
    gangs = np.array([job.gpus for job in problem.jobs], dtype=float)
    solution, lower, upper = _solve(A, gangs, capacity, jobs, types, runnable, time_limit_seconds)
    X[jobs, types] = solution
    return as_allocation(
        problem,
        X,
        policy=NAME,
        objective=lower,
        status="optimal",
        gap=max(0.0, (upper - lower) / max(abs(upper), 1e-12)),
        solver=f"HiGHS {highspy.Highs().version()}",
        started=started,
    )


def _solve(
    A: np.ndarray,
    gangs: np.ndarray,
    capacity: np.ndarray,
    jobs: np.ndarray,
    types: np.ndarray,
    runnable: np.ndarray,
    time_limit_seconds: float,
) -> tuple[np.ndarray, float, float]:
    """Fractions of the columns (jobs[k], types[k]), the objective they reach, and a dual bound on it."""
    n, k, columns = len(runnable), len(capacity), len(jobs)
    row_of = np.full(len(A), -1)
    row_of[runnable] = np.arange(n)
    # Columns: X[jobs[c], types[c]] for c < columns, then t.  Rows: level (n), time (n), capacity (k).
    values = np.stack([A[jobs, types], np.ones(columns), gangs[jobs]], axis=1)
    rows = np.stack([row_of[jobs], n + row_of[jobs], 2 * n + types], axis=1)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns + 1, 2 * n + k
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_ = np.concatenate([np.zeros(columns), [1.0]])
    lp.col_lower_ = np.concatenate([np.zeros(columns), [-highspy.kHighsInf]])
    lp.col_upper_ = np.full(columns + 1, highspy.kHighsInf)
    lp.row_lower_ = np.concatenate([np.zeros(n), np.full(n + k, -highspy.kHighsInf)])
    lp.row_upper_ = np.concatenate([np.full(n, highspy.kHighsInf), np.ones(n), capacity])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate([3 * np.arange(columns + 1), [3 * columns + n]]).astype(np.int32)
    lp.a_matrix_.index_ = np.concatenate([rows.ravel(), np.arange(n)]).astype(np.int32)
    lp.a_matrix_.value_ = np.concatenate([values.ravel(), np.full(n, -1.0)])
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("time_limit", time_limit_seconds)
    highs.setOptionValue("threads", 1)
    highs.passModel(lp)
    highs.run()
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS ended with {highs.modelStatusToString(status)}")
    solution = highs.getSolution()
    X = np.clip(np.array(solution.col_value)[:columns], 0.0, 1.0)
    X = _make_feasible(X, gangs, capacity, jobs, types)
    reached = np.bincount(row_of[jobs], weights=A[jobs, types] * X, minlength=n).min()
    duals = np.abs(np.array(solution.row_dual))
    return X, float(reached), dual_bound(A[runnable], gangs[runnable], capacity, duals[:n], duals[2 * n :])


def _make_feasible(
    X: np.ndarray, gangs: np.ndarray, capacity: np.ndarray, jobs: np.ndarray, types: np.ndarray
) -> np.ndarray:
    """Scale away what the solver's tolerance lets a row exceed, so that the result obeys every limit."""
    used = np.bincount(types, weights=gangs[jobs] * X, minlength=len(capacity))
    X = X * np.minimum(1.0, np.divide(capacity, used, out=np.ones_like(capacity), where=used > 0))[types]
    time_used = np.bincount(jobs, weights=X, minlength=len(gangs))
    fair: np.ndarray = X / np.maximum(1.0, time_used)[jobs]
    return fair


def dual_bound(
    A: np.ndarray, gangs: np.ndarray, capacity: np.ndarray, level_duals: np.ndarray, prices: np.ndarray
) -> float:
    """Upper bound on t from any multipliers: weak duality, so it needs no trust in a solver.

    For lambda >= 0 with sum(lambda) = 1 and prices p >= 0,
    t <= sum_j p_j capacity_j + sum_m max(0, max_j (lambda_m A[m, j] - gpus_m p_j)).
    """
    total = level_duals.sum()
    if total <= 0:
        return float("inf")
    weights, prices = level_duals / total, prices / total
    surplus = (weights[:, None] * A - gangs[:, None] * prices[None, :]).max(axis=1)
    return float(prices @ capacity + np.maximum(surplus, 0.0).sum())
