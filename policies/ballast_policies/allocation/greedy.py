"""Greedy allocation, the fallback when a solver fails or runs out of time; it takes milliseconds.

Jobs in order of weight per GPU (then name) each take as much of one unit of time as is left, on
the type where they are fastest relative to their equal share.  Feasible, not optimal: its status
is ``greedy``.
"""

import time

import numpy as np

from ballast_policies.allocation.answer import Answer, as_allocation
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.policies.max_min_fairness import objective
from ballast_policies.allocation.problem import Allocation, Problem


def greedy(problem: Problem) -> Allocation:
    """A feasible allocation by one pass over the jobs, O(jobs x types log types)."""
    started = time.perf_counter()
    posed = instance(problem)
    left = posed.capacity.copy()
    demand = posed.gpus.sum()
    # Under contention no job takes more than the equal share of time, so that the last job gets something.
    share = min(1.0, left.sum() / demand) if demand else 1.0
    X = np.zeros_like(posed.T)
    order = sorted(
        range(len(problem.jobs)),
        key=lambda m: (-problem.jobs[m].weight / problem.jobs[m].gpus, problem.jobs[m].name),
    )
    for m in order:
        budget = share
        for j in np.argsort(-posed.T[m], kind="stable"):
            if posed.T[m, j] <= 0 or budget <= 0:
                break
            fraction = min(budget, left[j] / posed.gpus[m])
            X[m, j] += fraction
            left[j] -= fraction * posed.gpus[m]
            budget -= fraction
    x = posed.feasible(X[posed.columns.first, posed.columns.kind])
    return as_allocation(
        posed,
        Answer(x=x, solver="greedy", status="greedy"),
        policy="greedy",
        objective=objective(posed, x),
        gap=None,
        seconds=time.perf_counter() - started,
    )
