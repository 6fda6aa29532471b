"""Best responses of the jobs to given prices of the GPU types: the dual function, job by job.

At prices p, full time of job m on type j costs K_mj = gpus_m p_j - value_mj, and in a configuration the price
of all of its GPUs less its value. The cheapest way to reach the
rate d_m within its time lies on the lower convex hull of the points (rate_mj, K_mj) and (0, 0) for
idling: a mix of at most two of them. The hull is walked from its cheapest point to the right until d_m is
between two points, all jobs at once; its slope there is lambda_m, the cost of one more unit of rate.

Weak duality makes any prices a bound:

    optimum <= ( sum mu + p . capacity - lambda . base ) / (lambda . slope + p . lift)    with gain,
    and the numerator without.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.dense_program import Rows, dot, least, stratified


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Response:
    """The jobs' best answers.

    Attributes:
        prices: (k,) p.
        t: as asked.
        costs: (n, w + 1) K; infinite where there is no column.
        demand: (n,) d.
        low, high: (n,) the two columns of the mix, w is idling; the same where the demand does not bind.
        rate_low, rate_high: (n,) their rates.
        share: (n,) of time on ``high``; the rest is on ``low``.
        level: (n,) lambda.
        time: (n,) mu.
    """

    prices: np.ndarray
    t: float
    costs: np.ndarray
    demand: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rate_low: np.ndarray
    rate_high: np.ndarray
    share: np.ndarray
    level: np.ndarray
    time: np.ndarray

    @property
    def mixed(self) -> np.ndarray:
        """(n,) whether the demand binds, so that there are two columns."""
        undecided: np.ndarray = self.low != self.high
        return undecided

    def used(self, rows: Rows) -> np.ndarray:
        """(k,) GPUs of each type in use."""
        everyone = np.arange(len(rows))
        used: np.ndarray = rows.used_by(everyone, self.high, self.share)
        used = used + rows.used_by(everyone, self.low, 1.0 - self.share)
        return used

    def reduced_costs(self, rates: np.ndarray) -> np.ndarray:
        """(n, w + 1) reduced costs: extra cost of full time in each column over the mix."""
        reduced: np.ndarray = np.multiply(self.level[:, None], rates)
        np.subtract(self.costs, reduced, out=reduced)
        reduced += self.time[:, None]
        return reduced

    def total(self, rows: Rows) -> float:
        """The cost of a unit of t: lambda . slope + p . lift."""
        return dot(self.level, rows.slope) + float(self.prices @ rows.lift)

    def bound(self, rows: Rows) -> float:
        """The bound above."""
        available = float(self.time.sum() + self.prices @ rows.capacity) - dot(self.level, rows.base)
        if not rows.gain:
            return available
        total = self.total(rows)
        return available / total if total > 0 else float("inf")


def respond(rows: Rows, prices: np.ndarray, t: float) -> Response:
    """The cheapest answers at ``prices`` (k,) >= 0 to the demands at ``t``."""
    n, idle = len(rows), rows.idle
    demand = rows.demand(t)
    costs = rows.costs(prices)
    if rows.value is not None:
        costs -= rows.value
    costs += rows.absent
    everyone = np.arange(n)
    high = np.full(n, idle) if rows.value is None else least(costs)[1]
    rate_high, cost_high = rows.rates[everyone, high], costs[everyone, high]
    low, rate_low, cost_low = high.copy(), rate_high.copy(), cost_high.copy()
    if rows.value is None:
        # All stand at idling, at no cost: the first side of the hull is the least cost per speed.
        high = _steepest(costs, rows.rates, idle)
        high[demand <= 0] = idle
        rate_high, cost_high = rows.rates[everyone, high], costs[everyone, high]
    behind = np.flatnonzero(demand > rate_high)
    while len(behind):
        low[behind], rate_low[behind], cost_low[behind] = high[behind], rate_high[behind], cost_high[behind]
        best, high_rate, high_cost = _next_corner(
            costs, rows.rates, behind, rate_low[behind], cost_low[behind]
        )
        high[behind], rate_high[behind], cost_high[behind] = best, high_rate, high_cost
        behind = behind[demand[behind] > rate_high[behind]]
    mixed = low != high
    apart = np.where(mixed, rate_high - rate_low, 1.0)
    level = np.where(mixed, (cost_high - cost_low) / apart, 0.0)
    return Response(
        prices=prices,
        t=t,
        costs=costs,
        demand=demand,
        low=low,
        high=high,
        rate_low=rate_low,
        rate_high=rate_high,
        share=np.where(mixed, (demand - rate_low) / apart, 1.0),
        level=level,
        time=np.maximum(level * rate_low - cost_low, 0.0),
    )


def _steepest(costs: np.ndarray, rates: np.ndarray, idle: int) -> np.ndarray:
    """(n,) the column before ``idle`` with the least cost per rate."""
    with np.errstate(divide="ignore", invalid="ignore"):
        per_rate = np.divide(costs[:, :idle], rates[:, :idle], order="F")
    return least(per_rate)[1]


def _next_corner(
    costs: np.ndarray, rates: np.ndarray, jobs: np.ndarray, rate: np.ndarray, cost: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(column, its rate, its cost) with which each of ``jobs`` gets more at the least cost per rate.

    ``costs``, ``rates``: (n, w + 1) of all jobs; ``rate``, ``cost``: (jobs,) what those of ``jobs`` have.
    """
    idle = rates.shape[1] - 1
    rise = np.full((len(jobs), idle), np.inf, order="F")
    for j in range(idle):
        faster = rates[:, j].take(jobs)
        faster -= rate
        dearer = costs[:, j].take(jobs)
        dearer -= cost
        np.divide(dearer, faster, out=rise[:, j], where=faster > 0)
    best = least(rise)[1]
    return best, rates[jobs, best], costs[jobs, best]


def bound_of(rows: Rows, prices: np.ndarray, level: np.ndarray) -> tuple[float, np.ndarray]:
    """The bound that any multipliers prove, and the mu (n,) that go with them: one pass over the rows."""
    gains = np.multiply(level[:, None], rows.rates)
    gains -= rows.costs(prices)
    if rows.value is not None:
        gains += rows.value
    # A missing column has neither rate nor value, so it gains nothing.
    time = np.maximum(gains.max(axis=1), 0.0)
    available = float(time.sum() + prices @ rows.capacity) - dot(level, rows.base)
    if not rows.gain:
        return available, time
    total = dot(level, rows.slope) + float(prices @ rows.lift)
    return (available / total if total > 0 else float("inf")), time


def in_units_of_t(rows: Rows, at: Response) -> Response:
    """The same response, with prices scaled so that a unit of t costs 1; unchanged where there is no t."""
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


SMALL = 1e-11
"""Prices of types without one, as a part of the usual one."""
NONE = 1e-9
"""A price below this part of the usual one is none."""
SAMPLE = 5000
STEPS, STEP = 40, 0.3
"""Prices change by this power of a load relative to the median."""
LEAST_LOAD = 0.1
"""A type's load counts as at least this part of it."""


def balanced_prices(rows: Rows, prices: np.ndarray, t: float, usual: float) -> np.ndarray | None:
    """``prices`` (k,) with small ones where there were none; None: the answers to them do not fit there.

    Where one type alone limits, as where one gang fills a pool, all other prices are 0, and thousands of jobs
    tie between the other types. Prices so small that they change the bound by less than the search's
    tolerance decide for them; here such prices are looked for that load these types alike.

    ``prices``: at which jobs tie; ``t``: of the demands; ``usual``: the price of a GPU, about.
    """
    left = rows.capacity - rows.lift * t
    free = (prices <= NONE * usual) & (left > 0)
    if not free.any():
        return None
    chosen, weight = stratified(rows.gpus, np.zeros(len(rows), dtype=np.intp), np.arange(len(rows)), SAMPLE)
    some = rows.take(chosen, capacity=rows.capacity, lift=rows.lift).standing_for(weight)
    found, highest = prices.copy(), SMALL * usual
    found[free] = np.clip(highest * np.median(left[free]) / left[free], 0.01 * highest, highest)
    for _ in range(STEPS):
        load = respond(some, found, t).used(some)[free] / left[free]
        if load.max() <= 1.0 and (respond(rows, found, t).used(rows)[free] <= left[free]).all():
            return found
        load = np.maximum(load, LEAST_LOAD)
        found[free] *= (load / np.median(load)) ** STEP
        found[free] *= highest / found[free].max()
    return None
