"""From nearly exact prices to an exact optimum: a small LP of the jobs that prices leave undecided.

At prices p most jobs' mix of types is the same for all prices within a part h of p. Their use of GPUs is
then linear in t, and only the others, with the columns that come into question, enter an LP. In its
dual the prices are held to [(1 - h) p, (1 + h) p] (in the LP: capacity may be exceeded or left unused at
these prices). If no price ends at a wall, the LP's prices are those of the whole program, its t is the
optimum, and the bound that they prove equals it. Otherwise one goes on from there.
"""

import dataclasses

import highspy
import numpy as np

from ballast_policies.allocation.solvers.best_response import Response
from ballast_policies.allocation.solvers.dense_program import Rows, least
from ballast_policies.allocation.solvers.newton import floored, price_widths

DIGITS = 1e-10
"""Feasibility and optimality tolerance of the LP, on rows of order 1."""
SMALL = 300
"""Rows up to which HiGHS is faster without presolving."""
WIDEST_WALLS = 0.2
"""Prices are let go no further than by this part of themselves."""
MARGIN = 1e-9
"""A share of time may be this much below 0 or above 1 before it is mended."""
NEAR_CORNER = 3.0
"""How much closer than prices a demand must come to a corner of its hull to leave a job undecided."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crossed:
    """Solution of the small LP.

    Attributes:
        X: (n, k) shares.
        t: level reached; 0 without gain.
        prices: (k,).
        level: (n,) multipliers of the demands.
        exceeded: GPUs (part of a type's) that X takes too many or leaves unused at a wall of the prices.
        valid: whether the decided jobs' shares are within 0 and 1.
    """

    X: np.ndarray
    t: float
    prices: np.ndarray
    level: np.ndarray
    exceeded: float
    valid: bool


def closeness(rows: Rows, at: Response) -> tuple[np.ndarray, np.ndarray]:
    """((n, k + 1), (n,)): part by which prices, or t, must change for a column to come into a job's mix.

    First by prices, for each column; then by t passing a corner of the job's hull.
    """
    near = at.reduced_costs(rows.rates)
    everyone = np.arange(len(rows))
    near[everyone, at.low] = np.inf
    near[everyone, at.high] = np.inf
    # Both the new column's price and that of the mix may move, against each other.
    near /= price_widths(rows, at)
    near *= 0.5
    if not rows.gain:
        return near, np.full(len(rows), np.inf)
    demand = np.where(at.demand > 0, at.demand, 1.0)
    up = at.rate_high - at.demand
    down = np.where(at.mixed & (at.low < len(rows.capacity)), at.demand - at.rate_low, np.inf)
    corner = np.minimum(up, down) / (NEAR_CORNER * demand)
    return near, np.where(rows.slope > 0, corner, np.inf)


def cross(
    rows: Rows, at: Response, undecided: int, *, walls: tuple[np.ndarray, np.ndarray] | None = None
) -> Crossed | None:
    """Solve the LP with the ``undecided`` jobs nearest to a change.

    Args:
        rows: the program.
        at: the response at nearly exact prices.
        undecided: how many jobs; with all of them it is the whole program.
        walls: (k,) each, least and greatest prices for the whole program; for a part of it they are those
            within which the other jobs are decided.

    Returns:
        None where HiGHS finds no optimum, which with all jobs means that there is none.
    """
    n, k = len(rows), len(rows.capacity)
    if undecided >= n:
        active = rows.usable.copy()
        active[:, k] = False
        return _solve(rows, at, np.arange(n), active, walls)
    near, corner = closeness(rows, at)
    nearest = np.minimum(least(near), corner)
    part = min(WIDEST_WALLS, float(np.partition(nearest, undecided)[undecided]))
    free = np.flatnonzero(nearest <= part)
    active = near[free] <= part
    # Beyond a corner of the hull the next column comes in, however dear.
    active |= rows.usable[free] & (corner[free] <= part)[:, None]
    here = np.arange(len(free))
    active[here, at.low[free]] = True
    active[here, at.high[free]] = True
    active[:, k] = False
    apart = part * floored(rows, at.prices)
    return _solve(rows, at, free, active, (np.maximum(at.prices - apart, 0.0), at.prices + apart))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Decided:
    """Jobs whose mix is known: their share on ``high`` is at_zero + per_t t, the rest is on ``low``.

    ``used`` + ``growth`` t (k,) are the GPUs that they, and t itself, take.
    """

    jobs: np.ndarray
    at_zero: np.ndarray
    per_t: np.ndarray
    used: np.ndarray
    growth: np.ndarray


def _decided(rows: Rows, at: Response, jobs: np.ndarray) -> _Decided:
    k, mixed = len(rows.capacity), at.mixed[jobs]
    apart = np.where(mixed, (at.rate_high - at.rate_low)[jobs], 1.0)
    per_t = np.where(mixed, rows.slope[jobs] / apart, 0.0)
    at_zero = at.share[jobs] - per_t * at.t
    gpus, high, low = rows.gpus[jobs], at.high[jobs], at.low[jobs]

    def sums(by_high: np.ndarray, by_low: np.ndarray) -> np.ndarray:
        total: np.ndarray = np.bincount(high, weights=by_high, minlength=k + 1)
        total = total + np.bincount(low, weights=by_low, minlength=k + 1)
        return total[:k]

    return _Decided(
        jobs=jobs,
        at_zero=at_zero,
        per_t=per_t,
        used=sums(gpus * at_zero, gpus * (1.0 - at_zero)),
        growth=sums(gpus * per_t, -gpus * per_t) + rows.lift,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Small:
    """The LP over the undecided jobs ``free`` and their ``active`` columns (undecided, k + 1).

    Rows: level and time of the undecided, GPUs as parts of a type's. Columns: x, t, then with ``walls``
    GPUs too many and GPUs unused. t counts in ``unit``, the objective in ``money``.
    """

    free: np.ndarray
    active: np.ndarray
    unit: float
    money: float
    walls: tuple[np.ndarray, np.ndarray] | None

    def model(self, rows: Rows, decided: _Decided) -> highspy.HighsLp:
        k, f, infinite = len(rows.capacity), len(self.free), highspy.kHighsInf
        row, kind = np.nonzero(self.active)
        job, size, c = self.free[row], _positive(rows.capacity), len(row)
        width = c + 1 + (0 if self.walls is None else 2 * k)
        cost, lower, upper = np.zeros(width), np.zeros(width), np.full(width, infinite)
        if rows.value is not None:
            cost[:c] = rows.value[job, kind] / self.money
        lower[c] = upper[c] = 0.0
        if rows.gain:
            cost[c], lower[c], upper[c] = self.unit / self.money, -infinite, rows.highest / self.unit
        entries = [
            np.stack([rows.rates[job, kind], np.ones(c), rows.gpus[job] / size[kind]], axis=1).ravel(),
            -rows.slope[self.free] * self.unit,
            decided.growth * self.unit / size,
        ]
        places = [np.stack([row, f + row, 2 * f + kind], axis=1).ravel(), np.arange(f), 2 * f + np.arange(k)]
        starts = [3 * np.arange(c + 1), np.array([3 * c + f + k])]
        left = (rows.capacity - decided.used) / size
        floor = np.full(k, -infinite)
        if self.walls is not None:
            cost[c + 1 : c + 1 + k] = -self.walls[1] * size / self.money
            cost[c + 1 + k :] = self.walls[0] * size / self.money
            entries += [-np.ones(k), np.ones(k)]
            places += [2 * f + np.arange(k)] * 2
            starts.append(3 * c + f + k + 1 + np.arange(2 * k))
            floor = left
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = width, 2 * f + k
        lp.sense_ = highspy.ObjSense.kMaximize
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
        lp.row_lower_ = np.concatenate([rows.base[self.free], np.full(f, -infinite), floor])
        lp.row_upper_ = np.concatenate([np.full(f, infinite), np.ones(f), left])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate(starts).astype(np.int32)
        lp.a_matrix_.index_ = np.concatenate(places).astype(np.int32)
        lp.a_matrix_.value_ = np.concatenate(entries)
        return lp


def _solve(
    rows: Rows,
    at: Response,
    free: np.ndarray,
    active: np.ndarray,
    walls: tuple[np.ndarray, np.ndarray] | None,
) -> Crossed | None:
    k, f = len(rows.capacity), len(free)
    outside = np.ones(len(rows), dtype=bool)
    outside[free] = False
    decided = _decided(rows, at, np.flatnonzero(outside))
    steepest = max(float(rows.slope.max(initial=0.0)), float((rows.lift / _positive(rows.capacity)).max()))
    unit = 1.0 / steepest if rows.gain and steepest > 0 else 1.0
    money = unit if rows.value is None else float(np.abs(rows.value[free]).max(initial=0.0)) or 1.0
    solved = _optimum(
        _Small(free=free, active=active, unit=unit, money=money, walls=walls).model(rows, decided)
    )
    if solved is None:
        return None
    x, duals = solved[0], solved[1] * money
    row, kind = np.nonzero(active)
    c = len(row)
    t = float(x[c]) * unit if rows.gain else 0.0
    share = decided.at_zero + decided.per_t * t
    X = np.zeros((len(rows), k + 1))
    X[decided.jobs, at.low[decided.jobs]] = 1.0 - share
    X[decided.jobs, at.high[decided.jobs]] = share
    X[free[row], kind] = x[:c]
    prices = np.maximum(duals[2 * f :], 0.0) / _positive(rows.capacity)
    level = _slopes(rows, at, prices)
    level[free] = np.maximum(-duals[:f], 0.0)
    return Crossed(
        X=X[:, :k],
        t=t,
        prices=prices,
        level=level,
        exceeded=float(x[c + 1 :].max(initial=0.0)),
        valid=bool((share >= -MARGIN).all() and (share <= 1.0 + MARGIN).all()),
    )


def _slopes(rows: Rows, at: Response, prices: np.ndarray) -> np.ndarray:
    """(n,) lambda of the mixes of ``at`` at other prices."""
    everyone, price = np.arange(len(rows)), np.append(prices, 0.0)
    rise = rows.gpus * (price[at.high] - price[at.low])
    if rows.value is not None:
        rise -= rows.value[everyone, at.high] - rows.value[everyone, at.low]
    apart = np.where(at.mixed, at.rate_high - at.rate_low, 1.0)
    slopes: np.ndarray = np.maximum(rise / apart, 0.0)
    return slopes


def _positive(size: np.ndarray) -> np.ndarray:
    return np.where(size > 0, size, 1.0)


def _optimum(lp: highspy.HighsLp) -> tuple[np.ndarray, np.ndarray] | None:
    """(x, duals) of the rows; None where there is none."""
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("threads", 1)
    if lp.num_row_ < SMALL:
        highs.setOptionValue("presolve", "off")
    highs.setOptionValue("primal_feasibility_tolerance", DIGITS)
    highs.setOptionValue("dual_feasibility_tolerance", DIGITS)
    highs.passModel(lp)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = highs.getSolution()
    return np.array(solution.col_value), np.array(solution.row_dual)
