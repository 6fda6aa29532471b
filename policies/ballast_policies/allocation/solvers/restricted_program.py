"""Exact optima from nearly optimal prices: a small linear program that grows as long as jobs change.

At prices p most jobs' best use of their time is clear. They keep it, and the few that are close to a tie
share the remaining GPUs in a linear program, by HiGHS, with its own prices. A job outside whose best
response differs at the new prices enters the program, with all of its columns, and it is solved again. When
there is none, the prices are optimal for all jobs. GPUs that the jobs outside take in excess cost more than
any GPU is worth, so the small program always has a solution.
"""

import dataclasses

import highspy
import numpy as np

from ballast_policies.allocation.solvers.best_response import Response, respond
from ballast_policies.allocation.solvers.dense_program import Rows, least
from ballast_policies.allocation.solvers.simplex import optimum, set_entries

FEWEST = 60
"""Jobs in the first program, at least."""
WINDOW = 20.0
"""They are those that a change of prices by this many times ``precision`` could change."""
MAX_ROUNDS = 40
SAME = 1e-11
"""A job outside enters the program if it would gain more than this part of the cost of its GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restricted:
    """Optimal shares and multipliers.

    Attributes:
        X: (n, k) shares.
        level, time: (n,) multipliers of demands and time.
        prices: (k,) multipliers of the capacities.
    """

    X: np.ndarray
    level: np.ndarray
    time: np.ndarray
    prices: np.ndarray


def solve(rows: Rows, prices: np.ndarray, *, precision: float) -> Restricted | None:
    """The optimum of a program without gain.

    Args:
        rows: the program.
        prices: (k,) nearly optimal.
        precision: how nearly, as a part of the mean price.

    Returns:
        None where some GPUs remain exceeded: the demands do not fit.
    """
    n = len(rows)
    usual = float(prices @ rows.capacity / rows.capacity.sum())
    error = precision * usual
    at = respond(rows, np.where(prices > 3.0 * error, prices, 0.0), 0.0)
    near = _distance(rows, at, error)
    window = max(WINDOW * precision, float(np.partition(near, min(FEWEST, n - 1))[min(FEWEST, n - 1)]))
    inside = near <= window
    dearest = _dearest(rows)
    for _ in range(MAX_ROUNDS):
        found = _small(rows, at, np.flatnonzero(inside), dearest)
        if found is None:
            return None
        X, prices, exceeded = found
        following = respond(rows, prices, 0.0)
        loss = _regret(rows, at, following)
        changed = (loss > SAME * rows.gpus * max(float(prices.max()), usual)) & ~inside
        if not changed.any():
            if exceeded > 1e-9:
                return None
            return Restricted(X=X, level=following.level, time=following.time, prices=prices)
        inside |= changed
        if inside.sum() > n // 2:
            inside[:] = True
    return None


def _distance(rows: Rows, at: Response, error: float) -> np.ndarray:
    """(n,) part by which prices must change for the job to do otherwise."""
    reduced = at.reduced_costs(rows.rates)
    everyone = np.arange(len(rows))
    reduced[everyone, at.low] = np.inf
    reduced[everyone, at.high] = np.inf
    price = np.append(at.prices, 0.0)
    mix = np.maximum(price[at.high], price[at.low])
    reduced /= rows.gpus[:, None] * (np.maximum(mix[:, None], price[None, :]) + error)
    return least(reduced)[0]


def _regret(rows: Rows, held: Response, best: Response) -> np.ndarray:
    """(n,) by how much more the mixes of ``held`` cost than the best ones, at the prices of ``best``."""
    everyone = np.arange(len(rows))
    cost = held.share * best.costs[everyone, held.high]
    low = best.costs[everyone, held.low] * (1.0 - held.share)
    cost += np.where(held.share < 1.0, low, 0.0)
    least_cost = best.level * np.maximum(rows.base, 0.0) - best.time
    regret: np.ndarray = cost - least_cost
    return regret


def _dearest(rows: Rows) -> float:
    """More than any GPU can be worth: its price where one job alone would want it, and a demand on top."""
    worth = 0.0 if rows.value is None else float((np.abs(rows.value).max(axis=1) / rows.gpus).max())
    return 1e3 * worth if rows.base.any() else 2.0 * worth


def _small(
    rows: Rows, at: Response, free: np.ndarray, dearest: float
) -> tuple[np.ndarray, np.ndarray, float] | None:
    """((n, k) shares, (k,) prices, GPUs exceeded as part of a type's) of the program of the jobs ``free``."""
    n, k, f = len(rows), len(rows.capacity), len(free)
    outside = np.ones(n, dtype=bool)
    outside[free] = False
    out = np.flatnonzero(outside)
    X = np.zeros((n, k + 1))
    X[out, at.low[out]] = 1.0 - at.share[out]
    X[out, at.high[out]] = at.share[out]
    size = np.where(rows.capacity > 0, rows.capacity, 1.0)
    left = (rows.capacity - rows.gpus[out] @ X[out, :k]) / size
    active = rows.usable[free, :k]
    row, kind = np.nonzero(active)
    job, c = free[row], len(row)
    money = dearest or 1.0
    value = np.zeros(c) if rows.value is None else rows.value[job, kind] / money
    infinite = highspy.kHighsInf
    demanded = rows.base[free] > 0
    of_demand = np.cumsum(demanded) - 1
    d = int(demanded.sum())
    # Rows: demands, times, capacities. Columns: shares, GPUs too many.
    has = demanded[row]
    index = np.concatenate([of_demand[row][has], d + row, d + f + kind, d + f + np.arange(k)])
    column = np.concatenate([np.flatnonzero(has), np.arange(c), np.arange(c), c + np.arange(k)])
    entry = np.concatenate([rows.rates[job, kind][has], np.ones(c), rows.gpus[job] / size[kind], -np.ones(k)])
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = c + k, d + f + k
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_ = np.concatenate([value, -dearest * size / money])
    lp.col_lower_, lp.col_upper_ = np.zeros(c + k), np.full(c + k, infinite)
    lp.row_lower_ = np.concatenate([rows.base[free][demanded], np.full(f + k, -infinite)])
    lp.row_upper_ = np.concatenate([np.full(d, infinite), np.ones(f), left])
    set_entries(lp, index, column, entry)
    found = optimum(lp)
    if found is None:
        return None
    x, duals = found
    X[job, kind] = x[:c]
    prices = np.maximum(duals[d + f :], 0.0) * money / size
    return X[:, :k], prices, float(x[c:].max(initial=0.0))
