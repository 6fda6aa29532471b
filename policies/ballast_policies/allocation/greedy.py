"""Greedy allocation, the fallback when a solver fails or runs out of time; it takes milliseconds.

Jobs in order of weight per GPU (then name) each take as much of one unit of time as is left, on
the type or in the configuration where they are fastest.  Feasible, not optimal: its status
is ``greedy``.
"""

import time

import numpy as np

from ballast_policies.allocation.answer import Answer, as_allocation
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.policies.max_min_fairness import objective
from ballast_policies.allocation.problem import Allocation, Problem


def greedy(problem: Problem) -> Allocation:
    """A feasible allocation by one pass over the jobs and their types or configurations."""
    started = time.perf_counter()
    posed = instance(problem)
    left, columns = posed.capacity.copy(), posed.columns
    demand = posed.gpus.sum()
    # Under contention no job takes more than the equal share of time, so that the last job gets something.
    share = min(1.0, left.sum() / demand) if demand else 1.0
    x = np.zeros(len(columns))
    column, kind, gpus = columns.entries()
    by_column = np.argsort(column, kind="stable")
    kind, gpus = kind[by_column], gpus[by_column]
    begin = np.searchsorted(column[by_column], np.arange(len(columns) + 1))
    # Each job's columns, the fastest first.
    ranked = np.lexsort((-columns.rate_first, columns.first))
    of_job = np.searchsorted(columns.first[ranked], np.arange(len(problem.jobs) + 1))
    order = sorted(
        range(len(problem.jobs)),
        key=lambda m: (-problem.jobs[m].weight / posed.gpus[m], problem.jobs[m].name),
    )
    for m in order:
        budget = share
        for c in ranked[of_job[m] : of_job[m + 1]]:
            taken = slice(begin[c], begin[c + 1])
            fraction = min(budget, float((left[kind[taken]] / gpus[taken]).min()))
            x[c] = fraction
            left[kind[taken]] -= fraction * gpus[taken]
            budget -= fraction
            if budget <= 0:
                break
    x = posed.feasible(x)
    return as_allocation(
        posed,
        Answer(x=x, solver="greedy", status="greedy"),
        policy="greedy",
        objective=objective(posed, x),
        gap=None,
        seconds=time.perf_counter() - started,
    )
