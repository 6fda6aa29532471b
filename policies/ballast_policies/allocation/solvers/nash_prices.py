"""Proportionally fair shares for thousands of jobs: prices by Newton's steps on a smoothed dual.

Given prices p of the GPU types, a job with weight w maximises w log(speed) less the cost of its GPUs. At
temperature tau_m = T w_m it spreads its time as

    s_mj  proportional to  exp((lambda_m rate_mj - gpus_m p_j) / tau_m),  idling: exp(0),

with lambda_m = w_m / speed_m, a root of one unknown for each job. The dual is then smooth in the k prices,
with gradient and Hessian in closed form; the temperature falls step by step. The shares are those of the last
temperature, scaled into the limits; how far they are from the optimum is proven by
``nash.gap_per_weight``, from the prices alone.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers.nash import NashShares

TEMPERATURES = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
BARRIER = 0.1
MAX_STEPS = 15
MAX_ROOT_STEPS = 60
ROOT_TOLERANCE = 1e-7
LONGEST_JUMP = 2.0
"""A root step changes lambda by this power of e at most."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _At:
    """The dual at some prices: value, shares (k, n), mean and variance of the rate under them, lambda."""

    value: float
    shares: np.ndarray
    speed: np.ndarray
    spread: np.ndarray
    level: np.ndarray


def nash_shares_by_prices(instance: Instance) -> NashShares:
    """Nearly optimal shares and prices; pairs are not supported."""
    runs, some = np.flatnonzero(instance.runnable), np.flatnonzero(instance.capacity > 0)
    T = instance.T[np.ix_(runs, some)]
    rates = np.ascontiguousarray((T / T.max(axis=1, keepdims=True)).T)
    weights, gpus, capacity = instance.weights[runs], instance.gpus[runs], instance.capacity[some]
    prices = np.full(len(some), weights.sum() / capacity.sum())
    level = weights * max(1.0, gpus.sum() / capacity.sum())
    for temperature in TEMPERATURES:
        prices, at = _minimise(rates, weights, gpus, capacity, prices, level, temperature)
        level = at.level
    X, every = np.zeros_like(instance.T), np.zeros(len(instance.capacity))
    X[np.ix_(runs, some)] = at.shares.T
    every[some] = prices
    columns = instance.columns
    return NashShares(x=instance.feasible(X[columns.first, columns.kind]), prices=every)


def _minimise(
    rates: np.ndarray,
    weights: np.ndarray,
    gpus: np.ndarray,
    capacity: np.ndarray,
    prices: np.ndarray,
    level: np.ndarray,
    temperature: float,
) -> tuple[np.ndarray, _At]:
    """Newton's steps with halving at one temperature."""
    k, tau = len(prices), temperature * weights
    kappa = BARRIER * temperature * float(weights.sum()) / k

    def dual(prices: np.ndarray, level: np.ndarray) -> _At:
        costs = np.where(rates > 0, gpus * prices[:, None] / tau, np.inf)
        at = _respond(rates, weights, tau, costs, level)
        value = at.value + float(prices @ capacity) - kappa * float(np.log(prices).sum())
        return dataclasses.replace(at, value=value)

    at = dual(prices, level)
    for _ in range(MAX_STEPS):
        gradient = capacity - at.shares @ gpus - kappa / prices
        weight = gpus**2 / tau
        along = at.shares * (rates - at.speed)
        hessian = -(at.shares * weight) @ at.shares.T
        hessian -= (along * (weight / np.maximum(at.spread + tau * at.speed / at.level, 1e-300))) @ along.T
        hessian[np.diag_indices(k)] += at.shares @ weight + kappa / prices**2
        change, falls = _newton_direction(gradient, hessian)
        if not falls > 1e-2 * kappa * k:
            break
        step = min(1.0, 0.9 / max(float((-change / prices).max()), 1e-300))
        while True:
            tried = dual(prices + step * change, at.level)
            if tried.value < at.value or step < 1e-4:
                break
            step *= 0.4
        prices, at = prices + step * change, tried
    return prices, at


def _respond(
    rates: np.ndarray, weights: np.ndarray, tau: np.ndarray, costs: np.ndarray, level: np.ndarray
) -> _At:
    """Best responses: lambda by Newton's steps on its logarithm, inside a bracket."""
    n = len(weights)
    level, low, high = level.copy(), weights.copy(), np.full(n, np.inf)
    shares, speed, spread, entropy = np.empty_like(rates), np.empty(n), np.empty(n), np.empty(n)
    active = np.arange(n)
    for _ in range(MAX_ROOT_STEPS):
        at, mine = level[active], rates[:, active]
        theirs = (at / tau[active]) * mine - costs[:, active]
        top = np.maximum(theirs.max(axis=0), 0.0)
        np.exp(theirs - top, out=theirs)
        together = np.exp(-top) + theirs.sum(axis=0)
        theirs /= together
        mean = (mine * theirs).sum(axis=0)
        variance = np.maximum((mine**2 * theirs).sum(axis=0) - mean**2, 0.0)
        shares[:, active], speed[active], spread[active] = theirs, mean, variance
        entropy[active] = top + np.log(together)
        over = at * mean - weights[active]
        low[active] = np.where(over < 0, at, low[active])
        high[active] = np.where(over > 0, at, high[active])
        left = np.abs(over) > ROOT_TOLERANCE * weights[active]
        if not left.any():
            break
        active, at, mean, variance = active[left], at[left], mean[left], variance[left]
        slope = 1.0 + at * variance / (tau[active] * np.maximum(mean, 1e-300))
        jump = -np.log(np.maximum(at * mean, 1e-300) / weights[active]) / slope
        newton = at * np.exp(np.clip(jump, -LONGEST_JUMP, LONGEST_JUMP))
        below, above = low[active], high[active]
        middle = np.where(np.isfinite(above), np.sqrt(below * above), 4.0 * at)
        level[active] = np.where((newton > below) & (newton < above), newton, middle)
    value = float((weights * np.log(speed) + tau * entropy - level * speed).sum())
    return _At(value=value, shares=shares, speed=speed, spread=spread, level=level)


def _newton_direction(gradient: np.ndarray, hessian: np.ndarray) -> tuple[np.ndarray, float]:
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
