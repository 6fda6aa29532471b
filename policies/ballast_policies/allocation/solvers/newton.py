"""A Newton step of the prices, where so many jobs are undecided in the box that the dual is nearly smooth.

The dual has a kink wherever a job's mix changes. Its gradient at given prices is exact: the GPUs left. How
the GPUs in use change with prices is counted over all jobs close to a change: where column j comes into the
mix of job m once its reduced cost c (c' its gradient in the prices) falls to 0, with at most x of the time,
the GPUs in use change by x c', so over a window of half width w around the kink, w = |c'| . box,

    Hessian  =  sum of x c' c'^T / (2 w)  over the columns with c <= w.

An LP of a sample (``undecided``) estimates the same from some hundred jobs instead of all of them.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.best_response import Response, in_units_of_t, respond
from ballast_policies.allocation.solvers.crossover import Box, Closeness, decided
from ballast_policies.allocation.solvers.dense_program import Rows

SAFETY = 3.0
"""The box's next width per step that the model would take next."""
FASTEST_SHRINK, GROW = 1e-3, 3.0
"""How much narrower or wider a box becomes at most."""
FAR = 0.25
"""Where a step ends at a wall and improves the bound, GROW applies to all prices that moved this part of
their width or more: prices that move in proportion are then followed in steps of growing length."""
LEAST_GAIN = 1e-12
"""An improvement of the bound by less than this part is none."""
LOOKED_AT, ALIKE = 400, 1e-9
"""Undecided jobs that are compared, and boxes by which two that change at the same prices differ."""
MOST_CHANGES = 20_000
"""Changes that are counted; of more, every second, third, ... one."""
RIDGE = 1e-9
"""Added to the Hessian's diagonal, as a part of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewtonStep:
    """A step that improved the bound.

    Attributes:
        after: the response at its end.
        widths: (k,) the box's next width per width.
        at_wall: whether it ended at a wall of the box.
        gain: by which part it improved the bound.
    """

    after: Response
    widths: np.ndarray
    at_wall: bool
    gain: float


def unlike(nearest: np.ndarray) -> bool:
    """Whether few of the undecided jobs change at the very same prices: a look at some.

    Where many do, the dual has few large kinks, and no step of a smooth model improves it.
    """
    undecided = nearest[nearest <= 1.0]
    some = np.sort(undecided[:: 1 + len(undecided) // LOOKED_AT])
    return bool((np.diff(some) <= ALIKE).mean() < 0.5)


def newton_step(rows: Rows, at: Response, box: Box, close: Closeness) -> NewtonStep | None:
    """The step from the response ``at``; None where it does not improve the bound. As ``price_model``."""
    model = price_model(rows, at, box, close)
    change, t = model.step(rows, at, box)
    after = in_units_of_t(rows, respond(rows, at.prices + change, min(at.t + t, rows.highest)))
    bound, tried = at.bound(rows), after.bound(rows)
    if not bound - tried > LEAST_GAIN * abs(bound):
        return None
    moved = np.abs(change) / box.prices
    at_wall = bool(((moved >= 1 - 1e-9) & (after.prices > 0)).any())
    if at_wall:
        widths = np.where(moved >= FAR, GROW, 1.0)
    else:
        # As far as the model would go next.
        moved = np.abs(model.step(rows, after, box)[0]) / box.prices
        widths = np.clip(SAFETY * np.maximum(moved, 0.1 * moved.max()), FASTEST_SHRINK, 1.0)
    gain = (bound - tried) / max(abs(tried), 1e-300)
    return NewtonStep(after=after, widths=widths, at_wall=at_wall, gain=gain)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PriceModel:
    """How the dual changes around the prices of a response.

    Attributes:
        hessian: (k, k).
        growth: (k,) GPUs that a unit of t takes.
    """

    hessian: np.ndarray
    growth: np.ndarray

    def step(self, rows: Rows, at: Response, box: Box) -> tuple[np.ndarray, float]:
        """(change of the prices (k,) within the box, change of t) to the optimum of the model."""
        lower, upper = np.maximum(-box.prices, -at.prices), box.prices
        gradient = _gpus_left(rows, at)
        # (change, t) of the free prices; those at a bound stay there unless the model pulls them back.
        change, fixed = np.zeros(len(lower)), np.zeros(len(lower), dtype=bool)
        t = 0.0
        for _ in range(4 * len(lower)):
            free = np.flatnonzero(~fixed)
            change[free], t = self._solved(gradient, change, free, rows.gain > 0)
            beyond = ~fixed & ((change < lower) | (change > upper))
            if beyond.any():
                change = np.clip(change, lower, upper)
                fixed |= beyond
                continue
            pull = self.hessian @ change + gradient - self.growth * t
            back = fixed & np.where(change <= lower, pull < 0, pull > 0) & (upper > lower)
            if not back.any():
                break
            fixed[np.argmax(np.where(back, np.abs(pull) * box.prices, -1.0))] = False
        return change, t

    def _solved(
        self, gradient: np.ndarray, change: np.ndarray, free: np.ndarray, gain: bool
    ) -> tuple[np.ndarray, float]:
        """(changes of the ``free`` prices, change of t), with the other prices changed as given."""
        if not len(free):
            return np.zeros(0), 0.0
        others = change.copy()
        others[free] = 0.0
        hessian = self.hessian[np.ix_(free, free)]
        diagonal = np.maximum(np.diag(hessian), 1e-12 * max(float(np.diag(self.hessian).max()), 1e-300))
        unit = 1.0 / np.sqrt(diagonal)
        system = hessian * unit[:, None] * unit + RIDGE * np.eye(len(free))
        right = -(gradient + self.hessian @ others)[free] * unit
        if not gain:
            return np.linalg.solve(system, right) * unit, 0.0
        # Prices count in units of t, so that a step leaves the cost of a unit of t as it is.
        border = self.growth[free] * unit
        each = np.linalg.solve(system, np.stack([right, border], axis=1))
        across = float(border @ each[:, 1])
        t = -(float(border @ each[:, 0]) + float(self.growth @ others)) / across if across > 0 else 0.0
        return (each[:, 0] + each[:, 1] * t) * unit, t


def price_model(rows: Rows, at: Response, box: Box, close: Closeness) -> PriceModel:
    """The model of the dual in a box around the response.

    Args:
        rows: the program.
        at: the response in the middle of the box.
        box: the box.
        close: how close the jobs are to a change.
    """
    column, job = np.nonzero((close.columns <= 1.0).T)
    every = 1 + len(job) // MOST_CHANGES
    column, job = column[::every], job[::every]
    low, high, share = at.low[job], at.high[job], at.share[job]
    mixed = low != high
    rate_low, rate_high, rate = at.rate_low[job], at.rate_high[job], rows.rates[job, column]
    along = np.where(mixed, (rate - rate_low) / np.where(mixed, rate_high - rate_low, 1.0), 1.0)
    rise = _gpus(rows, job, column) - (1.0 - along) * _gpus(rows, job, low) - along * _gpus(rows, job, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        of_low = np.where(along < 1.0, (1.0 - share) / (1.0 - along), np.inf)
        of_high = np.where(along > 0.0, share / along, np.inf)
        # Of a job whose demand does not bind, until it does.
        until = np.where(rate < at.demand[job], (rate_high - at.demand[job]) / (rate_high - rate), 1.0)
    most = np.where(mixed, np.minimum(of_low, of_high), until)
    hessian = every * _counted(rise, most, box)
    if rows.value is not None:
        # Where a demand ceases to bind, the job moves to the faster of its two columns.
        job = np.flatnonzero((close.corner <= 1.0) & at.mixed)
        every = 1 + len(job) // MOST_CHANGES
        job = job[::every]
        rise = _gpus(rows, job, at.high[job]) - _gpus(rows, job, at.low[job])
        hessian += every * _counted(rise, 1.0 - at.share[job], box)
    growth = rows.lift
    if rows.slope.any():
        growth = growth + decided(rows, at, np.arange(len(rows))).growth
    return PriceModel(hessian=hessian, growth=growth)


def _counted(rise: np.ndarray, most: np.ndarray, box: Box) -> np.ndarray:
    """(k, k) sum of x c' c'^T / (2 w); ``rise`` (k, changes) is c', ``most`` (changes,) x."""
    window = box.prices @ np.abs(rise)
    part = np.divide(most, 2.0 * window, out=np.zeros_like(window), where=window > 0)
    counted: np.ndarray = (rise * part) @ rise.T
    return counted


def _gpus(rows: Rows, jobs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(k, jobs) GPUs that full time in the ``columns`` takes."""
    if rows.use is not None:
        return rows.use[:, columns, jobs]
    gpus = np.zeros((len(rows.capacity) + 1, len(jobs)))
    gpus[columns, np.arange(len(jobs))] = rows.gpus[jobs]
    return gpus[:-1]


def _gpus_left(rows: Rows, at: Response) -> np.ndarray:
    """(k,) the dual's gradient."""
    left: np.ndarray = rows.capacity - rows.lift * at.t - at.used(rows)
    return left
