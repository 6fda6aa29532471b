"""AlloX's matching of jobs to places in queues at the least total time, with a bound on the optimum.

A place (j, i) is the i-th from last in the queue of one of type j's GPUs; there are capacity_j of each.

    minimise  sum_{m, j, i}  i work_mj y_mji     every job in one place, at most capacity_j in places (j, i)

is a transportation problem with a row for each (j, i), a few hundred for thousands of jobs, and its dual has
one price v_ji >= 0 for each. Any such prices prove

    least total >= sum_m min_{j, i} (i work_mj + v_ji) - sum_{j, i} capacity_j v_ji.

Up to ``HUNGARIAN`` jobs (``methods``): the Hungarian method. Beyond:

1. A greedy matching, longest job first, tells how long the queues get, and gives first prices.
2. Newton's steps on a dual smoothed by entropy make the prices nearly exact.
3. A linear program of the jobs near a tie, grown until no other job would change, is exact: its vertices are
   whole numbers. Jobs with the same work count as one row with their number.

Where a place has fewer than ``JOBS_PER_PLACE`` jobs to choose from (queues of dozens of jobs at each of a few
GPUs), prices are too coarse for that: the best of several matchings is returned, with the bound on its
distance from the optimum. Where this is above ``FAR``, steps over all places at once find better prices.
"""

import dataclasses

import highspy
import numpy as np

from ballast_policies.allocation.solvers.methods import (
    ASSIGNMENT,
    JOBS_PER_PLACE,
    MATCHINGS,
    PLACE_PRICES,
    Size,
    Task,
    choose,
    fell_back,
)
from ballast_policies.allocation.solvers.queues.places import (
    Places,
    best_places,
    greedy_matching,
    in_blocks,
    in_order,
    matching_bound,
    one_by_one,
    places_of,
    prices_between,
    prices_of_matching,
)
from ballast_policies.allocation.solvers.queues.prices import sampled_queue_prices, smoothed_queue_prices
from ballast_policies.allocation.solvers.simplex import optimum, set_entries

FAR = 0.01
TIES = 8
WALL = 0.1
MAX_ROUNDS = 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matching:
    """A place for each job.

    Attributes:
        kind: (n,) GPU type.
        place: (n,) place from last, 1 = last.
        total: sum of place times work.
        bound: proven lower bound on the least total.
    """

    kind: np.ndarray
    place: np.ndarray
    total: float
    bound: float


def match(work: np.ndarray, capacity: np.ndarray) -> Matching:
    """A matching of all jobs and a bound on the least total.

    Args:
        work: (n, k) seconds of one GPU; infinite where the job cannot run. Every job can run somewhere.
        capacity: (k,) whole GPUs of each type.
    """
    n = len(work)
    kind, place = greedy_matching(work, capacity)
    places = places_of(kind, place, capacity)
    method = choose(Task.QUEUES, Size(rows=n, places=len(places.kind)))
    if method is ASSIGNMENT:
        kind, prices = _by_assignment(work, places)
        return _finished(work, capacity, kind, places, prices)
    rows, of, size = np.unique(work, axis=0, return_inverse=True, return_counts=True)
    size = size.astype(float)
    first = prices_of_matching(work, kind, place, places)
    if method is MATCHINGS:
        some, at = in_blocks(places, n // JOBS_PER_PLACE)
        priced = prices_between(places, some, smoothed_queue_prices(rows, size, some, first[at]))
        _, chosen = best_places(work, places, priced)
        tried, _ = in_order(work, chosen, capacity)
        _, place = in_order(work, tried, capacity)
        longer = places_of(tried, place, capacity)
        found = [
            _finished(work, capacity, kind, places, first),
            _finished(work, capacity, kind, places, priced),
            _finished(work, capacity, tried, longer, prices_of_matching(work, tried, place, longer)),
        ]
        if _best(found).total > (1 + FAR) * _best(found).bound:
            priced = sampled_queue_prices(work, places, first)
            _, chosen = best_places(work, places, priced)
            found.append(_finished(work, capacity, chosen, places, priced))
        return _best(found)
    prices = smoothed_queue_prices(rows, size, places, first)
    exact = _exact(rows, size, places, prices)
    if exact is None:
        fell_back(PLACE_PRICES, "the program of the jobs near a tie did not close", MATCHINGS)
        return _finished(work, capacity, kind, places, prices)
    amounts, prices = exact
    return _finished(work, capacity, one_by_one(amounts, of.ravel(), places), places, prices)


def _best(found: list[Matching]) -> Matching:
    """The least total, with the greatest of the bounds."""
    best = min(found, key=lambda matching: matching.total)
    return dataclasses.replace(best, bound=min(best.total, max(matching.bound for matching in found)))


def _finished(
    work: np.ndarray, capacity: np.ndarray, kind: np.ndarray, places: Places, prices: np.ndarray
) -> Matching:
    kind, place = in_order(work, kind, capacity)
    total = float((work[np.arange(len(work)), kind] * place).sum())
    return Matching(
        kind=kind, place=place, total=total, bound=min(matching_bound(work, places, prices), total)
    )


def _by_assignment(work: np.ndarray, places: Places) -> tuple[np.ndarray, np.ndarray]:
    """(type of each job, prices of the places) of a small instance, by the Hungarian method."""
    from scipy.optimize import linear_sum_assignment

    costs = places.costs(work)
    finite = np.isfinite(costs)
    costs = np.where(finite, costs, 2.0 * len(work) * (1.0 + costs[finite].max()))
    slot = np.repeat(np.arange(len(places.kind)), places.count.astype(np.int64))
    _, chosen = linear_sum_assignment(costs[:, slot])
    held = slot[chosen]
    # The price of a place: the cost of the cheapest chain of moves that ends at a free place.
    order = np.argsort(held, kind="stable")
    used, begin = np.unique(held[order], return_index=True)
    extra = costs[order] - np.take_along_axis(costs, held[:, None], axis=1)[order]
    moves = np.minimum.reduceat(extra, begin, axis=0)
    full = np.bincount(held, minlength=len(places.kind)) == places.count
    prices = np.where(full, np.inf, 0.0)
    prices[used[~full[used]]] = 0.0
    full_used = np.flatnonzero(full[used])
    for _ in range(len(places.kind)):
        following = prices.copy()
        following[used[full_used]] = np.maximum((moves[full_used] + prices).min(axis=1), 0.0)
        if (following == prices).all():
            break
        prices = following
    return places.kind[held], np.where(np.isfinite(prices), prices, 0.0)


def _exact(
    work: np.ndarray, size: np.ndarray, places: Places, prices: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """((rows, places) how many of each row where, optimal prices); None where it does not close."""
    shortest = work.min(axis=1)
    costs = np.where(np.isfinite(work), work, np.inf)[:, places.kind] * places.number
    everyone = np.arange(len(work))
    reduced = costs + prices
    held = reduced.argmin(axis=1)
    reduced -= reduced[everyone, held][:, None]
    reduced[everyone, held] = np.inf
    second = np.sort(reduced.min(axis=1) / shortest)
    window = second[min(TIES * len(prices), len(second) - 1)]
    near = reduced <= window * shortest[:, None]
    near[everyone, held] = True
    free = near.sum(axis=1) > 1
    slack = WALL * float(np.median(shortest))
    for _ in range(MAX_ROUNDS):
        amounts = np.zeros_like(costs)
        amounts[everyone[~free], held[~free]] = size[~free]
        walls = np.maximum(prices * (1 - WALL) - slack, 0.0), prices * (1 + WALL) + slack
        solved = _small(costs, size, places, near, np.flatnonzero(free), amounts, walls)
        if solved is None:
            return None
        amounts, prices, beyond = solved
        reduced = costs + prices
        least = reduced.min(axis=1)
        # Cost of each row against its best; a free row may lack the best column.
        paid = np.where(free, np.where(near, reduced, np.inf).min(axis=1), reduced[everyone, held])
        wrong = paid - least > 1e-9 * shortest
        if not wrong.any() and beyond < 1e-6:
            return np.rint(amounts), prices
        free |= wrong
        near[wrong] |= reduced[wrong] <= least[wrong][:, None] + 1e-3 * shortest[wrong][:, None]
    return None


def _small(
    costs: np.ndarray,
    size: np.ndarray,
    places: Places,
    near: np.ndarray,
    free: np.ndarray,
    amounts: np.ndarray,
    walls: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, float] | None:
    """(amounts, prices, places beyond) with the rows ``free`` in a linear program over ``near``.

    Prices stay within ``walls``: places can be had at the upper one and given back at the lower one.
    """
    f, p = len(free), len(places.kind)
    left = places.count - amounts.sum(axis=0)
    row, place = np.nonzero(near[free])
    c = len(row)
    each = np.arange(p)
    column = np.concatenate([np.arange(c), np.arange(c), c + each, c + p + each])
    index = np.concatenate([row, f + place, f + each, f + each])
    entry = np.concatenate([np.ones(2 * c), -np.ones(p), np.ones(p)])
    lp, infinite = highspy.HighsLp(), highspy.kHighsInf
    lp.num_col_, lp.num_row_ = c + 2 * p, f + p
    unit = float(walls[1].max()) / 1e4
    lp.col_cost_ = np.concatenate([costs[free[row], place], walls[1], -walls[0]]) / unit
    lp.col_lower_, lp.col_upper_ = np.zeros(c + 2 * p), np.full(c + 2 * p, infinite)
    lp.row_lower_ = np.concatenate([size[free], left])
    lp.row_upper_ = np.concatenate([size[free], left])
    set_entries(lp, index, column, entry)
    found = optimum(lp)
    if found is None:
        return None
    x, duals = found
    amounts[free[row], place] = x[:c]
    prices = np.maximum(-duals[f:], 0.0) * unit
    held_back = np.where(walls[0] > 0, x[c + p :], 0.0)
    return amounts, prices, float(max(x[c : c + p].max(initial=0.0), held_back.max(initial=0.0)))
