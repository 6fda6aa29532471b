"""Crossover from nearly exact prices to an exact optimum: a small LP of the undecided jobs.

At prices p most jobs' mix of types is the same for all prices within a part h of p. Their use of GPUs is
then linear in t, and only the others, with the columns that come into question, enter an LP. In its
dual the prices are held to [(1 - h) p, (1 + h) p] (in the LP: capacity may be exceeded or left unused at
these prices). If no price ends at a wall, the LP's prices are those of the whole program, its t is the
optimum, and the bound that they prove equals it. Otherwise the search continues from there.
"""

import dataclasses

import highspy
import numpy as np

from ballast_policies.allocation.solvers.best_response import Response
from ballast_policies.allocation.solvers.dense_program import Rows, least
from ballast_policies.allocation.solvers.simplex import optimum, set_entries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """Largest distance of prices (k,) and t from their optimum, to either side."""

    prices: np.ndarray
    t: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decided:
    """Jobs whose mix is known: their share on ``high`` is at_zero + per_t t, the rest is on ``low``.

    Attributes:
        low, high: (jobs,) columns.
        at_zero, per_t: (jobs,).
        used: (k,) GPUs that they take at t = 0.
        growth: (k,) GPUs that they take per unit of t.
    """

    low: np.ndarray
    high: np.ndarray
    at_zero: np.ndarray
    per_t: np.ndarray
    used: np.ndarray
    growth: np.ndarray

    def shares(self, rows: Rows, t: float) -> np.ndarray:
        """(jobs, w) shares of all jobs of ``rows``, at t."""
        share, everyone = self.at_zero + self.per_t * t, np.arange(len(rows))
        X = np.zeros(rows.rates.shape)
        X[everyone, self.low] = 1.0 - share
        X[everyone, self.high] = share
        return X[:, :-1]


def decided(rows: Rows, at: Response, jobs: np.ndarray, weight: np.ndarray | None = None) -> Decided:
    """The ``jobs`` (positions), with their mixes of ``at``; GPUs count ``weight`` times."""
    mixed = at.mixed[jobs]
    apart = np.where(mixed, at.rate_high[jobs] - at.rate_low[jobs], 1.0)
    per_t = np.where(mixed, rows.slope[jobs] / apart, 0.0)
    at_zero = at.share[jobs] - per_t * at.t
    many, high, low = 1.0 if weight is None else weight, at.high[jobs], at.low[jobs]

    def sums(by_high: np.ndarray, by_low: np.ndarray) -> np.ndarray:
        used: np.ndarray = rows.used_by(jobs, high, many * by_high)
        used = used + rows.used_by(jobs, low, many * by_low)
        return used

    return Decided(
        low=low,
        high=high,
        at_zero=at_zero,
        per_t=per_t,
        used=sums(at_zero, 1.0 - at_zero),
        growth=sums(per_t, -per_t),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossoverSolution:
    """Solution of the small LP.

    Attributes:
        job, place: (columns,) positions of the columns in the LP.
        x: (columns,) shares.
        t: level reached; 0 without gain.
        prices: (k,).
        level: (free,) multipliers of the demands of the jobs in the LP.
        exceeded: GPUs (part of a type's) that x exceeds or leaves unused at a wall of the prices.
    """

    job: np.ndarray
    place: np.ndarray
    x: np.ndarray
    t: float
    prices: np.ndarray
    level: np.ndarray
    exceeded: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Closeness:
    """Distance of each job to another mix, in boxes: at 1 or less it may change inside the box.

    Attributes:
        columns: (n, w + 1) by prices, until a column comes into the mix.
        corner: (n,) by t passing a corner of the job's hull, or by the demand ceasing to bind.
        nearest: (n,) the least of all these.
        place: (n,) the nearest column.
    """

    columns: np.ndarray
    corner: np.ndarray
    nearest: np.ndarray
    place: np.ndarray


def closeness(rows: Rows, at: Response, box: Box) -> Closeness:
    """Distance of each job to a change, from the response ``at`` in the middle of the box."""
    n, everyone = len(rows), np.arange(len(rows))
    near = rows.costs(box.prices)
    low_width, high_width = near[everyone, at.low], near[everyone, at.high]
    mixed = at.mixed
    per_rate = np.where(mixed, 1.0 / np.where(mixed, at.rate_high - at.rate_low, 1.0), 0.0)
    # The cost that the mix would take for the same rate changes with both of its prices.
    per_high, per_low = per_rate * high_width, per_rate * low_width
    fixed = np.where(mixed, 1e-300, high_width + 1e-300)
    change, reduced = np.empty(n), np.empty(n)
    for j in range(near.shape[1]):
        rates = rows.rates[:, j]
        change = np.abs(np.subtract(rates, at.rate_low, out=change), out=change)
        change *= per_high
        reduced = np.abs(np.subtract(at.rate_high, rates, out=reduced), out=reduced)
        reduced *= per_low
        change += reduced
        change += near[:, j]
        change += fixed
        np.multiply(at.level, rates, out=reduced)
        np.subtract(at.costs[:, j], reduced, out=reduced)
        reduced += at.time
        np.divide(reduced, change, out=near[:, j])
    near[everyone, at.low] = np.inf
    near[everyone, at.high] = np.inf
    corner = np.full(n, np.inf)
    if rows.value is not None:
        # A demand that comes to cost nothing binds no more.
        change = np.maximum(low_width + high_width, 1e-300)
        corner = np.where(mixed, at.level / np.where(mixed, per_rate, 1.0) / change, np.inf)
    if rows.gain:
        up = at.rate_high - at.demand
        down = np.where(mixed & (at.low < rows.idle), at.demand - at.rate_low, np.inf)
        rising = rows.slope > 0
        at_t = np.minimum(up, down) / (np.where(rising, rows.slope, 1.0) * box.t)
        corner = np.minimum(corner, np.where(rising, at_t, np.inf))
    nearest, place = least(near)
    return Closeness(columns=near, corner=corner, nearest=np.minimum(nearest, corner), place=place)


def _model(
    rows: Rows,
    free: np.ndarray,
    active: np.ndarray,
    weight: np.ndarray,
    others: tuple[np.ndarray, np.ndarray],
    units: tuple[float, float],
    walls: tuple[np.ndarray, np.ndarray] | None,
) -> highspy.HighsLp:
    """The LP over the undecided jobs ``free`` and their ``active`` columns (undecided, w + 1).

    Rows: level and time of the undecided, GPUs as parts of a type's. Columns: x, t, then with ``walls``
    GPUs too many and GPUs unused. ``others``: GPUs that other jobs take at t = 0, and per unit of t;
    ``units``: in which t and the objective count.
    """
    (used, growth), (unit, money) = others, units
    k, f, infinite = len(rows.capacity), len(free), highspy.kHighsInf
    row, place = np.nonzero(active)
    job, size, c = free[row], _sizes(rows), len(row)
    each, every, types = np.arange(f), np.arange(c), np.arange(k)
    here, kind, gpus = rows.entries(job, place)
    entries = [
        (row, every, rows.rates[job, place]),
        (f + row, every, np.ones(c)),
        (2 * f + kind, here, weight[row[here]] * gpus / size[kind]),
        (each, np.full(f, c), -rows.slope[free] * unit),
        (2 * f + types, np.full(k, c), growth * unit / size),
    ]
    width, left, floor = c + 1, (rows.capacity - used) / size, np.full(k, -infinite)
    if walls is not None:
        entries += [
            (2 * f + types, c + 1 + types, -np.ones(k)),
            (2 * f + types, c + 1 + k + types, np.ones(k)),
        ]
        width, floor = c + 1 + 2 * k, left
    cost, lower, upper = np.zeros(width), np.zeros(width), np.full(width, infinite)
    if rows.value is not None:
        cost[:c] = weight[row] * rows.value[job, place] / money
    lower[c] = upper[c] = 0.0
    if rows.gain:
        cost[c], lower[c], upper[c] = unit / money, -infinite, rows.highest / unit
    if walls is not None:
        cost[c + 1 :] = np.concatenate([-walls[1] * size, walls[0] * size]) / money
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = width, 2 * f + k
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
    lp.row_lower_ = np.concatenate([rows.base[free], np.full(f, -infinite), floor])
    lp.row_upper_ = np.concatenate([np.full(f, infinite), np.ones(f), left])
    set_entries(lp, *(np.concatenate(of_all) for of_all in zip(*entries, strict=True)))
    return lp


def crossover(
    rows: Rows,
    free: np.ndarray,
    active: np.ndarray,
    *,
    weight: np.ndarray | None = None,
    used: np.ndarray | None = None,
    growth: np.ndarray | None = None,
    walls: tuple[np.ndarray, np.ndarray] | None = None,
) -> CrossoverSolution | None:
    """Solve the LP of the jobs ``free``.

    Args:
        rows: the program.
        free: rows of the undecided jobs in the LP.
        active: (free, w + 1) their columns.
        weight: how many jobs each of them stands for; None: 1.
        used: (k,) GPUs that other jobs take at t = 0.
        growth: (k,) GPUs that they take per unit of t.
        walls: (k,) each, least and greatest prices.

    Returns:
        None where HiGHS finds no optimum, which with all jobs means that there is none.
    """
    k, f = len(rows.capacity), len(free)
    weight = np.ones(f) if weight is None else weight
    used = np.zeros(k) if used is None else used
    growth = rows.lift if growth is None else growth + rows.lift
    steepest = max(float(rows.slope[free].max(initial=0.0)), float(np.abs(growth / _sizes(rows)).max()))
    unit = 1.0 / steepest if rows.gain and steepest > 0 else 1.0
    money = unit
    if rows.value is not None and not rows.gain:
        money = float(np.abs(rows.value[free]).max(initial=0.0)) or 1.0
    solved = optimum(_model(rows, free, active, weight, (used, growth), (unit, money), walls))
    if solved is None:
        return None
    x, duals = solved[0], solved[1] * money
    row, place = np.nonzero(active)
    c = len(row)
    return CrossoverSolution(
        job=free[row],
        place=place,
        x=x[:c],
        t=float(x[c]) * unit if rows.gain else 0.0,
        prices=np.maximum(duals[2 * f :], 0.0) / _sizes(rows),
        level=np.maximum(-duals[:f], 0.0) / weight,
        exceeded=0.0 if walls is None else _exceeded(x[c + 1 :], walls[0]),
    )


def _exceeded(x: np.ndarray, least_prices: np.ndarray) -> float:
    """The largest part of a type that is exceeded, or unused although its price is held up."""
    k = len(least_prices)
    return max(float(x[:k].max(initial=0.0)), float(x[k:][least_prices > 0].max(initial=0.0)))


def slopes(rows: Rows, low: np.ndarray, high: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """(n,) lambda of mixes of the columns low and high (n,) at ``prices``."""
    everyone, costs = np.arange(len(rows)), rows.costs(prices)
    rise = costs[everyone, high] - costs[everyone, low]
    if rows.value is not None:
        rise -= rows.value[everyone, high] - rows.value[everyone, low]
    mixed = low != high
    apart = np.where(mixed, rows.rates[everyone, high] - rows.rates[everyone, low], 1.0)
    found: np.ndarray = np.maximum(rise / apart, 0.0)
    return found


def _sizes(rows: Rows) -> np.ndarray:
    """(k,) GPUs that the rows of the capacities are divided by."""
    return np.where(rows.capacity > 0, rows.capacity, np.where(rows.lift > 0, rows.lift, 1.0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Solution of a large program.

    Attributes:
        X: (n, w) shares.
        level, time: (n,) multipliers of demand and time.
        prices: (k,) multipliers of the capacities.
        t: how far the demands are raised.
    """

    X: np.ndarray
    level: np.ndarray
    time: np.ndarray
    prices: np.ndarray
    t: float
