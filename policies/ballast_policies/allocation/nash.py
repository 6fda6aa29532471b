"""Proportionally fair shares (Nash welfare), by Clarabel.

    maximise    sum_m w_m log throughput(m, x)
    subject to  time_m(x) <= 1, gpus_j(x) <= capacity_j, x >= 0

as a cone program: with u_m <= log v_m written (u_m, 1, v_m) in the exponential cone. Jobs that have no
column do not count. Speeds are taken relative to each job's fastest, which moves the objective by a
constant.
"""

import clarabel  # type: ignore[import-untyped]
import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.linear import SolverError


def nash_shares(problem: Instance) -> np.ndarray:
    """(columns,) the optimal shares; pairs are not supported.

    Raises:
        SolverError: Clarabel did not reach its optimum.
    """
    from scipy import sparse

    columns, k = problem.columns, len(problem.capacity)
    jobs, row = np.unique(columns.first, return_inverse=True)
    c, n = len(columns), len(jobs)
    here = np.arange(c)
    # Variables x (c), u (n). Rows: time (n), capacity (k), x >= 0 (c), then (u_m, 1, v_m) for each job.
    limits = sparse.coo_matrix(
        (
            np.concatenate([np.ones(c), columns.gpus, -np.ones(c)]),
            (np.concatenate([row, n + columns.kind, n + k + here]), np.concatenate([here, here, here])),
        ),
        shape=(n + k + c, c + n),
    )
    relative = columns.rate_first / problem.fastest[columns.first]
    cones = sparse.coo_matrix(
        (
            np.concatenate([-np.ones(n), -relative]),
            (np.concatenate([3 * np.arange(n), 3 * row + 2]), np.concatenate([c + np.arange(n), here])),
        ),
        shape=(3 * n, c + n),
    )
    right = np.concatenate([np.ones(n), problem.capacity, np.zeros(c), np.tile([0.0, 1.0, 0.0], n)])
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    solution = clarabel.DefaultSolver(
        sparse.csc_matrix((c + n, c + n)),
        np.concatenate([np.zeros(c), -problem.weights[jobs]]),
        sparse.vstack([limits, cones]).tocsc(),
        right,
        [clarabel.NonnegativeConeT(n + k + c), *([clarabel.ExponentialConeT()] * n)],
        settings,
    ).solve()
    if str(solution.status) not in ("Solved", "AlmostSolved"):
        raise SolverError(f"Clarabel ended with {solution.status}")
    return problem.feasible(np.array(solution.x)[:c])
