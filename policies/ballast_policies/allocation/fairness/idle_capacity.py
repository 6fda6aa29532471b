"""Leave no GPU idle that a job could use: the rule for ties of the fairness policies.

A max-min objective is silent on what happens above the minimum, and solvers differ in what they then
return.  The rule here: among the shares that keep every job's demand,

    maximise   sum_m  gpus_m throughput(m, X) / throughput(m, X_fastest)

that is, whole GPUs' worth of full speed.  It is an LP and its simplex vertex is the same for the same
input.  Where no GPU is left, nothing changes and nothing is solved.
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers import linear

IDLE = 1e-6
"""GPUs or fraction of time below which nothing worth handing out is left."""


def hand_out(problem: Instance, x: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """``x``, or better shares that still give every job ``demand`` (n,) steps/s to a relative 1e-9."""
    if not _usable(problem, x):
        return x
    value = worth(problem)
    more = linear.maximise(problem, value=value, base=demand * (1 - 1e-9), met_by=x)
    return more.x if value @ more.x > value @ x * (1 + IDLE) else x


def worth(problem: Instance) -> np.ndarray:
    """(columns,) GPUs' worth of full speed per unit of time on each column."""
    columns, fastest = problem.columns, np.where(problem.fastest > 0, problem.fastest, 1.0)
    value = columns.rate_first / fastest[columns.first]
    shared = columns.second >= 0
    value[shared] += (columns.rate_second / fastest[columns.second])[shared]
    worth: np.ndarray = columns.gpus * value
    return worth


def _usable(problem: Instance, x: np.ndarray) -> bool:
    """Whether an idle type could serve a job that is not at full speed already."""
    idle = problem.capacity - problem.gpus_used(x) > IDLE
    if not idle.any():
        return False
    slow = problem.throughput(x) < problem.fastest * (1 - IDLE)
    columns = problem.columns
    return bool((idle[columns.kind] & slow[columns.first]).any())
