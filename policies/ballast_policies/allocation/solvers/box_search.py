"""Rounds of small LPs in a box of prices that shrinks: the core of ``boxstep``.

A round: count the jobs that are undecided inside the box. Where they are many, the LP of a stratified sample
of them moves the prices: the GPUs that they use at the current prices are known exactly, and the sample only
estimates how they change, so the error of a step is a part of the step, and the box shrinks by a constant
factor in each round. As soon as all undecided jobs fit into the LP, its solution is exact, which the bound at
its prices proves; where it is not, the box moves or the LP gets more jobs, at last all of them.

Where thousands of jobs tie exactly (equal speeds, different demands), the values of their columns are
perturbed at random by 1e-7 of the prices: then any box small enough holds few of them.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.best_response import (
    Response,
    balanced_prices,
    bound_of,
    in_units_of_t,
    respond,
)
from ballast_policies.allocation.solvers.crossover import (
    Box,
    Closeness,
    CrossoverSolution,
    Decided,
    Priced,
    closeness,
    crossover,
    decided,
    slopes,
)
from ballast_policies.allocation.solvers.dense_program import Rows, stratified, taken

MOST_COLUMNS = 6000
"""Columns in the LP of a sample, where that leaves FEWEST jobs."""
FEWEST = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Undecided:
    """The undecided jobs of a round.

    Attributes:
        box: the box; wider than asked for where the LP has room for more jobs.
        inside: (rows,) whether a job is undecided.
        chosen: rows of those in the LP.
        weight: how many each stands for; None: they are all there.
        near, corner: of the chosen, in boxes.
    """

    box: Box
    inside: np.ndarray
    chosen: np.ndarray
    weight: np.ndarray | None
    near: np.ndarray
    corner: np.ndarray


def undecided_in(rows: Rows, at: Response, box: Box, *, close: Closeness, lp_jobs: int) -> Undecided:
    """The undecided jobs in the box, a sample of them where they are more than ``lp_jobs``.

    ``at``: the response in the middle of the box; ``close``: how close the jobs are to a change;
    ``lp_jobs``: in an LP; where it has room for more, the box grows.
    """
    nearest = close.nearest
    inside, wider, weight = nearest <= 1.0, 1.0, None
    if inside.sum() > lp_jobs:
        free = np.flatnonzero(inside)
        stratum = at.high[free] * close.columns.shape[1] + close.place[free]
        some, weight = stratified(
            rows.gpus[free], stratum, nearest[free], _sample_size(rows, close, free, lp_jobs)
        )
        chosen = free[some]
    else:
        if len(nearest) > lp_jobs:
            # As wide as the LP has room for.
            room = float(np.partition(nearest, lp_jobs)[lp_jobs])
            wider = max(1.0, room) if np.isfinite(room) else 1.0
        inside = nearest <= wider
        chosen = np.flatnonzero(inside)
    return Undecided(
        box=Box(prices=box.prices * wider, t=box.t * wider),
        inside=inside,
        chosen=chosen,
        weight=weight,
        near=taken(close.columns, chosen) / wider,
        corner=close.corner[chosen] / wider,
    )


def _sample_size(rows: Rows, close: Closeness, free: np.ndarray, lp_jobs: int) -> int:
    """Jobs in the LP of a sample: fewer where each of them has many columns in question."""
    if rows.use is None:
        return lp_jobs
    columns = max(1, int((close.columns[free] <= 1.0).sum()))
    return max(FEWEST, min(lp_jobs, MOST_COLUMNS * len(free) // columns))


def lp_of(rows: Rows, at: Response, undecided: Undecided) -> CrossoverSolution | None:
    """Solve the LP of the undecided jobs, with prices held to the box."""
    chosen, box = undecided.chosen, undecided.box
    active = undecided.near <= 1.0
    # Beyond a corner of its hull, any column may come in.
    active |= rows.usable[chosen] & (undecided.corner <= 1.0)[:, None]
    here = np.arange(len(chosen))
    active[here, at.low[chosen]] = True
    active[here, at.high[chosen]] = True
    active[:, -1] = False
    others = decided(rows, at, np.flatnonzero(~undecided.inside))
    used, growth = others.used, others.growth
    if undecided.weight is not None:
        # The GPUs in use at these prices are known exactly; the sample only estimates how they change.
        every = decided(rows, at, np.flatnonzero(undecided.inside))
        sampled = decided(rows, at, chosen, undecided.weight)
        used, growth = used + every.used - sampled.used, growth + every.growth - sampled.growth
    return crossover(
        rows,
        chosen,
        active,
        weight=undecided.weight,
        used=used,
        growth=growth,
        walls=(np.maximum(at.prices - box.prices, 0.0), at.prices + box.prices),
    )


LP_GROWTH_FACTOR = 3
"""An exact LP that did not prove the optimum twice gets this many times more jobs."""
DOUBTS = 2
"""Each time that this many samples did not improve the bound, samples double, up to MOST_SAMPLED jobs."""
MOST_SAMPLED = 1600
CRAWLS = 3
"""Likewise where this many exact LPs ended at a wall."""
GAP_TOLERANCE = 1e-10
"""Relative gap at which the search ends."""
JITTER = 1e-7
"""Ties are broken by a random perturbation of each column's value, of this part of the prices."""
SEED = 20211024
LAST_TOLERANCE = 3.0 * JITTER
"""Likewise where ties were broken, or rounding errors kept PATIENCE exact LPs from the smaller gap."""
PATIENCE = 2


class LpSize:
    """Number of jobs in the LPs of a search: more where those do not finish it."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.failed = self.crawled = self.spent = self._doubted = 0

    @property
    def tolerance(self) -> float:
        """The relative gap at which an exact LP ends the search."""
        return GAP_TOLERANCE if self.failed < PATIENCE else LAST_TOLERANCE

    def after(self, *, exact: bool, better: bool, at_wall: bool) -> None:
        """Count an LP: of all undecided jobs, whether it improved the bound, ended at a wall."""
        if exact and at_wall and better:
            # Prices that have far to go, past many jobs: a wider box.
            self.crawled += 1
            self.jobs *= LP_GROWTH_FACTOR if self.crawled % CRAWLS == 0 else 1
        elif exact:
            self.failed += 1
            self.jobs *= LP_GROWTH_FACTOR if self.failed > 1 else 1
        elif not better:
            self._doubted += 1
            self.jobs *= 2 if self._doubted % DOUBTS == 0 and self.jobs < MOST_SAMPLED else 1


MAX_ROUNDS = 150
MOST_JOBS = 60_000
"""Jobs in all LPs of a search together, after which one LP of all jobs is faster."""
COARSE_ROUNDS = 20
"""Rounds after which the search ends where prices to about a hundredth will do."""
SAFETY = 2.0
"""The box's next width per movement of the prices."""
FASTEST_SHRINK, SLOWEST_SHRINK, GROW = 1e-3, 0.3, 3.0
"""Factors of a box's width, the least and the largest when it shrinks, and the most when it grows."""
FAR = 0.25
"""GROW applies, where a step improves the bound at a wall, to prices that moved this part of their width:
prices that move in proportion are then followed in steps of growing length."""
UNEVEN = 0.01
"""Part of the widest side of the box that all sides have at least: a price of 0 may have to rise again."""
TIED = 1e-10
"""Jobs this close to a change, as a part of the prices, are tied."""
TIES_SEEN = 1e-3
"""Ties count from this box on, as a part of the prices, or where a step did not improve the bound."""
LOW_PRICE = 0.3
"""Part of the mean price that a cheaper type's first box is made for."""
NARROWEST = 1e-13
MARGIN = 1e-9
"""A share of time may be this much below 0 or above 1, and a type's GPUs exceeded by this part."""


class BoxSearch:
    """The search on one program."""

    def __init__(self, rows: Rows) -> None:
        self.whole = self.rows = rows
        self.usual, self._jitter = 1.0, 0.0

    def run(
        self, at: Response, *, lp_jobs: int, part: float, feasibility: bool = False, coarse: float = 0.0
    ) -> Priced | None:
        """The exact solution from a response at prices that are about right.

        Args:
            at: where to begin.
            lp_jobs: undecided jobs in an LP.
            part: half width of the first box, as a part of the prices.
            feasibility: any solution with t >= 0 will do.
            coarse: prices to within this part will do, and the shares are those at them; 0: exactly.

        Returns:
            None where there is no solution, or none was found.
        """
        at = in_units_of_t(self.rows, at)
        self.usual = _usual(self.whole, at.prices)
        box = Box(
            prices=part * np.maximum(at.prices, LOW_PRICE * self.usual), t=part * max(abs(at.t), 1e-300)
        )
        size, worse = LpSize(lp_jobs), 0
        for _ in range(COARSE_ROUNDS if coarse else MAX_ROUNDS):
            if box.prices.max() <= coarse * self.usual or (feasibility and self._fits(at)):
                return self._response(at)
            close = closeness(self.rows, at, box)
            if not self._jitter and self._tied(close.nearest, box, bool(worse)) > size.jobs:
                if not (coarse or feasibility) and (priced := self._with_balanced_ties(at)) is not None:
                    return priced
                at = self._with_ties_broken(at)
                continue
            bound = at.bound(self.rows)
            if feasibility and bound < 0:
                return None
            undecided = undecided_in(self.rows, at, box, close=close, lp_jobs=size.jobs)
            box, exact = undecided.box, undecided.weight is None
            found = lp_of(self.rows, at, undecided)
            size.spent += len(undecided.chosen)
            if found is None or size.spent > MOST_JOBS:
                break
            if exact:
                solution = self._solution(at, found, undecided, size.tolerance)
                if solution is not None:
                    return None if feasibility and found.t < 0 else solution
            following = self._at(found.prices, found.t)
            after = following.bound(self.rows)
            if feasibility and self._fits(following):
                return self._response(following)
            moved = np.abs(following.prices - at.prices) / box.prices
            at_wall = (moved >= 1 - 1e-9) & (following.prices > 0)
            better = after < bound
            size.after(exact=exact, better=better, at_wall=bool(at_wall.any()))
            worse = 0 if better else worse + (not exact)
            shrink = _shrinking(moved, at_wall, better=better, exact=exact, worse=worse)
            box = self._resized(box, shrink, at=at.t, following=found.t)
            at = following if better else at
        return self._response(at) if coarse else None

    def _at(self, prices: np.ndarray, t: float) -> Response:
        return in_units_of_t(self.rows, respond(self.rows, prices, min(t, self.rows.highest)))

    def _with_ties_broken(self, at: Response) -> Response:
        rows, self._jitter = self.rows, JITTER * self.usual
        noise = np.random.default_rng(SEED).uniform(0.0, self._jitter, rows.rates.shape)
        noise = np.asfortranarray(np.where(rows.usable, noise * rows.gpus[:, None], 0.0))
        noise[:, -1] = 0.0
        self.rows = dataclasses.replace(rows, value=noise if rows.value is None else rows.value + noise)
        return self._at(at.prices, at.t)

    def _mixes(self, at: Response) -> Decided:
        """The mixes of all jobs in the response."""
        return decided(self.rows, at, np.arange(len(self.rows)))

    def _with_balanced_ties(self, at: Response) -> Priced | None:
        """The answers to the prices of ``at``, where one choice of the jobs that tie fits; else None."""
        rows, prices = self.rows, None
        if at.prices.any():
            prices = balanced_prices(rows, at.prices, at.t, self.usual)
        if prices is None:
            return None
        at = self._at(prices, at.t)
        if (at.used(rows) > (rows.capacity - rows.lift * at.t) * (1 + MARGIN)).any():
            return None
        mixes = self._mixes(at)
        level = slopes(self.whole, mixes.low, mixes.high, at.prices)
        return self._proven(mixes.shares(self.rows, at.t), at.t, at.prices, level, GAP_TOLERANCE)

    def _resized(self, box: Box, by: np.ndarray, *, at: float, following: float) -> Box:
        """``box`` times ``by`` (k,), after a step of t from ``at``."""
        step, widths = abs(following - at), box.prices * by
        t = 2.0 * step if step > box.t else float(min(1.0, by.max())) * box.t
        narrowest = max(UNEVEN * float(widths.max()), NARROWEST * self.usual)
        return Box(prices=np.maximum(widths, narrowest), t=max(t, NARROWEST * abs(at)))

    def _fits(self, at: Response) -> bool:
        return bool((at.used(self.rows) <= self.rows.capacity).all())

    def _tied(self, nearest: np.ndarray, box: Box, stuck: bool) -> int:
        """Number of jobs that are tied."""
        if not stuck and box.prices.max() > TIES_SEEN * self.usual:
            return 0
        return int((nearest * float(box.prices.min()) < TIED * self.usual).sum())

    def _response(self, at: Response) -> Priced:
        """The shares of a response."""
        n = len(self.whole)
        return Priced(
            X=self._mixes(at).shares(self.rows, at.t),
            level=np.zeros(n),
            time=np.zeros(n),
            prices=at.prices,
            t=at.t,
        )

    def _solution(
        self, at: Response, found: CrossoverSolution, undecided: Undecided, tolerance: float
    ) -> Priced | None:
        """The LP's solution for all jobs, if it is proven to be one to the relative ``tolerance``."""
        if found.exceeded > MARGIN:
            return None
        rows, chosen, mixes = self.whole, undecided.chosen, self._mixes(at)
        X = mixes.shares(rows, found.t)
        X[chosen] = 0.0
        X[found.job, found.place] = found.x
        if (X < -MARGIN).any() or (X > 1.0 + MARGIN).any():
            return None
        level = slopes(rows, mixes.low, mixes.high, found.prices)
        level[chosen] = found.level
        tolerance = LAST_TOLERANCE if self._jitter else tolerance
        return self._proven(X, found.t, found.prices, level, tolerance)

    def _proven(
        self, X: np.ndarray, t: float, prices: np.ndarray, level: np.ndarray, tolerance: float
    ) -> Priced | None:
        """The shares (n, w) with level t, if the multipliers prove them to the relative ``tolerance``."""
        rows = self.whole
        bound, time = bound_of(rows, prices, level)
        value = t if rows.value is None else float((rows.value[:, :-1] * X).sum())
        if bound - value > tolerance * max(abs(bound), abs(value)):
            return None
        return Priced(X=X, level=level, time=time, prices=prices, t=t)


def _shrinking(
    moved: np.ndarray, at_wall: np.ndarray, *, better: bool, exact: bool, worse: int
) -> np.ndarray:
    """(k,) the box's next width per width, after prices moved by ``moved`` (k,) of it."""
    shrink = np.ones(len(moved))
    if not exact and not better:
        shrink *= 0.1**worse
    elif not exact and not at_wall.any():
        shrink = np.clip(SAFETY * np.maximum(moved, 0.1 * moved.max()), FASTEST_SHRINK, SLOWEST_SHRINK)
    # An exact LP that ends at a wall has improved the bound but for rounding.
    grown: np.ndarray = np.where((moved >= FAR) & at_wall.any() & (better or exact), GROW, shrink)
    return grown


def _usual(rows: Rows, prices: np.ndarray) -> float:
    """The approximate price of a GPU."""
    usual = float(prices.mean())
    if rows.value is not None and not rows.gain:
        usual = max(usual, 0.1 * float((np.abs(rows.value).max(axis=1) / rows.gpus).mean()))
    return max(usual, 1e-300)
