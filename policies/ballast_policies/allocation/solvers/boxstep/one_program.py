"""Solutions of a large program, and those by one LP of all jobs, where the search for prices does not end."""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.best_response import bound_of, in_units_of_t, respond
from ballast_policies.allocation.solvers.crossover import crossover
from ballast_policies.allocation.solvers.dense_program import Rows
from ballast_policies.allocation.start import WarmStart

CHEAP = 1e-3
"""Extra cost, as a part of its price, up to which a column is nearly as cheap as the best."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Solution of a large program.

    Attributes:
        X: (n, w) shares.
        level, time: (n,) multipliers of demand and time.
        prices: (k,) multipliers of the capacities.
        start: warm start for the next similar program.
    """

    X: np.ndarray
    level: np.ndarray
    time: np.ndarray
    prices: np.ndarray
    start: WarmStart


def by_one_lp(rows: Rows, active: np.ndarray | None = None) -> Priced | None:
    """The solution by one LP of all jobs and their columns ``active`` (n, w + 1), a mask; all where None."""
    active = rows.usable.copy() if active is None else active
    active[:, -1] = False
    found = crossover(rows, np.arange(len(rows)), active)
    if found is None:
        return None
    X = np.zeros((len(rows), rows.idle))
    X[found.job, found.place] = found.x
    return Priced(
        X=X,
        level=found.level,
        time=bound_of(rows, found.prices, found.level)[1],
        prices=found.prices,
        start=WarmStart(prices=tuple(found.prices.tolist()), t=found.t),
    )


def among_cheap(rows: Rows, prices: np.ndarray, t: float, *, tolerance: float) -> Priced | None:
    """The solution by one LP of the columns that are nearly as cheap as each job's best; None: not proven.

    Args:
        rows: the program.
        prices: (k,) that are about right.
        t: likewise.
        tolerance: relative gap up to which it is proven.
    """
    at = in_units_of_t(rows, respond(rows, prices, min(t, rows.highest)))
    cheap = at.reduced_costs(rows.rates) <= CHEAP * rows.costs(at.prices)
    everyone = np.arange(len(rows))
    cheap[everyone, at.low] = cheap[everyone, at.high] = True
    found = by_one_lp(rows, cheap & rows.usable)
    if found is None:
        return None
    value = found.start.t if rows.value is None else float((rows.value[:, :-1] * found.X).sum())
    bound = bound_of(rows, found.prices, found.level)[0]
    return found if bound - value <= tolerance * max(abs(bound), abs(value)) else None
