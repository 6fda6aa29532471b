"""Proportionally fair shares (Nash welfare): by Clarabel, and by prices.

    maximise    sum_m w_m log throughput(m, x)
    subject to  time_m(x) <= 1, gpus_j(x) <= capacity_j, x >= 0

as a cone program: with u_m <= log v_m written (u_m, 1, v_m) in the exponential cone. Jobs that have no
column do not count. Speeds are taken relative to each job's fastest, which moves the objective by a
constant.

The bound on the optimum is computed here from the prices p of the capacity rows, not taken from the
solver: by weak duality, for any p >= 0 and lambda > 0,

    sum_m w_m log v_m <= p . capacity + sum_m ( w_m log(w_m / lambda_m) - w_m
                                                + max(0, max_j lambda_m R_mj - gpus_m p_j) )

and the best lambda_m for given p, a convex function of one variable for each job, is found by halving.

Thousands of jobs have their prices by Newton's steps on a smoothed dual. Given prices p of the GPU types, a
job with weight w maximises w log(speed) less the cost of its GPUs. At temperature tau_m = T w_m it spreads
its time as

    s_mj  proportional to  exp((lambda_m rate_mj - gpus_m p_j) / tau_m),  idling: exp(0),

with lambda_m = w_m / speed_m, a root of one unknown for each job. The dual is then smooth in the k prices,
with gradient and Hessian in closed form; the temperature falls step by step. The shares are those of the last
temperature, scaled into the limits; how far they are from the optimum is proven by
:func:`gap_per_weight`, from the prices alone.
"""

import dataclasses
from typing import Any

import clarabel  # type: ignore[import-untyped]
import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers.linear import SolverError

HALVINGS = 60
"""An interval of lambda is halved this often: to the last bits of a float."""

LONGEST_STEPS = (0.99, 0.9, 0.7)
"""Parts of the way to the border of the cones that Clarabel goes in one step; the next where it is stuck."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NashShares:
    """Proportionally fair shares.

    Attributes:
        x: (columns,) shares; every limit holds exactly.
        prices: (k,) multipliers of the capacities: increase of the sum of w log v per additional GPU.
    """

    x: np.ndarray
    prices: np.ndarray


def nash_shares(instance: Instance) -> NashShares:
    """The optimal shares; pairs are not supported. Raises SolverError: Clarabel did not reach its optimum."""
    from scipy import sparse

    columns, k = instance.columns, len(instance.capacity)
    jobs, row = np.unique(columns.first, return_inverse=True)
    c, n = len(columns), len(jobs)
    here = np.arange(c)
    # Variables x (c), u (n). Rows: time (n), capacity (k), x >= 0 (c), then (u_m, 1, v_m) for each job.
    taking, kind, gpus = columns.entries()
    limits = sparse.coo_matrix(
        (
            np.concatenate([np.ones(c), gpus, -np.ones(c)]),
            (np.concatenate([row, n + kind, n + k + here]), np.concatenate([here, taking, here])),
        ),
        shape=(n + k + c, c + n),
    )
    relative = columns.rate_first / instance.fastest[columns.first]
    cones = sparse.coo_matrix(
        (
            np.concatenate([-np.ones(n), -relative]),
            (np.concatenate([3 * np.arange(n), 3 * row + 2]), np.concatenate([c + np.arange(n), here])),
        ),
        shape=(3 * n, c + n),
    )
    right = np.concatenate([np.ones(n), instance.capacity, np.zeros(c), np.tile([0.0, 1.0, 0.0], n)])
    unit = float(instance.weights[jobs].mean())
    loss = np.concatenate([np.zeros(c), -instance.weights[jobs] / unit])
    matrix = sparse.vstack([limits, cones]).tocsc()
    for longest in LONGEST_STEPS:
        solution = _solved(loss, matrix, right, longest, n)
        if str(solution.status) == "Solved":
            break
    if str(solution.status) not in ("Solved", "AlmostSolved"):
        raise SolverError(f"Clarabel ended with {solution.status}")
    return NashShares(
        x=instance.feasible(np.array(solution.x)[:c]),
        prices=np.maximum(np.array(solution.z)[n : n + k] * unit, 0.0),
    )


def _solved(loss: np.ndarray, matrix: Any, right: np.ndarray, longest: float, jobs: int) -> Any:
    """Clarabel's solution; the last rows of ``matrix`` are those of the ``jobs`` exponential cones."""
    from scipy import sparse

    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    settings.max_step_fraction = longest
    rows, width = matrix.shape
    cones = [clarabel.NonnegativeConeT(rows - 3 * jobs), *([clarabel.ExponentialConeT()] * jobs)]
    return clarabel.DefaultSolver(
        sparse.csc_matrix((width, width)), loss, matrix, right, cones, settings
    ).solve()


def gap_per_weight(instance: Instance, found: NashShares) -> float:
    """Proven distance of ``found.x`` to the optimum, in sum_m w_m log v_m per sum_m w_m.

    So the geometric mean of the speeds, weighted, is within this part of the largest possible.
    """
    runs, columns = instance.runnable, instance.columns
    weights = instance.weights[runs]
    relative = np.zeros((len(runs), int(columns.place.max(initial=0)) + 1))
    costs = np.zeros_like(relative)
    relative[columns.first, columns.place] = columns.rate_first / instance.fastest[columns.first]
    costs[columns.first, columns.place] = columns.cost(found.prices)
    bound = found.prices @ instance.capacity + _best_responses(relative[runs], weights, costs[runs])
    reached = instance.throughput(found.x)[runs] / instance.fastest[runs]
    value = weights @ np.log(reached) if reached.all() else -np.inf
    return max(0.0, float(bound - value)) / float(weights.sum())


def _best_responses(relative: np.ndarray, weights: np.ndarray, costs: np.ndarray) -> float:
    """Sum of the jobs' terms of the bound, each at its best lambda, for full time's ``costs`` (n, k)."""
    usable = relative > 0
    slowest = np.where(usable, relative, np.inf).min(axis=1)
    cheapest = np.where(usable, costs / np.where(usable, relative, 1.0), np.inf).min(axis=1)
    # Speed is at most 1, so lambda = w / v is at least w; from ``high`` on the term grows.
    low, high = weights.copy(), 2.0 * np.maximum(weights / slowest, cheapest)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        surplus = np.where(usable, middle[:, None] * relative - costs, -np.inf)
        best = surplus.argmax(axis=1)[:, None]
        speed = np.where(
            np.take_along_axis(surplus, best, 1) > 0, np.take_along_axis(relative, best, 1), 0.0
        )[:, 0]
        rising = speed > weights / middle
        low, high = np.where(rising, low, middle), np.where(rising, middle, high)
    surplus = np.where(usable, high[:, None] * relative - costs, 0.0)
    terms = weights * np.log(weights / high) - weights + np.maximum(surplus.max(axis=1), 0.0)
    return float(terms.sum())


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
    """(Newton's changes of k prices, by how much the function falls along them at first).

    The Hessian is scaled to a diagonal of ones before it is solved: prices may differ by magnitudes.
    """
    unit = 1.0 / np.sqrt(np.maximum(np.diag(hessian), 1e-300))
    system = hessian * unit[:, None] * unit + 1e-12 * np.eye(len(gradient))
    change = -np.linalg.solve(system, gradient * unit) * unit
    return change, float(-gradient @ change)
