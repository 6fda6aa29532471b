"""Prices of places in queues, by steps on the dual smoothed by entropy (``matching``)."""

import numpy as np

from ballast_policies.allocation.solvers.queues.places import Places
from ballast_policies.allocation.solvers.smoothed_dual import newton_direction

TEMPERATURES = (0.1, 0.03, 0.01, 0.003, 0.001)
NEAREST = 12
REACH = 0.25
MOST_SELECTIONS = 6
BARRIER = 0.1
MAX_STEPS = 20
UNUSABLE = 1e30
"""Cost of a place that a job cannot have, in usual lengths."""
LONG_QUEUES = ((2.0, 25), (0.5, 25), (0.1, 35))
"""Temperatures, as parts of a job's shortest work, and most steps at each, where queues are long."""
MOST_COSTS = 300_000
"""Jobs x places that are looked at there; of more, jobs of all lengths stand for the others."""


def smoothed_queue_prices(
    work: np.ndarray, size: np.ndarray, places: Places, first: np.ndarray
) -> np.ndarray:
    """(places,) nearly optimal prices, from ``first``."""
    shortest = work.min(axis=1)
    prices: np.ndarray = np.maximum(first, 1e-3 * float(np.median(shortest)))
    usual = float(np.median(shortest))
    for temperature in TEMPERATURES:
        for _ in range(MOST_SELECTIONS):
            columns, costs = nearest_places(work, places, prices)
            before = prices
            # Beyond this, other places than those selected come into question.
            most = REACH * (prices + usual)
            prices = minimise_dual(columns, costs, size, places, prices, temperature * shortest, most)
            if (np.abs(prices - before) < 0.5 * most).all():
                break
    return prices


def sampled_queue_prices(work: np.ndarray, places: Places, first: np.ndarray) -> np.ndarray:
    """(places,) good prices, from ``first``, where a place has few jobs to choose from.

    The best place of a job may be far from where these prices have it now, so all places count at each step.
    """
    from scipy.optimize import minimize

    order = np.argsort(work.min(axis=1), kind="stable")
    many = min(len(order), max(1, MOST_COSTS // len(first)))
    jobs = work[order[((np.arange(many) + 0.5) * len(order) / many).astype(int)]]
    each = len(order) / many
    shortest = jobs.min(axis=1)
    unit = float(np.median(shortest))
    costs = places.costs(jobs) / unit
    costs = np.where(np.isfinite(costs), costs, UNUSABLE)
    prices = first / unit
    for temperature, steps in LONG_QUEUES:
        tau = temperature * shortest / unit
        scaled = costs / tau[:, None]

        def dual(prices: np.ndarray, tau: np.ndarray, scaled: np.ndarray) -> tuple[float, np.ndarray]:
            shares = scaled + np.multiply.outer(1.0 / tau, prices)
            least = shares.min(axis=1)
            np.subtract(least[:, None], shares, out=shares)
            np.exp(shares, out=shares)
            together = shares.sum(axis=1)
            value = places.count @ prices - each * float((tau * (least - np.log(together))).sum())
            return float(value), places.count - each * ((1.0 / together) @ shares)

        found = minimize(
            dual,
            prices,
            args=(tau, scaled),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, None)] * len(prices),
            options={"maxiter": steps, "maxcor": 20},
        )
        prices = found.x
    better: np.ndarray = prices * unit
    return better


def nearest_places(work: np.ndarray, places: Places, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """((n, NEAREST) each): the places that suit each job best at these prices, and their costs."""
    costs = places.costs(work)
    if costs.shape[1] <= NEAREST:
        columns = np.broadcast_to(np.arange(costs.shape[1]), costs.shape)
    else:
        columns = np.argpartition(costs + prices, NEAREST, axis=1)[:, :NEAREST]
    return columns, np.take_along_axis(costs, columns, axis=1)


def minimise_dual(
    columns: np.ndarray,
    costs: np.ndarray,
    size: np.ndarray,
    places: Places,
    prices: np.ndarray,
    tau: np.ndarray,
    most: np.ndarray,
) -> np.ndarray:
    """Newton's steps with halving at one temperature, each job on ``columns`` (n, some) only.

    Prices change by no more than ``most`` (places,).
    """
    from scipy import sparse

    n, p, some = len(costs), len(prices), columns.shape[1]
    scaled, flat = costs / tau[:, None], columns.ravel()
    kappa = BARRIER * float(size @ tau) / p
    starts = np.arange(n + 1) * some

    def at(prices: np.ndarray) -> tuple[float, np.ndarray]:
        shares = -scaled - prices[columns] / tau[:, None]
        top = shares.max(axis=1)
        shares -= top[:, None]
        np.exp(shares, out=shares)
        together = shares.sum(axis=1)
        shares /= together[:, None]
        value = prices @ places.count + (size * tau) @ (top + np.log(together))
        return float(value - kappa * np.log(prices).sum()), shares

    def sums(weight: np.ndarray, shares: np.ndarray) -> np.ndarray:
        total: np.ndarray = np.bincount(flat, weights=(weight[:, None] * shares).ravel(), minlength=p)
        return total

    first = prices
    value, shares = at(prices)
    for _ in range(MAX_STEPS):
        gradient = places.count - sums(size, shares) - kappa / prices
        weight = size / tau
        table = sparse.csr_matrix((shares.ravel(), flat, starts), shape=(n, p))
        weighted = sparse.csr_matrix(((shares * weight[:, None]).ravel(), flat, starts), shape=(n, p))
        hessian = -np.asarray((table.T @ weighted).todense())
        hessian[np.diag_indices(p)] += sums(weight, shares) + kappa / prices**2
        change, falls = newton_direction(gradient, hessian)
        if not falls > 1e-2 * kappa * p:
            break
        step = min(1.0, 0.9 / max(float((-change / prices).max()), 1e-300))
        while True:
            following = np.clip(prices + step * change, first - most, first + most)
            tried, theirs = at(following)
            if tried < value or step < 1e-3:
                break
            step *= 0.4
        stuck = not tried < value - 1e-3 * kappa * p
        prices, value, shares = following, tried, theirs
        if stuck:
            break
    return prices
