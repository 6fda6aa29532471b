"""AlloX's matching of jobs to places in queues at the least total time, with a bound on the optimum.

A place (j, i) is the i-th from last in the queue of one of type j's GPUs; there are capacity_j of each.

    minimise  sum_{m, j, i}  i work_mj y_mji     every job in one place, at most capacity_j in places (j, i)

is a transportation problem with a row for each (j, i), a few hundred for thousands of jobs, and its dual has
one price v_ji >= 0 for each. Any such prices prove

    least total >= sum_m min_{j, i} (i work_mj + v_ji) - sum_{j, i} capacity_j v_ji.

Up to ``HUNGARIAN`` jobs (``methods``): the Hungarian method. Beyond:

1. A greedy matching, longest job first, tells how long the queues get, and gives first prices.
2. Quasi-Newton steps on a dual of some jobs, smoothed by entropy, make the prices nearly exact.
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
from ballast_policies.allocation.solvers.simplex import optimum, set_entries

FAR = 0.01
TIES = 8
WALL = 0.1
MAX_ROUNDS = 30
TEMPERATURES = ((2.0, 25), (0.5, 25), (0.1, 35), (0.03, 40))
"""Temperatures, as parts of a job's shortest work, and most steps at each."""
MOST_COSTS = 300_000
"""Jobs x places that prices are found by; of more, jobs of all lengths stand for the others."""
UNUSABLE = 1e30
"""Cost of a place that a job cannot have, in usual lengths."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """All places that come into question: type, number from last and how many there are of each."""

    kind: np.ndarray
    number: np.ndarray
    count: np.ndarray

    def costs(self, work: np.ndarray) -> np.ndarray:
        """(n, places) of jobs with ``work`` (n, k)."""
        costs: np.ndarray = work[:, self.kind] * self.number
        return costs


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
    # No queue is longer than all jobs: of a type with more GPUs, the rest would be columns without a use.
    capacity = np.minimum(capacity, n)
    kind, place = _greedy_matching(work, capacity)
    places = _places_of(kind, place, capacity)
    method = choose(Task.QUEUES, Size(rows=n, places=len(places.kind)))
    if method is ASSIGNMENT:
        kind, prices = _by_assignment(work, places)
        return _finished(work, capacity, kind, places, prices)
    first = _prices_of_matching(work, kind, place, places)
    if method is PLACE_PRICES:
        prices = _smoothed_prices(work, places, first)
        rows, of, size = np.unique(work, axis=0, return_inverse=True, return_counts=True)
        exact = _exact(rows, size.astype(float), places, prices)
        if exact is not None:
            amounts, prices = exact
            return _finished(work, capacity, _one_by_one(amounts, of.ravel(), places), places, prices)
        fell_back(PLACE_PRICES, "the program of the jobs near a tie did not close", MATCHINGS)
    some, at = _in_blocks(places, n // JOBS_PER_PLACE)
    priced = _prices_between(places, some, _smoothed_prices(work, some, first[at]))
    _, chosen = _best_places(work, places, priced)
    place = _in_order(work, chosen, capacity)
    longer = _places_of(chosen, place, capacity)
    found = [
        _finished(work, capacity, kind, places, first),
        _finished(work, capacity, kind, places, priced),
        _finished(work, capacity, chosen, longer, _prices_of_matching(work, chosen, place, longer)),
    ]
    if _best(found).total > (1 + FAR) * _best(found).bound:
        priced = _smoothed_prices(work, places, first)
        _, chosen = _best_places(work, places, priced)
        found.append(_finished(work, capacity, chosen, places, priced))
    return _best(found)


def _best(found: list[Matching]) -> Matching:
    """The least total, with the greatest of the bounds."""
    best = min(found, key=lambda matching: matching.total)
    return dataclasses.replace(best, bound=min(best.total, max(matching.bound for matching in found)))


def _finished(
    work: np.ndarray, capacity: np.ndarray, kind: np.ndarray, places: Places, prices: np.ndarray
) -> Matching:
    place = _in_order(work, kind, capacity)
    total = float((work[np.arange(len(work)), kind] * place).sum())
    # The dual value of any prices >= 0.
    bound = float(_best_places(work, places, prices)[0].sum() - places.count @ prices)
    return Matching(kind=kind, place=place, total=total, bound=min(bound, total))


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
    costs = places.costs(work)
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


def _places_of(kind: np.ndarray, place: np.ndarray, capacity: np.ndarray) -> Places:
    """Places up to half as many again in each queue as the greedy matching uses."""
    kinds, numbers = [], []
    for j in np.flatnonzero(capacity > 0):
        longest = int(place[kind == j].max(initial=0))
        most = longest + max(2, longest // 2)
        kinds.append(np.full(most, j))
        numbers.append(np.arange(1, most + 1))
    every = np.concatenate(kinds)
    return Places(kind=every, number=np.concatenate(numbers).astype(float), count=capacity[every])


def _in_blocks(places: Places, few: int) -> tuple[Places, np.ndarray]:
    """About ``few`` places, further from last several together as one; and one of the original for each."""
    ratio = 1.05
    while True:
        kinds, numbers, counts, ats = [], [], [], []
        for j in np.unique(places.kind):
            here = np.flatnonzero(places.kind == j)
            start = 0
            while start < len(here):
                end = min(len(here), max(start + 1, int((start + 1) * ratio)))
                kinds.append(j)
                numbers.append(places.number[here[start:end]].mean())
                counts.append(places.count[here[start:end]].sum())
                ats.append(here[(start + end - 1) // 2])
                start = end
        if len(kinds) <= few or ratio > 4.0:
            break
        ratio *= 1.1
    blocks = Places(kind=np.array(kinds), number=np.array(numbers), count=np.array(counts))
    return blocks, np.array(ats)


def _prices_between(places: Places, blocks: Places, prices: np.ndarray) -> np.ndarray:
    """Prices of single places from those of blocks of them."""
    every = np.zeros(len(places.kind))
    for j in np.unique(places.kind):
        here, of_block = places.kind == j, blocks.kind == j
        every[here] = np.interp(places.number[here], blocks.number[of_block], prices[of_block])
    return every


def _in_order(work: np.ndarray, kind: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """(n,) the best places for these types: in each queue the longest job last."""
    place = np.zeros(len(work), dtype=np.int64)
    for j in np.unique(kind):
        mine = np.flatnonzero(kind == j)
        mine = mine[np.argsort(-work[mine, j], kind="stable")]
        place[mine] = np.arange(len(mine)) // int(capacity[j]) + 1
    return place


def _greedy_matching(work: np.ndarray, capacity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(type, place from last) of each job: the longest first, each where it adds least."""
    order = np.argsort(-work.min(axis=1), kind="stable")
    gpus = [int(c) for c in capacity]
    usable = [j for j, c in enumerate(gpus) if c]
    taken = [0] * len(gpus)
    kind, place = np.zeros(len(work), dtype=np.int64), np.zeros(len(work), dtype=np.int64)
    for m, row in zip(order.tolist(), work[order].tolist(), strict=True):
        best, at = np.inf, usable[0]
        for j in usable:
            cost = (taken[j] // gpus[j] + 1) * row[j]
            if cost < best:
                best, at = cost, j
        kind[m], place[m] = at, taken[at] // gpus[at] + 1
        taken[at] += 1
    return kind, place


def _best_places(work: np.ndarray, places: Places, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(least cost with the price, its type) of each job; places beyond those listed are free."""
    least, kind = np.full(len(work), np.inf), np.zeros(len(work), dtype=np.int64)
    some = max(1, 2_000_000 // len(places.kind))
    for start in range(0, len(work), some):
        rows = slice(start, start + some)
        total = places.costs(work[rows]) + prices
        at = total.argmin(axis=1)
        kind[rows], least[rows] = places.kind[at], total[np.arange(len(at)), at]
    for j in np.unique(places.kind):
        beyond = (places.number[places.kind == j].max() + 1) * work[:, j]
        kind[beyond < least] = j
        np.minimum(least, beyond, out=least)
    return least, kind


def _prices_of_matching(work: np.ndarray, kind: np.ndarray, place: np.ndarray, places: Places) -> np.ndarray:
    """Prices that suit a matching: moving up one place saves a job the work of its neighbour."""
    prices = np.zeros(len(places.kind))
    for j in np.unique(places.kind):
        here = np.flatnonzero(places.kind == j)
        mine = kind == j
        shortest = np.zeros(len(here) + 1)
        if mine.any():
            longest_place = int(place[mine].max())
            least = np.full(longest_place + 2, np.inf)
            np.minimum.at(least, place[mine], work[mine, j])
            shortest[: longest_place - 1] = least[1:longest_place]
        prices[here] = np.cumsum(shortest[: len(here)][::-1])[::-1]
    return prices


def _one_by_one(amounts: np.ndarray, of: np.ndarray, places: Places) -> np.ndarray:
    """Type of each job, the jobs of a row in order from the heads of the queues on."""
    row, place = np.nonzero(amounts)
    order = np.lexsort((-places.number[place], row))
    kinds = np.repeat(places.kind[place[order]], amounts[row, place][order].astype(np.int64))
    kind = np.zeros(len(of), dtype=np.int64)
    kind[np.argsort(of, kind="stable")] = kinds
    return kind


def _smoothed_prices(work: np.ndarray, places: Places, first: np.ndarray) -> np.ndarray:
    """(places,) good prices, from ``first``, by steps (L-BFGS-B) on the dual smoothed by entropy.

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
    for temperature, steps in TEMPERATURES:
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
