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

Deadlines that fit together are found by prices. Prices p of the GPU types, worth 1 with all GPUs, prove
what does not fit. With c_m(p) the least price at which job m meets its demand, a set of jobs S fits if and
only if

    sum_{m in S} c_m(p) <= 1    for all such p >= 0                      (linear programming duality).

So a few known p tell which jobs the list would accept at most (``_accepted``). If these fit together, they
are the answer: each refused job is refused by a proof. If they do not, the least utilization that meets their
demands has prices of its own, which are one more p (Benders, "Partitioning procedures for solving
mixed-variables programming problems", Numerische Mathematik 4, 1962).
"""

import bisect
import dataclasses
from collections.abc import Callable

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.cost.min_cost import objective, on_cheapest_types
from ballast_policies.allocation.policy import Answer
from ballast_policies.allocation.solvers import linear
from ballast_policies.allocation.solvers.best_response import respond
from ballast_policies.allocation.solvers.dense_program import Rows, mostly_distinct
from ballast_policies.allocation.solvers.least_utilization import least_utilization
from ballast_policies.allocation.solvers.simplex import Program

__all__ = ["objective", "solve"]

FITS = 1e-9
"""Part of all GPUs by which demands may exceed them."""
ALMOST = 2e-6
"""Likewise of shares that are found: ``box_search`` breaks ties by changes of 1e-7."""
MAX_ROUNDS = 400
WIDE, NARROW = 0.3, 1e-3
"""Errors of the prices of the round before, the largest and the least, as a part of them."""


def admissible_demands(instance: Instance, demand: np.ndarray, order: np.ndarray) -> np.ndarray | None:
    """(n,) whether each job is accepted; pairs are not used.

    ``demand``: (n,) steps/s, within each job's full speed; ``order``: jobs (rows) to accept, in order.

    Returns:
        None where no answer was found.
    """
    if not len(order):
        return np.zeros(len(demand), dtype=bool)
    full = np.where(instance.top > 0, instance.top, 1.0)
    columns = instance.columns.take(instance.columns.second < 0)
    program = Program(
        columns=columns,
        value=np.zeros(len(columns)),
        base=demand / full,
        slope=np.zeros(len(full)),
        scale=1.0 / full,
        capacity=instance.capacity,
        gain=1.0,
        elastic=bool(instance.elastic.any()),
    )
    rows = program.rows()
    if rows is None:
        return None
    rows = rows.take(order, capacity=np.zeros(len(instance.capacity)), lift=instance.capacity)
    alike = not mostly_distinct(np.concatenate([rows.rates, rows.gpus[:, None]], axis=1))
    found = _fitting(rows, alike)
    if found is None:
        return None
    accepted = np.zeros(len(full), dtype=bool)
    accepted[order[found]] = True
    return accepted


def _fitting(rows: Rows, alike: bool) -> np.ndarray | None:
    """(n,) whether each row is accepted; ``lift`` are the GPUs of each type. None: not found."""
    size = rows.lift
    prices = 1.0 / max(float(size.sum()), 1.0) * np.ones(len(size))
    known = _costs(rows, prices)[None, :]
    part = WIDE
    for _ in range(MAX_ROUNDS):
        accepted = _accepted(known)
        mine = np.flatnonzero(accepted)
        if not len(mine):
            return accepted
        candidates = rows.take(mine, capacity=rows.capacity, lift=size)
        for coarse in (True, False):
            found = least_utilization(candidates, prices, part=part, alike=alike, coarse=coarse)
            if found is None or not float(found.prices @ size) > 0:
                return None
            after = found.prices / float(found.prices @ size)
            part = float(np.clip(np.abs((after - prices) * size).sum(), NARROW, WIDE))
            costs, prices = _costs(rows, after), after
            if float(costs[mine].sum()) > 1 + FITS:
                known = np.vstack([known, costs])
                break
        else:
            return accepted if found is not None and found.u <= 1 + ALMOST else None
    return None


def _costs(rows: Rows, prices: np.ndarray) -> np.ndarray:
    """(n,) the least price at which each job meets its demand."""
    at = respond(rows, prices, 0.0)
    costs: np.ndarray = np.maximum(at.level * at.demand - at.time, 0.0)
    return costs


def _accepted(known: np.ndarray) -> np.ndarray:
    """(n,) which jobs the list accepts if nothing but the costs ``known`` (prices, n) refuses any."""
    used, left = np.zeros(len(known)), np.arange(known.shape[1])
    accepted = np.zeros(len(left), dtype=bool)
    while len(left):
        # What does not fit beside those accepted so far will not fit later.
        left = left[(known[:, left] <= (1 + FITS - used)[:, None]).all(axis=0)]
        if not len(left):
            break
        total = used[:, None] + np.cumsum(known[:, left], axis=1)
        fits = (total <= 1 + FITS).all(axis=0)
        many = len(left) if fits.all() else int(fits.argmin())
        accepted[left[:many]] = True
        used = total[:, many - 1] if many else used
        left = left[many + 1 :]
    return accepted


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

    def is_too_many(count: int) -> bool:
        some = kept.copy()
        some[waiting[:count]] = True
        return attempt(some) is None

    while len(waiting):
        fits = bisect.bisect_left(range(1, len(waiting) + 1), True, key=is_too_many)
        kept[waiting[:fits]] = True
        waiting = waiting[fits + 1 :]
    return kept
