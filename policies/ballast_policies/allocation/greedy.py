"""The fallback when a solver fails or runs out of time: no LP, always an answer, in milliseconds.

Jobs in order of weight per GPU (then name) each take as much of one unit of time as is left, on
the type where they are fastest relative to their equal share.  Feasible, not optimal: its status
says ``greedy``.
"""

import time

import numpy as np

from ballast_policies.allocation.problem import Allocation, Problem
from ballast_policies.allocation.result import (
    as_allocation,
    capacity_vector,
    normalised_rates,
    throughput_matrix,
)


def greedy(problem: Problem) -> Allocation:
    """A feasible allocation by one pass over the jobs, O(jobs x types log types)."""
    started = time.perf_counter()
    A = normalised_rates(problem, throughput_matrix(problem))
    left = capacity_vector(problem)
    demand = sum(job.gpus for job in problem.jobs)
    # Under contention nobody takes more than the equal share of time, so that the last job gets something.
    share = min(1.0, left.sum() / demand) if demand else 1.0
    X = np.zeros_like(A)
    order = sorted(
        range(len(problem.jobs)),
        key=lambda m: (-problem.jobs[m].weight / problem.jobs[m].gpus, problem.jobs[m].name),
    )
    for m in order:
        budget = share
        for j in np.argsort(-A[m], kind="stable"):
            if A[m, j] <= 0 or budget <= 0:
                break
            fraction = min(budget, left[j] / problem.jobs[m].gpus)
            X[m, j] += fraction
            left[j] -= fraction * problem.jobs[m].gpus
            budget -= fraction
    runnable = (A > 0).any(axis=1)
    levels = (A * X).sum(axis=1)
    return as_allocation(
        problem,
        X,
        policy="greedy",
        objective=float(levels[runnable].min()) if runnable.any() else 0.0,
        status="greedy",
        gap=None,
        solver="greedy",
        started=started,
    )
