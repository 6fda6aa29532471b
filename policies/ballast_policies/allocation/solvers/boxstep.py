"""Large programs of jobs alone, exactly, by the prices of GPU types: the boxstep method on samples.

Given prices (and t) each job's best answer is known (``best_response``), so k prices are to be found. They
lie in a box around the current ones. Inside the box most jobs' answers cannot change; the others are
*undecided*. A small LP over the undecided jobs, or a sample of them, with prices held to the box
(``crossover``), moves them to where they are best in the box (Marsten, Hogan and Blankenship, "The boxstep
method for large-scale optimization", Operations Research 23(3), 1975). The rounds of such steps are in
``box_search``. First prices come from a sample of 300 jobs, with very many jobs then from one of 5,000.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.best_response import (
    Response,
    balanced_prices,
    in_units_of_t,
    respond,
)
from ballast_policies.allocation.solvers.box_search import BoxSearch
from ballast_policies.allocation.solvers.crossover import CrossoverSolution, Priced, crossover
from ballast_policies.allocation.solvers.dense_program import Rows, stratified

FIRST_SAMPLE = 300
"""Jobs in the first LP, which has no prices to start from."""
FIRST_COLUMNS = 4000
"""Columns in it, of jobs with many configurations, where that leaves FEWEST jobs."""
FEWEST = 60
LP_JOBS = 400
"""Jobs in an LP of the rounds after it."""
COARSE_JOBS = 5000
"""Jobs in the second sample, where there are at least four times as many."""
COARSE = 0.01
"""Prices of that sample are found to this part."""
FIRST_BOX, COARSE_BOX = 0.3, 0.05
"""Half width of the first box, as a part of prices: after one sample, after two."""
PINNED_T_TOLERANCE = 0.1
"""A first t that is this close to the highest may turn out to be it."""
INFEASIBLE_TOLERANCE = 1e-9
"""Relative; a demand by more than this above a job's full speed cannot be met."""


def solve(rows: Rows) -> Priced | None:
    """The solution of the program; None where it has none, or none was found."""
    if (rows.base > rows.reach * (1 + INFEASIBLE_TOLERANCE)).any() and not (rows.slope > 0).any():
        return None
    prices, t = _sampled(rows)
    if t >= rows.highest * (1 - PINNED_T_TOLERANCE):
        found = _pinned(rows, _at(rows, prices, t))
        if found is not None:
            return found
    part = FIRST_BOX
    if len(rows) >= 4 * COARSE_JOBS:
        (prices, t), part = _coarse(rows, prices, t), COARSE_BOX
    return BoxSearch(rows).run(_at(rows, prices, t), lp_jobs=LP_JOBS, part=part)


def _at(rows: Rows, prices: np.ndarray, t: float) -> Response:
    return in_units_of_t(rows, respond(rows, prices, min(t, rows.highest)))


def _sampled(rows: Rows) -> tuple[np.ndarray, float]:
    """(prices (k,), t) of a small sample."""
    k = len(rows.capacity)
    found = _of_sample(rows)
    prices, t = (np.zeros(k), rows.highest) if found is None else (found.prices, found.t)
    if rows.gain and not prices.any():
        # One job alone limits t: find the prices that show whether all others fit.
        found = _of_sample(_at_highest(rows))
        prices, t = (np.ones(k) if found is None else found.prices), rows.highest
    return prices, t


def _drawn(rows: Rows, most: int) -> tuple[np.ndarray, np.ndarray]:
    return stratified(rows.gpus, np.zeros(len(rows), dtype=np.intp), np.arange(len(rows)), most)


def _of_sample(rows: Rows) -> CrossoverSolution | None:
    """The program of a sample of all jobs."""
    k = len(rows.capacity)
    chosen, weight = _drawn(rows, min(FIRST_SAMPLE, max(FEWEST, FIRST_COLUMNS // max(1, rows.idle))))
    active = rows.usable[chosen]
    active[:, rows.idle] = False
    walls = None
    if rows.value is not None:
        dearest = 100.0 * float((rows.value.max(axis=1) / rows.gpus).max())
        walls = (np.zeros(k), np.full(k, dearest))
    return crossover(rows, chosen, active, weight=weight, walls=walls)


def _coarse(rows: Rows, prices: np.ndarray, t: float) -> tuple[np.ndarray, float]:
    """(prices (k,), t) of a sample of some thousand jobs, from those of a small one."""
    chosen, weight = _drawn(rows, COARSE_JOBS)
    some = rows.take(chosen, capacity=rows.capacity, lift=rows.lift)
    some = some.standing_for(weight)
    first = respond(some, prices, min(t, some.highest))
    found = BoxSearch(some).run(first, lp_jobs=LP_JOBS, part=FIRST_BOX, coarse=COARSE)
    return (prices, t) if found is None else (found.prices, found.t)


def _at_highest(rows: Rows) -> Rows:
    """All demands as they are at the highest t; the new t is the part of all GPUs that can be left over."""
    return dataclasses.replace(
        rows,
        base=rows.demand(rows.highest),
        slope=np.zeros(len(rows)),
        lift=rows.capacity.copy(),
        gain=1.0,
    )


def _pinned(rows: Rows, at: Response) -> Priced | None:
    """The solution where a single job's full speed limits t and the others fit beside it; else None."""
    highest = rows.highest
    if not np.isfinite(highest) or at.bound(rows) <= highest:
        return None
    fixed = _at_highest(rows)
    # The prices that leave the most GPUs of every type free are zero but for a few types, and answers to
    # those are arbitrary.
    alike = None
    if len(rows) >= 4 * COARSE_JOBS:
        alike = balanced_prices(fixed, np.zeros(len(fixed.capacity)), 0.0, 1.0)
    first = respond(fixed, at.prices if alike is None else alike, 0.0)
    found = BoxSearch(fixed).run(first, lp_jobs=LP_JOBS, part=FIRST_BOX, feasibility=True)
    if found is None:
        return None
    rising = rows.slope > 0
    room = np.where(rising, (rows.reach - rows.base) / np.where(rising, rows.slope, 1.0), np.inf)
    level = np.zeros(len(rows))
    level[room.argmin()] = 1.0 / rows.slope[room.argmin()]
    return Priced(
        X=found.X,
        level=level,
        time=level * rows.reach,
        prices=np.zeros(len(rows.capacity)),
        t=highest,
    )
