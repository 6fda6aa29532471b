"""Large programs of jobs alone, exactly: prices first, then the few jobs that they leave open.

1. A sample of the jobs, with its part of the GPUs, gives prices to within some per cent (an LP by HiGHS).
2. Newton's steps make them nearly exact for all jobs (``price_steps``).
3. A small LP over the jobs that are close to a tie gives the exact optimum and prices (``crossing``), which
   the bound at those prices proves; where it does not, more jobs enter the LP, in the end all of them.

A solution's prices start the next one: after an arrival or departure step 3 alone is enough, mostly.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.best_response import Response, bound_of, respond
from ballast_policies.allocation.solvers.crossover import Crossed, cross
from ballast_policies.allocation.solvers.dense_program import Rows
from ballast_policies.allocation.solvers.newton import improve, in_units_of_t
from ballast_policies.allocation.start import Start

SAMPLE = 200
SEED = 0
FEWEST, PART = 120, 200
"""The LP has this many jobs at least, and one in so many at first."""
AFTER = 40
"""So many where prices of a similar program are at hand."""
MORE = 3
"""It grows by this factor where it did not do."""
NEARLY = 0.1
"""A first t that is this close to the highest may turn out to be it."""
BEYOND = 1e-9
"""Relative; a demand by more than this above a job's full speed cannot be met."""
ENOUGH = 1e-10
"""Relative gap at which one stops."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """Solution of a large program.

    Attributes:
        X: (n, k) shares.
        level, time: (n,) multipliers of demand and time.
        prices: (k,) multipliers of the capacities.
        start: for the next program that is like this one.
    """

    X: np.ndarray
    level: np.ndarray
    time: np.ndarray
    prices: np.ndarray
    start: Start


def solve(rows: Rows, *, start: Start | None = None) -> Priced | None:
    """Solve the program.

    Args:
        rows: the program.
        start: of the solution of a similar one.

    Returns:
        None where it has no solution.
    """
    if (rows.base > rows.reach * (1 + BEYOND)).any() and not (rows.slope > 0).any():
        return None
    at = _sampled(rows) if start is None else _at(rows, np.array(start.prices), start.t)
    if at.t >= rows.highest * (1 - NEARLY):
        found = _pinned(rows, at)
        if found is not None:
            return found
    if start is None:
        at = _improved(rows, at)
    return _pinned(rows, at) or _exact(rows, at, _first(rows) if start is None else AFTER)


def _at(rows: Rows, prices: np.ndarray, t: float) -> Response:
    return in_units_of_t(rows, respond(rows, prices, min(t, rows.highest)))


def _first(rows: Rows) -> int:
    return max(FEWEST, len(rows) // PART)


def _improved(rows: Rows, at: Response) -> Response:
    return improve(rows, at, enough=_first(rows) // 3)


def _sampled(rows: Rows) -> Response:
    """A response at the prices of a sample."""
    n, k = len(rows), len(rows.capacity)
    index = np.sort(np.random.default_rng(SEED).permutation(n)[:SAMPLE])
    some = rows.sample(index)
    walls = None
    if rows.value is not None:
        dearest = 100.0 * float((some.value.max(axis=1) / some.gpus).max())  # type: ignore[union-attr]
        walls = (np.zeros(k), np.full(k, dearest))
    found = cross(some, respond(some, np.ones(k), 0.0), len(some), walls=walls)
    prices, t = (np.zeros(k), rows.highest) if found is None else (found.prices, found.t)
    if rows.gain and not prices.any():
        # One job alone limits t. The prices that tell whether all others fit, then.
        some = _at_highest(rows).sample(index)
        found = cross(some, respond(some, np.ones(k), 0.0), len(some))
        prices, t = (np.ones(k) if found is None else found.prices), rows.highest
    return _at(rows, prices, t)


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
    if not np.isfinite(highest) or at.bound(rows) <= highest * (1 + ENOUGH):
        return None
    fixed = _at_highest(rows)
    response = respond(fixed, at.prices, 0.0)

    def fits(response: Response) -> bool:
        return bool((response.used(rows.gpus) <= rows.capacity).all())

    def decided(response: Response) -> bool:
        return fits(response) or response.bound(fixed) < 0

    if not fits(response):
        response = improve(fixed, _at(fixed, at.prices, 0.0), enough=FEWEST // 3, until=decided)
    if fits(response):
        X = _shares(response, len(rows.capacity))
    elif response.bound(fixed) < 0:
        return None
    else:
        found = _exact(fixed, response, _first(rows))
        if found is None or found.start.t < 0:
            return None
        X = found.X
    rising = rows.slope > 0
    room = np.where(rising, (rows.reach - rows.base) / np.where(rising, rows.slope, 1.0), np.inf)
    level, k = np.zeros(len(rows)), len(rows.capacity)
    level[room.argmin()] = 1.0 / rows.slope[room.argmin()]
    return Priced(
        X=X,
        level=level,
        time=level * rows.reach,
        prices=np.zeros(k),
        start=Start(prices=tuple(at.prices.tolist()), t=highest),
    )


def _shares(response: Response, k: int) -> np.ndarray:
    X = np.zeros((len(response.share), k + 1))
    everyone = np.arange(len(X))
    X[everyone, response.low] = 1.0 - response.share
    X[everyone, response.high] = response.share
    return X[:, :k]


def _exact(rows: Rows, at: Response, undecided: int) -> Priced | None:
    """The exact solution, from a response at prices that should be nearly right."""
    n, bound, tried = len(rows), at.bound(rows), 0
    while True:
        found = cross(rows, at, undecided)
        if found is None:
            if undecided >= n:
                return None
        else:
            better, time = bound_of(rows, found.prices, found.level)
            if undecided >= n or _proven(rows, found, min(bound, better)):
                return Priced(
                    X=found.X,
                    level=found.level,
                    time=time,
                    prices=found.prices,
                    start=Start(prices=tuple(found.prices.tolist()), t=found.t),
                )
            following = _at(rows, found.prices, found.t if rows.gain else 0.0)
            at = following if following.bound(rows) < bound else at
            # Steps are worth their while only where the LP's prices are still at their walls.
            at = _improved(rows, at) if tried else at
            bound = at.bound(rows)
        tried += 1
        undecided = min(n, max(_first(rows), MORE * undecided))


def _proven(rows: Rows, found: Crossed, bound: float) -> bool:
    """Whether the solution keeps all limits and its value meets the bound."""
    if not found.valid or found.exceeded > 1e-9:
        return False
    value = found.t
    if rows.value is not None:
        value = float((rows.value[:, :-1] * found.X).sum())
    return bound - value <= ENOUGH * max(abs(bound), abs(value))
