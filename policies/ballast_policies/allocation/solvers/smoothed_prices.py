"""Prices of the GPU types from a smoothed dual, for thousands of jobs, to a few parts in 100,000.

Given prices p of the types, each job's best use of its time is known on its own, so the dual of the program
of ``dense_program`` (without gain) is a convex function of k prices. It has a kink wherever a job is
indifferent between two types. Entropy smooths them: at temperature tau_m a job spreads its time as

    s_mj  proportional to  exp((value_mj + lambda_m rate_mj - gpus_m p_j) / tau_m),      idling: exp(0),

with the least lambda_m >= 0 that meets its demand. The smoothed dual

    F(p) = p . capacity + sum_m [ tau_m log sum_j exp(...) - lambda_m base_m ] - kappa sum_j log p_j

has gradient and k x k Hessian in closed form, one pass over the jobs for each Newton step. The temperature
falls from 30 % of a price to ``last``, each time from the prices before. Nothing here needs to be exact:
``restricted_program`` computes the exact optimum, and any prices give a valid bound.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.dense_program import Rows

FIRST_TEMPERATURE = 0.3
COOLING = 5.0
LOWEST_TEMPERATURE = 1e-5
BARRIER = 0.1
"""kappa per type, as a part of temperature times a type's mean worth of GPUs."""
MAX_STEPS = 25
MAX_INNER_STEPS = 60
DEMAND_TOLERANCE = 1e-7
"""Part of full speed by which the smoothed response may miss a demand."""
BELOW_FULL_SPEED = 1e-6
"""A smoothed response never quite reaches full speed; demands are lowered to this part below it."""
TO_BOUNDARY = 0.9


@dataclasses.dataclass(slots=True, eq=False)
class _Dual:
    """The smoothed dual of some rows; tables are (k, n), a job a column."""

    rows: Rows
    worth: np.ndarray
    rates: np.ndarray
    demand: np.ndarray
    tau: np.ndarray
    kappa: float
    level: np.ndarray

    def at(self, prices: np.ndarray) -> tuple[float, np.ndarray]:
        """(F, (k, n) shares) at prices; ``level`` becomes the lambda of the shares."""
        net = self.worth - self.rows.gpus * prices[:, None]
        total, shares = self._spread(net, self.tau)
        short = self.demand > (self.rates * shares).sum(axis=0) if self.demand.any() else self.demand > 0
        bound, level = np.flatnonzero(short), np.zeros(len(self.tau))
        if len(bound):
            level[bound] = self._levels(net[:, bound], bound)
            some, theirs = self._spread(net[:, bound] + level[bound] * self.rates[:, bound], self.tau[bound])
            total[bound] = some - level[bound] * self.demand[bound]
            shares[:, bound] = theirs
        self.level = level
        value = float(prices @ self.rows.capacity + total.sum() - self.kappa * np.log(prices).sum())
        return value, shares

    @staticmethod
    def _spread(net: np.ndarray, tau: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tau log sum exp(net / tau), shares) with idling at 0."""
        shares = net / tau
        top = np.maximum(shares.max(axis=0), 0.0)
        shares -= top
        np.exp(shares, out=shares)
        together = np.exp(-top) + shares.sum(axis=0)
        shares /= together
        return tau * (top + np.log(together)), shares

    def _levels(self, net: np.ndarray, jobs: np.ndarray) -> np.ndarray:
        """Lambda of ``jobs`` at which each just meets its demand: Newton's steps inside a bracket."""
        rates, tau, demand = self.rates[:, jobs], self.tau[jobs], self.demand[jobs]
        usual = tau / np.maximum(demand, 1e-12)
        low, high = np.zeros(len(jobs)), np.full(len(jobs), np.inf)
        level: np.ndarray = np.where(self.level[jobs] > 0, self.level[jobs], usual)
        active = np.arange(len(jobs))
        for _ in range(MAX_INNER_STEPS):
            at = level[active]
            _, shares = self._spread(net[:, active] + at * rates[:, active], tau[active])
            speed = (rates[:, active] * shares).sum(axis=0)
            spread = (rates[:, active] ** 2 * shares).sum(axis=0) - speed**2
            miss = demand[active] - speed
            low[active] = np.where(miss > 0, at, low[active])
            high[active] = np.where(miss > 0, high[active], at)
            left = np.abs(miss) > DEMAND_TOLERANCE
            if not left.any():
                break
            active, at, miss, spread = active[left], at[left], miss[left], spread[left]
            newton = at + tau[active] * miss / np.maximum(spread, 1e-30)
            below, above = low[active], high[active]
            middle = np.where(np.isfinite(above), 0.5 * (below + above), 4.0 * at + usual[active])
            inside = (newton > below) & (newton < np.minimum(above, 8.0 * at + 8.0 * usual[active]))
            level[active] = np.where(inside, newton, middle)
        return level

    def gradient(self, prices: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """(k,) GPUs left of each type, less the barrier's pull."""
        left: np.ndarray = self.rows.capacity - shares @ self.rows.gpus - self.kappa / prices
        return left

    def hessian(self, prices: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """(k, k)."""
        weight = self.rows.gpus**2 / self.tau
        hessian: np.ndarray = -(shares * weight) @ shares.T
        hessian[np.diag_indices(len(prices))] += shares @ weight + self.kappa / prices**2
        bound = np.flatnonzero(self.level > 0)
        if len(bound):
            rates, theirs = self.rates[:, bound], shares[:, bound]
            speed = (rates * theirs).sum(axis=0)
            along = theirs * (rates - speed)
            spread = np.maximum((along * rates).sum(axis=0), 1e-30)
            hessian -= (along * (weight[bound] / spread)) @ along.T
        return hessian


def _dual(rows: Rows) -> _Dual:
    k = len(rows.capacity)
    usable = rows.usable[:, :k].T
    worth = np.zeros(usable.shape) if rows.value is None else rows.value[:, :k].T
    return _Dual(
        rows=rows,
        worth=np.where(usable, worth, -np.inf),
        rates=np.ascontiguousarray(rows.rates[:, :k].T),
        demand=np.minimum(rows.base, rows.reach * (1.0 - BELOW_FULL_SPEED)),
        tau=np.ones(len(rows)),
        kappa=1.0,
        level=np.zeros(len(rows)),
    )


def marginal_price(rows: Rows) -> float:
    """Worth per GPU of the job at which all GPUs would be taken, if all types were equally fast."""
    k = len(rows.capacity)
    worth = np.zeros(len(rows)) if rows.value is None else rows.value[:, :k].max(axis=1)
    each = worth / rows.gpus
    order = np.argsort(-each, kind="stable")
    last = np.searchsorted(np.cumsum(rows.gpus[order]), rows.capacity.sum())
    return float(max(each[order[min(int(last), len(order) - 1)]], 1e-6 * each.max(initial=0.0)))


def smoothed_prices(rows: Rows, *, last: float = LOWEST_TEMPERATURE) -> np.ndarray | None:
    """(k,) nearly optimal prices of a program without gain that has some value.

    Args:
        rows: the program; every capacity must be positive.
        last: lowest temperature, as a part of the mean price.

    Returns:
        None where the prices grow without end: the demands do not fit, or hardly.
    """
    k, capacity = len(rows.capacity), rows.capacity
    dual, unit = _dual(rows), marginal_price(rows)
    if unit <= 0:
        return None
    prices, temperature = np.full(k, unit), FIRST_TEMPERATURE
    ceiling = 1e9 * float(np.abs(dual.worth[np.isfinite(dual.worth)]).max() / rows.gpus.min())
    while True:
        usual = max(float(prices @ capacity / capacity.sum()), 1e-3 * unit)
        dual.tau = temperature * usual * rows.gpus
        dual.kappa = BARRIER * temperature * usual * float(capacity.sum()) / k
        prices = _minimise(dual, prices)
        if not np.isfinite(prices).all() or prices.max() > ceiling:
            return None
        if temperature <= last:
            return prices
        temperature = max(last, temperature / COOLING)


def newton_direction(gradient: np.ndarray, hessian: np.ndarray) -> tuple[np.ndarray, float]:
    """Newton's direction of a convex function of k prices.

    Args:
        gradient: (k,).
        hessian: (k, k), scaled to a diagonal of ones before it is solved: prices may differ by magnitudes.

    Returns:
        (changes of the prices (k,), by how much the function falls along them at first).
    """
    unit = 1.0 / np.sqrt(np.maximum(np.diag(hessian), 1e-300))
    system = hessian * unit[:, None] * unit + 1e-12 * np.eye(len(gradient))
    change = -np.linalg.solve(system, gradient * unit) * unit
    return change, float(-gradient @ change)


def _minimise(dual: _Dual, prices: np.ndarray) -> np.ndarray:
    """Newton's steps with halving, at one temperature."""
    near = dual.kappa * len(prices)
    value, shares = dual.at(prices)
    for _ in range(MAX_STEPS):
        gradient, hessian = dual.gradient(prices, shares), dual.hessian(prices, shares)
        change, falls = newton_direction(gradient, hessian)
        if not falls > 1e-3 * near:
            break
        step = min(1.0, TO_BOUNDARY / max(float((-change / prices).max()), 1e-300))
        while True:
            following = prices + step * change
            tried, theirs = dual.at(following)
            if tried <= value - 0.1 * step * falls or step < 1e-6:
                break
            step *= 0.4
        prices, value, shares = following, tried, theirs
        if step == 1.0 and falls < 0.05 * near:
            break
    return prices
