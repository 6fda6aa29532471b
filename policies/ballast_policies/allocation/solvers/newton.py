"""Newton steps on the prices of GPU types: from good prices to nearly exact ones, without any LP.

The dual of ``rows`` is a convex function of k prices. With many jobs it is nearly smooth: as prices
change by a part w, those jobs change their mix of types for which another type costs less than w more.
Each adds g^2 theta v v' / (2 w g p) to the second derivative, v being the GPUs it would exchange per
unit of time on the other type and theta how much of it the job would use. So the Hessian is counted
from the near ties, and one step solves k equations (k + 1 with t):

    H dp - B dt = U - capacity - lift t,     B . dp + A dt = 0,      U: GPUs in use, B = dU/dt + lift

A step is taken if it improves the proven bound; w follows the steps' length.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from ballast_policies.allocation.solvers.best_response import Response, respond
from ballast_policies.allocation.solvers.dense_program import Rows

WIDEST = 0.05
"""First width of the window in which ties are counted, as a part of the prices."""
TRUST = 4.0
"""Prices change by no more than this many windows in one step."""
MAX_STEPS = 40
KINK = 0.02
"""Widest relative change of t over which the growth of lambda is measured."""
FLOOR = 1e-3
"""Part of the mean price below which a price counts as this, where a width is relative to it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ties:
    """Columns that would cost a job little more than its mix.

    Attributes:
        job, column: the ties.
        from_low, from_high: share of each column of the mix that a unit of the new one replaces.
        most: how much of the new one the job could use.
        width: reduced cost up to which it was counted.
    """

    job: np.ndarray
    column: np.ndarray
    from_low: np.ndarray
    from_high: np.ndarray
    most: np.ndarray
    width: np.ndarray


def price_widths(rows: Rows, at: Response) -> np.ndarray:
    """(n, k + 1) what a column's reduced cost changes by, about, if prices change by all of themselves."""
    price = np.append(floored(rows, at.prices), 0.0)
    of_mix = np.maximum(price[at.low], price[at.high])
    widths: np.ndarray = np.maximum(price[None, :], of_mix[:, None], order="F")
    widths *= rows.gpus[:, None]
    return widths


def floored(rows: Rows, prices: np.ndarray) -> np.ndarray:
    """(k,) prices, those near 0 raised to a small part of what is usual."""
    usual = float(prices.mean())
    if usual <= 0 and rows.value is not None:
        usual = float((rows.value.max(axis=1) / rows.gpus).mean())
    least: np.ndarray = np.maximum(prices, FLOOR * max(usual, 1e-300))
    return least


def ties(rows: Rows, at: Response, part: float) -> Ties:
    """The near ties within a change of prices by ``part``."""
    reduced, widths = at.reduced_costs(rows.rates), part * price_widths(rows, at)
    everyone = np.arange(len(rows))
    reduced[everyone, at.low] = np.inf
    reduced[everyone, at.high] = np.inf
    job, column = np.nonzero(reduced <= widths)
    mixed = at.mixed[job]
    rate, low, high = rows.rates[job, column], at.rate_low[job], at.rate_high[job]
    from_high = np.where(mixed, (rate - low) / np.where(mixed, high - low, 1.0), 1.0)
    from_low = np.where(mixed, 1.0 - from_high, 0.0)
    share = at.share[job]
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.minimum(
            np.where(from_high > 0, share / from_high, np.inf),
            np.where(from_low > 0, (1.0 - share) / from_low, np.inf),
        )
        room = np.where(~mixed & (rate < high), (high - at.demand[job]) / (high - rate), np.inf)
    return Ties(
        job=job,
        column=column,
        from_low=from_low,
        from_high=from_high,
        most=np.clip(np.minimum(most, room), 0.0, 1.0),
        width=widths[job, column],
    )


def _hessian(rows: Rows, at: Response, near: Ties) -> np.ndarray:
    """(k, k) second derivative of the dual by the prices."""
    k = len(rows.capacity)
    exchanged = np.zeros((len(near.job), k + 1))
    each = np.arange(len(near.job))
    exchanged[each, near.column] = 1.0
    exchanged[each, at.high[near.job]] -= near.from_high
    exchanged[each, at.low[near.job]] -= near.from_low
    exchanged = exchanged[:, :k]
    weight = near.most * rows.gpus[near.job] ** 2 / (2.0 * near.width)
    hessian: np.ndarray = exchanged.T @ (weight[:, None] * exchanged)
    return hessian


def _growth(rows: Rows, at: Response) -> np.ndarray:
    """(k,) GPUs of each type per unit of t."""
    k, mixed = len(rows.capacity), at.mixed
    per_t = np.where(mixed, rows.gpus * rows.slope / np.where(mixed, at.rate_high - at.rate_low, 1.0), 0.0)
    high = np.bincount(at.high, weights=per_t, minlength=k + 1)
    low = np.bincount(at.low, weights=per_t, minlength=k + 1)
    growth: np.ndarray = (high - low)[:k] + rows.lift
    return growth


def _acceleration(rows: Rows, at: Response, part: float) -> float:
    """How fast lambda . slope grows with t, measured ahead."""
    ahead = at.t * min(part, KINK)
    if ahead <= 0:
        return 0.0
    later = rows.base + rows.slope * (at.t + ahead)
    passing = np.flatnonzero((later > at.rate_high) & (at.demand < rows.reach) & (rows.slope > 0))
    if not len(passing):
        return 0.0
    then = respond(dataclasses.replace(rows.sample(passing), capacity=rows.capacity), at.prices, at.t + ahead)
    return float((then.level - at.level[passing]) @ rows.slope[passing]) / ahead


def step(rows: Rows, at: Response, near: Ties, part: float) -> tuple[np.ndarray, float]:
    """Newton's prices (k,) >= 0 and t, from a response whose prices make a unit of t cost 1."""
    k, prices = len(rows.capacity), at.prices
    hessian, growth = _hessian(rows, at, near), _growth(rows, at)
    over = at.used(rows.gpus) + rows.lift * at.t - rows.capacity
    scale = floored(rows, prices)
    # Types that cost nothing and are not short of GPUs stay so; others may join them on the way.
    free = (prices <= 0) & (over <= 0)
    target, t = prices, at.t
    for _ in range(k):
        inside = np.flatnonzero(~free)
        m = len(inside)
        unit = np.append(scale[inside], at.t if at.t > 0 else 1.0)
        system = np.zeros((m + 1, m + 1))
        system[:m, :m] = hessian[np.ix_(inside, inside)]
        system[:m, m], system[m, :m] = -growth[inside], growth[inside]
        system[m, m] = _acceleration(rows, at, part) if rows.slope.any() else 0.0
        system *= unit[:, None] * unit[None, :]
        right = np.append(over[inside], 0.0) * unit
        ridge = 1e-6 * np.abs(np.diag(system)[:m]).max(initial=0.0) + 1e-4 * unit[:m] * rows.capacity[inside]
        system[np.arange(m), np.arange(m)] += np.maximum(ridge, 1e-300)
        if not rows.gain:
            system, right, unit = system[:m, :m], right[:m], unit[:m]
        found = np.linalg.lstsq(system, right, rcond=None)[0] * unit
        target = np.where(free, 0.0, prices)
        target[inside] += found[:m]
        t = at.t + (float(found[m]) if rows.gain else 0.0)
        below = (target < 0) & (prices <= 0.01 * scale.mean())
        if not below.any():
            break
        free |= below
    return np.maximum(target, np.where(prices <= 0.01 * scale.mean(), 0.0, 0.2 * prices)), t


def improve(
    rows: Rows, at: Response, *, enough: int, until: Callable[[Response], bool] | None = None
) -> Response:
    """Steps until what is left to go is a window of about ``enough`` ties, or ``until`` says so.

    Args:
        rows: the program.
        at: where to begin, in prices that make a unit of t cost 1 (``in_units_of_t``).
        enough: ties.
        until: of a response.

    Returns:
        The best response found.
    """
    bound, part = at.bound(rows), WIDEST
    for _ in range(MAX_STEPS):
        if until is not None and until(at):
            break
        near = ties(rows, at, part)
        target, to = step(rows, at, near, part)
        scale = floored(rows, at.prices)
        length = float((np.abs(target - at.prices) / scale).max())
        shorter = min(1.0, TRUST * part / length) if length > 0 else 1.0
        to = at.t + shorter * (to - at.t)
        if rows.gain:
            to = min(max(to, at.t - 0.2 * abs(at.t)), at.t + 0.2 * abs(at.t), rows.highest, bound)
        following = in_units_of_t(rows, respond(rows, at.prices + shorter * (target - at.prices), to))
        if following.bound(rows) < bound:
            at, bound = following, following.bound(rows)
            moved = shorter * length
        else:
            at = following if following.bound(rows) == bound else at
            moved = part / 3.0
        expected = len(near.job) * moved / part
        part = min(part, max(moved, part / 4.0))
        if expected <= enough:
            break
    return at


def in_units_of_t(rows: Rows, at: Response) -> Response:
    """The same response in prices that make a unit of t cost 1; as it is where there is no t."""
    total = at.total(rows)
    if not rows.gain or total <= 0:
        return at
    return dataclasses.replace(
        at,
        prices=at.prices / total,
        costs=at.costs / total,
        level=at.level / total,
        time=at.time / total,
    )
