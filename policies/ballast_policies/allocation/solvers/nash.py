"""Proportionally fair shares (Nash welfare), by Clarabel.

    maximise    sum_m w_m log throughput(m, x)
    subject to  time_m(x) <= 1, gpus_j(x) <= capacity_j, x >= 0

as a cone program: with u_m <= log v_m written (u_m, 1, v_m) in the exponential cone. Jobs that have no
column do not count. Speeds are taken relative to each job's fastest, which moves the objective by a
constant.

The bound on the optimum is computed here from the prices p of the capacity rows, not taken from the
solver: by weak duality, for any p >= 0 and lambda > 0,

    sum_m w_m log v_m <= p . capacity + sum_m ( w_m log(w_m / lambda_m) - w_m
                                                + max(0, max_j lambda_m R_mj - gpus_m p_j) )

and the best lambda_m for given p, a convex function of one variable for each job, is found by halving.
"""

import dataclasses
from typing import Any

import clarabel  # type: ignore[import-untyped]
import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers.linear import SolverError

HALVINGS = 60
"""An interval of lambda is halved this often: to the last bits of a float."""

LONGEST_STEPS = (0.99, 0.9, 0.7)
"""Parts of the way to the border of the cones that Clarabel goes in one step; the next where it is stuck."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NashShares:
    """Proportionally fair shares.

    Attributes:
        x: (columns,) shares; every limit holds exactly.
        prices: (k,) multipliers of the capacities: increase of the sum of w log v per additional GPU.
    """

    x: np.ndarray
    prices: np.ndarray


def nash_shares(instance: Instance) -> NashShares:
    """The optimal shares; pairs are not supported.

    Raises:
        SolverError: Clarabel did not reach its optimum.
    """
    from scipy import sparse

    columns, k = instance.columns, len(instance.capacity)
    jobs, row = np.unique(columns.first, return_inverse=True)
    c, n = len(columns), len(jobs)
    here = np.arange(c)
    # Variables x (c), u (n). Rows: time (n), capacity (k), x >= 0 (c), then (u_m, 1, v_m) for each job.
    taking, kind, gpus = columns.entries()
    limits = sparse.coo_matrix(
        (
            np.concatenate([np.ones(c), gpus, -np.ones(c)]),
            (np.concatenate([row, n + kind, n + k + here]), np.concatenate([here, taking, here])),
        ),
        shape=(n + k + c, c + n),
    )
    relative = columns.rate_first / instance.fastest[columns.first]
    cones = sparse.coo_matrix(
        (
            np.concatenate([-np.ones(n), -relative]),
            (np.concatenate([3 * np.arange(n), 3 * row + 2]), np.concatenate([c + np.arange(n), here])),
        ),
        shape=(3 * n, c + n),
    )
    right = np.concatenate([np.ones(n), instance.capacity, np.zeros(c), np.tile([0.0, 1.0, 0.0], n)])
    unit = float(instance.weights[jobs].mean())
    loss = np.concatenate([np.zeros(c), -instance.weights[jobs] / unit])
    matrix = sparse.vstack([limits, cones]).tocsc()
    for longest in LONGEST_STEPS:
        solution = _solved(loss, matrix, right, longest, n)
        if str(solution.status) == "Solved":
            break
    if str(solution.status) not in ("Solved", "AlmostSolved"):
        raise SolverError(f"Clarabel ended with {solution.status}")
    return NashShares(
        x=instance.feasible(np.array(solution.x)[:c]),
        prices=np.maximum(np.array(solution.z)[n : n + k] * unit, 0.0),
    )


def _solved(loss: np.ndarray, matrix: Any, right: np.ndarray, longest: float, jobs: int) -> Any:
    """Clarabel's solution; the last rows of ``matrix`` are those of the ``jobs`` exponential cones."""
    from scipy import sparse

    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    settings.max_step_fraction = longest
    rows, width = matrix.shape
    cones = [clarabel.NonnegativeConeT(rows - 3 * jobs), *([clarabel.ExponentialConeT()] * jobs)]
    return clarabel.DefaultSolver(
        sparse.csc_matrix((width, width)), loss, matrix, right, cones, settings
    ).solve()


def gap_per_weight(instance: Instance, found: NashShares) -> float:
    """Proven distance of ``found.x`` to the optimum, in sum_m w_m log v_m per sum_m w_m.

    So the geometric mean of the speeds, weighted, is within this part of the largest possible.
    """
    runs, columns = instance.runnable, instance.columns
    weights = instance.weights[runs]
    relative = np.zeros((len(runs), int(columns.place.max(initial=0)) + 1))
    costs = np.zeros_like(relative)
    relative[columns.first, columns.place] = columns.rate_first / instance.fastest[columns.first]
    costs[columns.first, columns.place] = columns.cost(found.prices)
    bound = found.prices @ instance.capacity + _best_responses(relative[runs], weights, costs[runs])
    reached = instance.throughput(found.x)[runs] / instance.fastest[runs]
    value = weights @ np.log(reached)
    return max(0.0, float(bound - value)) / float(weights.sum())


def _best_responses(relative: np.ndarray, weights: np.ndarray, costs: np.ndarray) -> float:
    """Sum of the jobs' terms of the bound, each at its best lambda, for full time's ``costs`` (n, k)."""
    usable = relative > 0
    slowest = np.where(usable, relative, np.inf).min(axis=1)
    cheapest = np.where(usable, costs / np.where(usable, relative, 1.0), np.inf).min(axis=1)
    # Speed is at most 1, so lambda = w / v is at least w; from ``high`` on the term grows.
    low, high = weights.copy(), 2.0 * np.maximum(weights / slowest, cheapest)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        surplus = np.where(usable, middle[:, None] * relative - costs, -np.inf)
        best = surplus.argmax(axis=1)[:, None]
        speed = np.where(
            np.take_along_axis(surplus, best, 1) > 0, np.take_along_axis(relative, best, 1), 0.0
        )[:, 0]
        rising = speed > weights / middle
        low, high = np.where(rising, low, middle), np.where(rising, middle, high)
    surplus = np.where(usable, high[:, None] * relative - costs, 0.0)
    terms = weights * np.log(weights / high) - weights + np.maximum(surplus.max(axis=1), 0.0)
    return float(terms.sum())
