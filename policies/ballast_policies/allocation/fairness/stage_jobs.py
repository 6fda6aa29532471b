"""The jobs of a stage of water filling, and their program where some GPU types have prices.

At the end of a stage some types are full, and limit; the others have GPUs left and cost nothing. With only
the limiting types priced, a job that can meet its demand on the others leaves the program, and of each
remaining job only the speed beyond its fastest free column (type or configuration) counts:

    rates_mj - free_m,   base_m - free_m,   free_m = the fastest of its columns without a price.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.fairness.demand_path import root_of_cut
from ballast_policies.allocation.fairness.fill_stage import FillStage
from ballast_policies.allocation.fairness.stage_columns import StageColumns
from ballast_policies.allocation.solvers.best_response import respond
from ballast_policies.allocation.solvers.boxstep.sampling import stratified
from ballast_policies.allocation.solvers.dense_program import Rows, dot, largest, least

CLOSE = 1e-9
"""An excess of GPUs in use up to this part of a type is ignored."""
NOTHING = 1e-12
"""Part of full speed below which nothing is demanded."""
DIFFERENCE = 1e-6
"""Part of s over which its growth is measured."""


class StageJobs:
    """The jobs of a stage on the types that are still open.

    Args:
        fill: the levels along the stage.
        jobs: rows of the stage.
        columns: of these jobs on the open types.
        full: (n,) levels at full speed.
        size, reserved: (k,) GPUs of the types, and those that other jobs hold.
        alike: many jobs have the same speeds and gangs.
    """

    def __init__(
        self,
        fill: FillStage,
        *,
        jobs: np.ndarray,
        columns: StageColumns,
        full: np.ndarray,
        size: np.ndarray,
        reserved: np.ndarray,
        alike: bool,
    ) -> None:
        self.fill, self.jobs, self.columns, self.full = fill, jobs, columns, full
        self.size, self.reserved, self.alike = size, reserved, alike
        self.end = fill.end
        self.rates = columns.rates
        self.reach = largest(columns.rates)
        self._last: tuple[tuple[bytes, float], PricedJobs] | None = None

    def demand(self, s: float) -> np.ndarray:
        """(n,) demands at ``s``, as parts of full speed."""
        demand: np.ndarray = np.minimum(self.fill.levels(s, self.jobs) / self.full, self.reach)
        return demand

    def sampled(self, most: int) -> "StageJobs":
        """The stage of about ``most`` of the jobs, each with the GPUs of all that it stands for."""
        n = len(self.jobs)
        if n <= most:
            return self
        chosen, weight = stratified(self.columns.gpus, np.zeros(n, dtype=np.intp), np.arange(n), most)
        return StageJobs(
            self.fill,
            jobs=self.jobs[chosen],
            columns=self.columns.standing_for(chosen, weight),
            full=self.full[chosen],
            size=self.size,
            reserved=self.reserved,
            alike=self.alike,
        )

    def program(self, types: np.ndarray, s: float) -> "PricedJobs":
        """The program at ``s`` in which only ``types`` (k,) have prices; the last one is kept."""
        key = (types.tobytes(), s)
        if self._last is None or self._last[0] != key:
            self._last = key, self._program(types, s)
        return self._last[1]

    def _program(self, types: np.ndarray, s: float) -> "PricedJobs":
        priced, use = np.flatnonzero(types), self.columns.use
        free = self._fastest_without(types)
        need = self.demand(s) - free
        jobs = np.flatnonzero(need > NOTHING)
        if use is None:
            kept = priced
            dear = np.ones((len(jobs), len(kept)), dtype=bool)
        else:
            kept = np.arange(self.rates.shape[1])
            dear = self.columns.on(types)[jobs]
            use = np.append(use[priced][:, :, jobs], np.zeros((len(priced), 1, len(jobs))), axis=1)
        rates = np.zeros((len(jobs), len(kept) + 1), order="F")
        for i, j in enumerate(kept):
            rates[:, i] = np.where(dear[:, i], self.rates[jobs, j] - free[jobs], 0.0)
        rates[rates <= NOTHING] = 0.0
        usable = np.asfortranarray(rates > 0)
        usable[:, -1] = True
        rows = Rows(
            rates=rates,
            usable=usable,
            gpus=self.columns.gpus[jobs],
            value=None,
            base=need[jobs],
            slope=np.zeros(len(jobs)),
            capacity=-self.reserved[priced],
            lift=self.size[priced],
            gain=1.0,
            reach=largest(rates),
            absent=np.where(usable, 0.0, np.inf),
            use=use,
        )
        return PricedJobs(stage=self, rows=rows, jobs=jobs, kept=kept, free=free[jobs])

    def _fastest_without(self, types: np.ndarray) -> np.ndarray:
        """(n,) the fastest rate of a column that takes nothing of ``types`` (k,)."""
        free = np.zeros(len(self.jobs))
        if self.columns.use is None:
            for j in np.flatnonzero(~types):
                np.maximum(free, self.rates[:, j], out=free)
            return free
        return largest(np.where(self.columns.on(types), 0.0, self.rates))

    def bound(self, prices: np.ndarray, s: float) -> float:
        """The bound on s that ``prices`` (k,) prove by the cut that touches at ``s``."""
        types = prices > 0
        program = self.program(types, s)
        at = respond(program.rows, prices[types], 0.0)
        free_gpus = program.rows.lift + program.rows.capacity
        cut = float(at.time.sum() + prices[types] @ free_gpus)
        return program.root(at.level, cut, precision=1e-15, near=s)

    def per_gpu(self, prices: np.ndarray, s: float) -> np.ndarray:
        """(k,) ``prices`` in units of s: one more GPU lets the demands rise by its price."""
        program = self.program(prices > 0, s)
        if not len(program.rows):
            return prices
        before = s * (1 - DIFFERENCE)
        level = respond(program.rows, prices[prices > 0], 0.0).level
        rise = dot(level, program.demand(s) - program.demand(before))
        return prices * ((s - before) / rise) if rise > 0 else prices

    def over(self, X: np.ndarray) -> np.ndarray:
        """(k,) types whose GPUs are exceeded by the jobs with X and the others together."""
        over: np.ndarray = self.columns.used(X) + self.reserved > self.size * (1 + 10 * CLOSE)
        return over

    def filled_up(self, types: np.ndarray, s: float, X: np.ndarray) -> np.ndarray:
        """``X`` on ``types`` (k,), and what else each job demands at ``s`` in the fastest other column."""
        X, everyone = X.copy(), np.arange(len(X))
        others = np.where(self.columns.on(types), -1.0, self.rates)
        slowness, kind = least(np.negative(others, out=others))
        speed = -slowness
        lacking = np.maximum(self.demand(s) - (self.rates * X).sum(axis=1), 0.0)
        share = np.divide(lacking, speed, out=np.zeros_like(lacking), where=speed > 0)
        X[everyone, kind] += np.minimum(share, np.maximum(1.0 - X.sum(axis=1), 0.0))
        return X


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedJobs:
    """Jobs with a demand beyond their free types, and the demands of these.

    Attributes:
        stage: the stage that they belong to.
        jobs: (rows,) their places in the stage.
        kept: (w',) the columns of the stage that are columns of ``rows``.
        free: (rows,) their fastest rate without a price.
    """

    stage: StageJobs
    rows: Rows
    jobs: np.ndarray
    kept: np.ndarray
    free: np.ndarray

    @property
    def end(self) -> float:
        """Where the stage ends at the latest."""
        return self.stage.end

    def demand(self, s: float) -> np.ndarray:
        """(rows,) speed demanded beyond ``free``."""
        return self._path().demand(s)

    def root(
        self, level: np.ndarray, cut: float, precision: float = 1e-4, near: float | None = None
    ) -> float:
        """The s at which ``level`` (rows,) . demand(s) = ``cut``; about ``near``, where that is known."""
        return root_of_cut(self._path(), level, cut, 0.0, self.end, precision=precision, near=near)

    def _path(self) -> "_Path":
        stage, jobs = self.stage, self.jobs
        return _Path(
            end=stage.end,
            fill=stage.fill.of(stage.jobs[jobs]),
            full=stage.full[jobs],
            reach=stage.reach[jobs],
            free=self.free,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Path:
    """The demands of some jobs, whose arrays are taken out once for all points."""

    end: float
    fill: FillStage
    full: np.ndarray
    reach: np.ndarray
    free: np.ndarray

    def demand(self, s: float) -> np.ndarray:
        demand = self.fill.levels(s)
        demand /= self.full
        np.minimum(demand, self.reach, out=demand)
        demand -= self.free
        result: np.ndarray = np.maximum(demand, 0.0, out=demand)
        return result
