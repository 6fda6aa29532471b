"""The least utilization that meets given demands, and the prices that prove it.

    minimise    u
    subject to  rates_m . x_m >= base_m,   sum_j x_mj <= 1             for every job m
                reserved_j + sum_m gpus_m x_mj <= size_j u                  for every type j
                x >= 0

as ``dense_program`` with t = -u: ``lift`` is the size, ``capacity`` is -reserved. Demands are met as given,
so that no job's full speed limits t, for any demands of the others. Jobs that are alike are one row
(gpus counted together); jobs that need all of their time on their fastest type have no choice and leave.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.best_response import in_units_of_t, respond
from ballast_policies.allocation.solvers.box_search import BoxSearch
from ballast_policies.allocation.solvers.dense_program import Rows, equal_rows

LP_JOBS = 400
SAME = 1e-12
FASTER = 1e-9
"""A job's fastest type is faster than the others by more than this part."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Utilization:
    """A solution.

    Attributes:
        X: (n, w) shares; only prices count where they are not asked for exactly.
        prices: (k,), worth 1 with all GPUs.
        u: the least utilization; about it where prices are about right.
    """

    X: np.ndarray
    prices: np.ndarray
    u: float


def least_utilization(
    rows: Rows, prices: np.ndarray, *, part: float, alike: bool, coarse: float = 0.0
) -> Utilization | None:
    """Solve the program from prices (k,) that are right to about ``part``.

    Args:
        rows: the program.
        prices: to start from; not all 0.
        part: how wrong they may be.
        alike: many jobs have the same speeds and gangs.
        coarse: prices to about this part will do; 0: exactly.

    Returns:
        None where no solution was found.
    """
    of, merged = classes(rows) if alike else (np.arange(len(rows)), rows)
    some, stay, X = _without_decided(merged)
    start = in_units_of_t(some, respond(some, prices, 0.0))
    start = dataclasses.replace(start, t=start.bound(some))
    found = BoxSearch(some).run(start, lp_jobs=LP_JOBS, part=part, coarse=coarse)
    if found is None:
        return None
    X[stay] = found.X
    u = -(respond(some, found.prices, 0.0).bound(some) if coarse else found.t)
    # All demands are fixed, so a unit of t takes nothing but GPUs.
    return Utilization(X=X[of], prices=found.prices / (found.prices @ rows.lift), u=u)


def _without_decided(rows: Rows) -> tuple[Rows, np.ndarray, np.ndarray]:
    """(rows that have a choice, where they are, (n, w) shares of the others)."""
    n, width = len(rows), rows.idle
    decided = rows.base >= rows.reach * (1 - SAME)
    # How many columns are as fast as the fastest, and the last of them.
    fast, fastest = np.zeros(n, dtype=np.intp), np.zeros(n, dtype=np.intp)
    for j in range(width):
        is_fast = rows.rates[:, j] >= rows.reach * (1 - FASTER)
        fast += is_fast
        np.maximum(fastest, j * is_fast, out=fastest)
    decided &= fast == 1
    gone, stay = np.flatnonzero(decided), np.flatnonzero(~decided)
    used = rows.used_by(gone, fastest[gone], np.ones(len(gone)))
    X = np.zeros((n, rows.idle))
    X[gone, fastest[gone]] = 1.0
    return rows.take(stay, capacity=rows.capacity - used, lift=rows.lift), stay, X


def classes(rows: Rows) -> tuple[np.ndarray, Rows]:
    """(class of each row, a row for each class) of rows that agree in rates, gangs and demands."""
    parts = [rows.rates, rows.gpus[:, None], rows.base[:, None]]
    if rows.use is not None:
        parts += [each.T for each in rows.use]
    of, chosen = equal_rows(np.concatenate(parts, axis=1))
    merged = rows.take(chosen, capacity=rows.capacity, lift=rows.lift)
    return of, merged.standing_for(np.bincount(of, minlength=len(chosen)).astype(float))
