"""Minimise cost subject to SLOs (dissertation section 6.4.3).

For the jobs S that have a deadline, an LP:

    minimise_X  sum_{m in S} deadline_m sum_j gpus_m c_j X_mj
    subject to  throughput(m, X) >= num_steps_m / deadline_m      for m in S
                time and capacity (5.1)-(5.3)

that is, the USD to finish them just in time (slower is never dearer per step, so no job is faster than
it must be). Then the other jobs share, as in ``min_cost``, the GPUs that are left.

Deadlines that cannot be met are listed, and only those are dropped: those that are past, or out of
reach on the fastest type, at once; of those that the cluster cannot keep together, taken in order of
deadline, each that does not fit with the ones kept before. Their jobs are treated as jobs without a deadline.
Objective: USD to finish all remaining steps, as in ``min_cost``.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from ballast_policies.allocation.answer import Answer
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.cost.min_cost import objective, on_cheapest_types
from ballast_policies.allocation.solvers import linear
from ballast_policies.allocation.solvers.admissible_demands import admissible_demands

__all__ = ["objective", "solve"]

WITHIN_REACH = 1e-9
"""Relative slack with which a deadline counts as within reach."""
ROUNDING = 3e-6
"""Part of a speed that may be missed where deadlines that fill the GPUs exactly would not fit by rounding."""


def solve(instance: Instance) -> Answer:
    """Shares that keep the deadlines at the least cost, then share the rest where it is cheapest."""
    deadlines, demand, lost = _demands(instance)
    cost = instance.columns.spending(instance.prices()) / 3600.0
    value = -cost * deadlines[instance.columns.first]
    kept, solution = _keep_what_fits(instance, demand, deadlines, value)
    late = lost | ((demand > 0) & ~kept)
    left = np.maximum(instance.capacity - instance.gpus_used(solution.x), 0.0)
    rest = dataclasses.replace(instance, capacity=left)
    x = solution.x + on_cheapest_types(rest, allowed=~kept)
    spent = -float(value @ solution.x)
    return Answer(
        x=instance.feasible(x),
        solver=linear.SOLVER,
        gap=max(0.0, (spent + solution.bound) / spent) if spent > 0 else 0.0,
        unmet_deadlines=tuple(instance.names[m] for m in np.flatnonzero(late).tolist()),
    )


def _demands(instance: Instance) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(n,) each: deadline in seconds (0: none), steps/s that keep it, whether it is lost already."""
    steps, until, fastest = instance.steps(), instance.deadlines, instance.fastest
    bound = ~np.isnan(until)
    busy = bound & (steps > 0)
    needed = np.divide(steps, until, out=np.full(len(steps), np.inf), where=busy & (until > 0))
    lost = busy & ~(needed <= fastest * (1 + WITHIN_REACH))
    kept = busy & ~lost
    deadlines = np.where(kept, until, 0.0)
    demand = np.where(kept, np.minimum(needed, fastest), 0.0)
    return deadlines, demand, lost


def _keep_what_fits(
    instance: Instance, demand: np.ndarray, deadlines: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, linear.LinearSolution]:
    """The jobs whose deadlines are kept, and the LP's solution for them."""

    def attempt(some: np.ndarray, of_demand: float = 1.0) -> linear.LinearSolution | None:
        # Jobs without a demand are left out: they would tie with idling wherever GPUs cost nothing.
        columns = some[instance.columns.first]
        part = dataclasses.replace(instance, columns=instance.columns.take(columns))
        try:
            found = linear.maximise(part, value=value[columns], base=demand * some * of_demand)
        except linear.InfeasibleError:
            return None
        x = np.zeros(len(columns))
        x[columns] = found.x
        return dataclasses.replace(found, x=x)

    waiting = np.flatnonzero(demand > 0)
    waiting = waiting[np.argsort(deadlines[waiting], kind="stable")]
    kept = admissible_demands(instance, demand, waiting)
    solution = None if kept is None else attempt(kept) or attempt(kept, 1 - ROUNDING)
    if kept is None or solution is None:
        kept = _one_by_one(waiting, attempt, len(demand))
        solution = attempt(kept)
    if solution is None:
        raise linear.SolverError("deadlines that fit one by one do not fit together")
    return kept, solution


def _one_by_one(
    waiting: np.ndarray, attempt: Callable[[np.ndarray], linear.LinearSolution | None], jobs: int
) -> np.ndarray:
    """(jobs,) as ``admissible_demands``, by linear programs: some log2(n) for each deadline that is left out.

    The longest run of deadlines that fits is found by bisection; the next one does not fit and is left out.
    """
    kept = np.zeros(jobs, dtype=bool)
    while len(waiting):
        fits, too_many = 0, len(waiting) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            some = kept.copy()
            some[waiting[:middle]] = True
            if attempt(some) is None:
                too_many = middle
            else:
                fits = middle
        kept[waiting[:fits]] = True
        waiting = waiting[fits + 1 :]
    return kept
