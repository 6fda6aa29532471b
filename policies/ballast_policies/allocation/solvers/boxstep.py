"""Large programs of jobs alone, exactly, by the prices of GPU types: the boxstep method on samples.

Given prices (and t) each job's best answer is known (``best_response``), so k prices are to be found. They
lie in a box around the current ones. Inside the box most jobs' answers cannot change; the others are
*undecided*. A small LP over the undecided jobs, with prices held to the box (``crossover``), moves the
prices to where they are best in the box (Marsten, Hogan and Blankenship, "The boxstep method for
large-scale optimization", Operations Research 23(3), 1975). Here the LP takes a stratified sample of the
undecided jobs as long as they are many, each standing for several. The sampling error is a part of the
box, so the box shrinks by a constant factor in each round, and with it the number of undecided jobs. As
soon as they all fit into the LP it is exact, which the bound at its prices proves; where it does not,
more jobs enter, in the end all of them.

A solution's prices start the next one: after an arrival or departure the last LP alone is mostly enough.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from ballast_policies.allocation.solvers.best_response import Response, bound_of, in_units_of_t, respond
from ballast_policies.allocation.solvers.crossover import (
    Box,
    CrossoverSolution,
    Decided,
    closeness,
    crossover,
    decided,
    slopes,
)
from ballast_policies.allocation.solvers.dense_program import Rows, largest, least
from ballast_policies.allocation.solvers.sampling import stratified
from ballast_policies.allocation.start import Start

FIRST_SAMPLE = 300
"""Jobs in the first LP, which knows nothing."""
LP_JOBS = 400
"""Jobs in an LP of the rounds after it."""
WARM_START_LP_JOBS = 40
"""Jobs in the LP where prices of a similar program are at hand."""
LP_GROWTH_FACTOR = 3
"""An exact LP that did not prove the optimum gets this many times more jobs."""
COARSE_JOBS = 5000
"""Jobs in the sample that gives first prices where there are many more."""
COARSE_BOX, COARSE_END = 0.05, 0.01
"""First box after that, and the box up to which the sample is solved."""
FIRST_BOX = 0.3
"""First half width of the box, as a part of the prices."""
SHRINK, GROW = 0.3, 3.0
"""The box shrinks to this part at least where the LP stayed inside it, and grows where it ended at a wall."""
FASTEST_SHRINK, WALL_SHRINK = 1e-3, 1.0
SAFETY = 2.0
"""The box's next width per movement of the prices."""
CLOSED = 6.0
"""A job this many boxes away from a change is decided for the rounds to come."""
MAX_ROUNDS = 60
TIED = 1e-10
"""Jobs this close to a change, as a part of the prices, are tied."""
JITTER = 1e-7
"""Ties are broken by changing what each column is worth at random, by this part of the prices."""
SEED = 20211024
PINNED_T_TOLERANCE = 0.1
"""A first t that is this close to the highest may turn out to be it."""
INFEASIBLE_TOLERANCE = 1e-9
"""Relative; a demand by more than this above a job's full speed cannot be met."""
GAP_TOLERANCE = 1e-10
"""Relative gap at which the search ends."""
MARGIN = 1e-9
"""A share of time may be this much below 0 or above 1, and a type's GPUs taken too much by this part."""
TRACE = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Solution of a large program.

    Attributes:
        X: (n, k) shares.
        level, time: (n,) multipliers of demand and time.
        prices: (k,) multipliers of the capacities.
        start: for the next program that is like this one.
    """

    X: np.ndarray
    level: np.ndarray
    time: np.ndarray
    prices: np.ndarray
    start: Start


def solve(rows: Rows, *, start: Start | None = None) -> Priced | None:
    """Solve the program.

    Args:
        rows: the program.
        start: of the solution of a similar one.

    Returns:
        None where it has no solution.
    """
    if (rows.base > rows.reach * (1 + INFEASIBLE_TOLERANCE)).any() and not (rows.slope > 0).any():
        return None
    if start is not None and not any(start.prices):
        start = None
    at = _sampled(rows) if start is None else _at(rows, np.array(start.prices), start.t)
    if at.t >= rows.highest * (1 - PINNED_T_TOLERANCE):
        found = _pinned(rows, at)
        if found is not None:
            return found
    if start is not None:
        return _Search(rows).run(at, lp_jobs=WARM_START_LP_JOBS)
    part = FIRST_BOX
    if len(rows) >= 4 * COARSE_JOBS:
        at, part = _coarse(rows, at), COARSE_BOX
    return _Search(rows).run(at, lp_jobs=LP_JOBS, part=part)


def _coarse(rows: Rows, at: Response) -> Response:
    """A response at the prices of a sample of some thousand jobs."""
    chosen, weight = stratified(
        rows.gpus, np.zeros(len(rows), dtype=np.intp), np.arange(len(rows)), COARSE_JOBS
    )
    some = rows.take(chosen, capacity=rows.capacity, lift=rows.lift)
    value = None if some.value is None else np.asfortranarray(some.value * weight[:, None])
    some = dataclasses.replace(some, gpus=some.gpus * weight, value=value, slope=some.slope)
    search = _Search(some)
    found = search.run(respond(some, at.prices, min(at.t, some.highest)), lp_jobs=LP_JOBS, coarse=True)
    return at if found is None else _at(rows, np.array(found.start.prices), found.start.t)


def _at(rows: Rows, prices: np.ndarray, t: float) -> Response:
    return in_units_of_t(rows, respond(rows, prices, min(t, rows.highest)))


def _sampled(rows: Rows) -> Response:
    """A response at the prices of a sample."""
    k = len(rows.capacity)
    found = _of_sample(rows)
    prices, t = (np.zeros(k), rows.highest) if found is None else (found.prices, found.t)
    if rows.gain and not prices.any():
        # One job alone limits t. The prices that tell whether all others fit, then.
        found = _of_sample(_at_highest(rows))
        prices, t = (np.ones(k) if found is None else found.prices), rows.highest
    return _at(rows, prices, t)


def _of_sample(rows: Rows) -> CrossoverSolution | None:
    """The program of a sample of all jobs."""
    n, k = len(rows), len(rows.capacity)
    chosen, weight = stratified(rows.gpus, np.zeros(n, dtype=np.intp), np.arange(n), FIRST_SAMPLE)
    active = rows.usable[chosen]
    active[:, k] = False
    walls = None
    if rows.value is not None:
        dearest = 100.0 * float((largest(rows.value) / rows.gpus).max())
        walls = (np.zeros(k), np.full(k, dearest))
    return crossover(rows, chosen, active, weight=weight, walls=walls)


def _at_highest(rows: Rows) -> Rows:
    """All demands as they are at the highest t; the new t is the part of all GPUs that can be left over."""
    return dataclasses.replace(
        rows,
        base=rows.demand(rows.highest),
        slope=np.zeros(len(rows)),
        lift=rows.capacity.copy(),
        gain=1.0,
    )


def _pinned(rows: Rows, at: Response) -> Priced | None:
    """The solution where a single job's full speed limits t and the others fit beside it; else None."""
    highest = rows.highest
    if not np.isfinite(highest) or at.bound(rows) <= highest * (1 + GAP_TOLERANCE):
        return None
    fixed = _at_highest(rows)
    found = _Search(fixed).run(respond(fixed, at.prices, 0.0), lp_jobs=LP_JOBS, feasibility=True)
    if found is None:
        return None
    rising = rows.slope > 0
    room = np.where(rising, (rows.reach - rows.base) / np.where(rising, rows.slope, 1.0), np.inf)
    level = np.zeros(len(rows))
    level[room.argmin()] = 1.0 / rows.slope[room.argmin()]
    return Priced(
        X=found.X,
        level=level,
        time=level * rows.reach,
        prices=np.zeros(len(rows.capacity)),
        start=Start(prices=tuple(at.prices.tolist()), t=highest),
    )


def _usual(rows: Rows, prices: np.ndarray) -> float:
    """What a GPU costs, about."""
    usual = float(prices.mean())
    if rows.value is not None and not rows.gain:
        usual = max(usual, 0.1 * float((largest(rows.value) / rows.gpus).mean()))
    return max(usual, 1e-300)


class _Search:
    """Rounds of LPs in a box that shrinks; jobs that are decided for good leave the rows."""

    def __init__(self, rows: Rows) -> None:
        self.whole = self.rows = rows
        self.jittered = False
        n = len(rows)
        self.index = np.arange(n)
        self.least, self.greatest = np.full(len(rows.capacity), -np.inf), np.full(len(rows.capacity), np.inf)
        self.low, self.high = np.zeros(n, dtype=np.intp), np.zeros(n, dtype=np.intp)
        self.at_zero, self.per_t = np.zeros(n), np.zeros(n)

    def run(
        self,
        at: Response,
        *,
        lp_jobs: int,
        part: float = FIRST_BOX,
        feasibility: bool = False,
        coarse: bool = False,
    ) -> Priced | None:
        """The exact solution from a response at prices that are about right.

        Args:
            at: where to begin.
            lp_jobs: undecided jobs in an LP.
            part: half width of the first box, as a part of the prices.
            feasibility: any solution with t >= 0 will do.
            coarse: prices to within COARSE_END will do; the shares are those at them.

        Returns:
            None where there is no solution.
        """
        n, k = len(self.whole), len(self.whole.capacity)
        if feasibility and self._fits(at):
            return self._response(at)
        at = in_units_of_t(self.rows, at)
        usual = _usual(self.whole, at.prices)
        box = Box(prices=part * np.maximum(at.prices, 0.3 * usual), t=part * max(abs(at.t), 1e-300))
        bound, failed, worse = at.bound(self.rows), 0, 0
        for _ in range(MAX_ROUNDS):
            if coarse and box.prices.max() <= COARSE_END * usual:
                return self._response(at)
            if (at.prices - box.prices < self.least).any() or (at.prices + box.prices > self.greatest).any():
                # Jobs that were decided might change: all come back.
                self._reopen(usual)
                at = _at(self.rows, at.prices, at.t)
                bound = at.bound(self.rows)
            near, corner = closeness(self.rows, at, box)
            nearest = np.minimum(least(near), corner)
            open_ = int((nearest <= CLOSED).sum())
            if open_ < 0.6 * len(nearest) and open_ > lp_jobs:
                keep = np.flatnonzero(nearest <= CLOSED)
                at = self._close(at, nearest > CLOSED, keep, box)
                near, corner, nearest = near[keep], corner[keep], nearest[keep]
                bound = at.bound(self.rows)
            inside = nearest <= 1.0
            count = int(inside.sum())
            exact = count <= lp_jobs
            if exact:
                wider = 1.0
                if len(nearest) > lp_jobs:
                    wider = max(1.0, float(np.partition(nearest, lp_jobs)[lp_jobs]))
                    wider = min(wider, CLOSED if len(nearest) < n else 1e3)
                box = Box(prices=box.prices * wider, t=box.t * wider)
                inside = nearest <= wider
                chosen, weight = np.flatnonzero(inside), None
                near, corner = near[chosen] / wider, corner[chosen] / wider
            else:
                tied = int((nearest * float(box.prices.min()) < TIED * usual).sum())
                if not self.jittered and tied > lp_jobs and (worse or box.prices.max() < 1e-3 * usual):
                    self._jitter(usual)
                    at = _at(self.rows, at.prices, at.t)
                    bound = at.bound(self.rows)
                    continue
                free = np.flatnonzero(inside)
                near, corner = near[free], corner[free]
                some, weight = stratified(
                    self.rows.gpus[free], at.high[free] * (k + 1) + near.argmin(axis=1), nearest[free], lp_jobs
                )
                chosen, near, corner = free[some], near[some], corner[some]
            active = near <= 1.0
            active |= self.rows.usable[chosen] & (corner <= 1.0)[:, None]
            here = np.arange(len(chosen))
            active[here, at.low[chosen]] = True
            active[here, at.high[chosen]] = True
            active[:, -1] = False
            others = decided(self.rows, at, np.flatnonzero(~inside))
            used, growth = others.used, others.growth
            if weight is not None:
                # What the undecided use at these prices is known; the sample tells only how it changes.
                every, sampled = decided(self.rows, at, free), decided(self.rows, at, chosen, weight)
                used = used + every.used - sampled.used
                growth = growth + every.growth - sampled.growth
            walls = (np.maximum(at.prices - box.prices, 0.0), at.prices + box.prices)
            found = crossover(self.rows, chosen, active, weight=weight, used=used, growth=growth, walls=walls)
            if found is None:
                break
            if exact:
                solution = self._solution(at, found, chosen, inside)
                if solution is not None:
                    if feasibility and found.t < 0:
                        return None
                    return solution
            following = _at(self.rows, found.prices, found.t if self.rows.gain else 0.0)
            if feasibility:
                if self._fits(following):
                    return self._response(following)
                if following.bound(self.rows) < 0:
                    return None
            after = following.bound(self.rows)
            better = after < bound
            ratio = np.abs(following.prices - at.prices) / box.prices
            at_wall = (ratio >= 1 - 1e-9) & (following.prices > 0)
            moved = abs(found.t - at.t)
            if TRACE:
                print("     round", len(self.rows), count, len(chosen), exact, bound, after - bound, at_wall.sum(), self.jittered,
                    float(box.prices.max()/usual), moved, box.t, found.exceeded)
            if exact and not at_wall.any():
                failed += 1
                if len(nearest) < n:
                    # Decided too early, perhaps: begin with all jobs, at these prices.
                    self._reopen(usual)
                    at = _at(self.rows, found.prices, found.t if self.rows.gain else 0.0)
                    bound = at.bound(self.rows)
                    continue
                if failed > 1:
                    lp_jobs *= LP_GROWTH_FACTOR
                shrink = 1.0
            elif exact:
                shrink = 1.0
            elif better:
                worse, shrink = 0, WALL_SHRINK
                if not at_wall.any():
                    shrink = np.clip(SAFETY * np.maximum(ratio, 0.1 * ratio.max()), FASTEST_SHRINK, SHRINK)
            else:
                worse += 1
                shrink = 0.1**worse
            box = Box(
                prices=np.maximum(box.prices * np.where(at_wall & better, GROW, shrink), 1e-13 * usual),
                t=max(2.0 * moved if moved > box.t else float(np.max(shrink)) * box.t, 1e-13 * abs(at.t)),
            )
            if better:
                at, bound = following, after
        whole = _whole(self.whole)
        return None if feasibility and whole is not None and whole.start.t < 0 else whole

    def _fits(self, at: Response) -> bool:
        return bool((at.used(self.rows.gpus) <= self.rows.capacity).all())

    def _close(self, at: Response, closed: np.ndarray, keep: np.ndarray, box: Box) -> Response:
        """Take the jobs ``closed`` (a mask) out of the rows; the response of the others."""
        gone = np.flatnonzero(closed)
        others = decided(self.rows, at, gone)
        self._remember(self.index[gone], others)
        self.rows = self.rows.take(
            keep, capacity=self.rows.capacity - others.used, lift=self.rows.lift + others.growth
        )
        self.index = self.index[keep]
        self.least = np.maximum(self.least, at.prices - CLOSED * box.prices)
        self.greatest = np.minimum(self.greatest, at.prices + CLOSED * box.prices)
        return at.take(keep)

    def _remember(self, jobs: np.ndarray, mixes: Decided) -> None:
        self.low[jobs], self.high[jobs] = mixes.low, mixes.high
        self.at_zero[jobs], self.per_t[jobs] = mixes.at_zero, mixes.per_t

    def _jitter(self, usual: float) -> None:
        """Change what each column of the open jobs is worth by a little, at random."""
        self.rows = _jittered(self.rows, usual)
        self.jittered = True

    def _reopen(self, usual: float) -> None:
        """Put all jobs back into the rows."""
        self.rows, self.index = self.whole, np.arange(len(self.whole))
        self.least, self.greatest = np.full_like(self.least, -np.inf), np.full_like(self.greatest, np.inf)
        if self.jittered:
            self._jitter(usual)

    def _shares(self, t: float) -> np.ndarray:
        """(n, k + 1) shares of all jobs as remembered."""
        n, k = len(self.whole), len(self.whole.capacity)
        share = self.at_zero + self.per_t * t
        X = np.zeros((n, k + 1))
        everyone = np.arange(n)
        X[everyone, self.low] = 1.0 - share
        X[everyone, self.high] = share
        return X

    def _response(self, at: Response) -> Priced:
        """The shares of a response that fits."""
        self._remember(self.index, decided(self.rows, at, np.arange(len(self.rows))))
        n, k = len(self.whole), len(self.whole.capacity)
        return Priced(
            X=self._shares(at.t)[:, :k],
            level=np.zeros(n),
            time=np.zeros(n),
            prices=at.prices,
            start=Start(prices=tuple(at.prices.tolist()), t=at.t),
        )

    def _solution(
        self, at: Response, found: CrossoverSolution, chosen: np.ndarray, inside: np.ndarray
    ) -> Priced | None:
        """The LP's solution for all jobs, if it is proven to be one."""
        rows, k = self.whole, len(self.whole.capacity)
        if found.exceeded > MARGIN:
            return None
        self._remember(self.index, decided(self.rows, at, np.arange(len(self.rows))))
        X = self._shares(found.t)
        X[self.index[chosen]] = 0.0
        X[self.index[found.job], found.kind] = found.x
        X = X[:, :k]
        if (X < -MARGIN).any() or (X > 1.0 + MARGIN).any():
            return None
        level = slopes(rows, self.low, self.high, found.prices)
        level[self.index[chosen]] = found.level
        bound, time = bound_of(rows, found.prices, level)
        value = found.t if rows.value is None else float((rows.value[:, :-1] * X).sum())
        if TRACE:
            print("     proof", bound, bound - value, found.exceeded)
        tolerance = 3.0 * JITTER if self.jittered else GAP_TOLERANCE
        if bound - value > tolerance * max(abs(bound), abs(value)):
            return None
        return Priced(
            X=X,
            level=level,
            time=time,
            prices=found.prices,
            start=Start(prices=tuple(found.prices.tolist()), t=found.t),
        )


def _jittered(rows: Rows, usual: float) -> Rows:
    noise = np.random.default_rng(SEED).uniform(0.0, JITTER * usual, rows.rates.shape)
    noise = np.asfortranarray(np.where(rows.usable, noise * rows.gpus[:, None], 0.0))
    noise[:, -1] = 0.0
    return dataclasses.replace(rows, value=noise if rows.value is None else rows.value + noise)


def _whole(rows: Rows) -> Priced | None:
    """By one LP with all jobs."""
    active = rows.usable.copy()
    active[:, -1] = False
    found = crossover(rows, np.arange(len(rows)), active)
    if found is None:
        return None
    X = np.zeros((len(rows), len(rows.capacity)))
    X[found.job, found.kind] = found.x
    return Priced(
        X=X,
        level=found.level,
        time=bound_of(rows, found.prices, found.level)[1],
        prices=found.prices,
        start=Start(prices=tuple(found.prices.tolist()), t=found.t),
    )
