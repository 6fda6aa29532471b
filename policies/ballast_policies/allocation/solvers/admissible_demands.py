"""Which demands of an ordered list fit together: each in turn, if it fits with those accepted before it.

Prices p of the GPU types, worth 1 with all GPUs, prove what does not fit. With c_m(p) the least price at
which job m meets its demand, a set of jobs S fits if and only if

    sum_{m in S} c_m(p) <= 1    for all such p >= 0                      (linear programming duality).

So a few known p tell which jobs the list would accept at most (``_accepted``). If these fit together, they
are the answer: each refused job is refused by a proof. If they do not, the least utilization that meets their
demands has prices of its own, which are one more p (Benders, "Partitioning procedures for solving
mixed-variables programming problems", Numerische Mathematik 4, 1962).
"""

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers.best_response import respond
from ballast_policies.allocation.solvers.dense_program import Rows
from ballast_policies.allocation.solvers.job_classes import mostly_distinct
from ballast_policies.allocation.solvers.least_utilization import least_utilization
from ballast_policies.allocation.solvers.simplex import Program

FITS = 1e-9
"""Part of all GPUs by which demands may exceed them."""
ALMOST = 2e-6
"""Likewise of shares that are found: ``box_search`` breaks ties by changes of 1e-7."""
MAX_ROUNDS = 400
WIDE, NARROW = 0.3, 1e-3
"""How wrong the prices of the round before may be, at most and at least, as a part of them."""


def admissible_demands(instance: Instance, demand: np.ndarray, order: np.ndarray) -> np.ndarray | None:
    """(n,) whether each job is accepted; pairs are not used.

    Args:
        instance: the instance.
        demand: (n,) steps/s, within each job's full speed.
        order: jobs (rows) with a demand, the first to be accepted first.

    Returns:
        None where no answer was found.
    """
    if not len(order):
        return np.zeros(len(demand), dtype=bool)
    full = np.where(instance.top > 0, instance.top, 1.0)
    columns = instance.columns.take(instance.columns.second < 0)
    program = Program(
        columns=columns,
        time_first=np.ones(len(columns)),
        time_second=np.zeros(len(columns)),
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
