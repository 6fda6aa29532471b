"""The jobs of a stage of water filling: their columns, their program at prices, and who stops at its end.

At the end of a stage some types are full, and limit; the others have GPUs left and cost nothing. With only
the limiting types priced, a job that can meet its demand on the others leaves the program, and of each
remaining job only the speed beyond its fastest free column (type or configuration) counts:

    rates_mj - free_m,   base_m - free_m,   free_m = the fastest of its columns without a price.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.fairness.demand_path import per_gpu, root_of_cut
from ballast_policies.allocation.fairness.teams import FillStage
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers.best_response import respond
from ballast_policies.allocation.solvers.dense_program import (
    MOST_ENTRIES,
    Rows,
    dense,
    equal_rows,
    least,
    mostly_distinct,
    stratified,
    taken,
)
from ballast_policies.allocation.solvers.simplex import SolverError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageColumns:
    """Ways to run, w of each job.

    Attributes:
        rates: (n, w) as parts of a job's full speed; 0: it cannot run so.
        gpus: (n,) of a gang; of an elastic job the most that it takes.
        use: (k, w, n) GPUs of each type that each column takes; None: column j takes ``gpus`` of type j.
    """

    rates: np.ndarray
    gpus: np.ndarray
    use: np.ndarray | None = None

    def alike(self) -> bool:
        """True if many jobs have the same columns."""
        parts = [self.rates, self.gpus[:, None]]
        if self.use is not None:
            parts += [each.T for each in self.use]
        return not mostly_distinct(np.concatenate(parts, axis=1))

    def on(self, types: np.ndarray) -> np.ndarray:
        """(n, w) whether a column takes GPUs of one of the ``types`` (k,), a mask."""
        if self.use is None:
            return np.broadcast_to(types, self.rates.shape)
        taken: np.ndarray = (self.use[types] > 0).any(axis=0).T
        return taken

    def used(self, X: np.ndarray) -> np.ndarray:
        """(k,) GPUs in use at shares X (n, w)."""
        used: np.ndarray
        used = self.gpus @ X if self.use is None else self.use.reshape(len(self.use), -1) @ X.T.ravel()
        return used

    def restricted(self, jobs: np.ndarray, types: np.ndarray) -> "StageColumns":
        """Columns of ``jobs`` (rows) that take GPUs of ``types`` (indices) only, and of gangs no others."""
        if self.use is None:
            rates = np.asfortranarray(self.rates[np.ix_(jobs, types)])
            return StageColumns(rates=rates, gpus=self.gpus[jobs])
        others = np.ones(len(self.use), dtype=bool)
        others[types] = False
        rates = np.asfortranarray(np.where(self.on(others)[jobs], 0.0, self.rates[jobs]))
        return StageColumns(rates=rates, gpus=self.gpus[jobs], use=self.use[types][:, :, jobs])

    def standing_for(self, jobs: np.ndarray, weight: np.ndarray) -> "StageColumns":
        """Columns of ``jobs`` (rows), each with the GPUs of ``weight`` such jobs."""
        use = None if self.use is None else self.use[:, :, jobs] * weight
        return StageColumns(rates=taken(self.rates, jobs), gpus=self.gpus[jobs] * weight, use=use)


def stage_columns(instance: Instance) -> StageColumns:
    """All columns of an instance without pairs; ``columns.place`` is the column of each.

    Raises:
        SolverError: there are too many of them.
    """
    scale = 1.0 / np.where(instance.top > 0, instance.top, 1.0)
    elastic = bool(instance.elastic.any())
    tables = dense(instance.columns, scale, len(instance.capacity), elastic=elastic)
    if tables is None:
        raise SolverError(f"over {MOST_ENTRIES:,} entries of a table of jobs, configurations and GPU types")
    rates, gpus, _, use = tables
    return StageColumns(rates=rates[:, :-1], gpus=gpus, use=None if use is None else use[:, :-1])


CLOSE = 1e-9
"""An excess of GPUs in use up to this part of a type is ignored."""
NOTHING = 1e-12
"""Part of full speed below which nothing is demanded."""


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
        self.reach = columns.rates.max(axis=1)
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
        rows = Rows(
            rates=rates,
            gpus=self.columns.gpus[jobs],
            value=None,
            use=use,
            base=need[jobs],
            slope=np.zeros(len(jobs)),
            capacity=-self.reserved[priced],
            lift=self.size[priced],
            gain=1.0,
        )
        return PricedJobs(
            rows=rows,
            jobs=jobs,
            kept=kept,
            end=self.end,
            fill=self.fill.of(self.jobs[jobs]),
            full=self.full[jobs],
            reach=self.reach[jobs],
            free=free[jobs],
        )

    def _fastest_without(self, types: np.ndarray) -> np.ndarray:
        """(n,) the fastest rate of a column that takes nothing of ``types`` (k,)."""
        if self.columns.use is None:
            return np.asarray(self.rates[:, ~types].max(axis=1, initial=0.0))
        return np.asarray(np.where(self.columns.on(types), 0.0, self.rates).max(axis=1))

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
        return per_gpu(program, s, respond(program.rows, prices[prices > 0], 0.0).level, prices)

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
    """Jobs with a demand beyond their free types, and the path of these demands.

    Attributes:
        rows: their program.
        jobs: (rows,) their places in the stage.
        kept: (w',) the columns of the stage that are columns of ``rows``.
        end: upper end of the stage.
        fill: the levels of these jobs along it.
        full, reach: (rows,) levels at full speed, and the fastest rates on the open types.
        free: (rows,) their fastest rate without a price.
    """

    rows: Rows
    jobs: np.ndarray
    kept: np.ndarray
    end: float
    fill: FillStage
    full: np.ndarray
    reach: np.ndarray
    free: np.ndarray

    def demand(self, s: float) -> np.ndarray:
        """(rows,) speed demanded beyond ``free``."""
        demand = self.fill.levels(s)
        demand /= self.full
        np.minimum(demand, self.reach, out=demand)
        demand -= self.free
        result: np.ndarray = np.maximum(demand, 0.0, out=demand)
        return result

    def root(
        self, level: np.ndarray, cut: float, precision: float = 1e-4, near: float | None = None
    ) -> float:
        """The s at which ``level`` (rows,) . demand(s) = ``cut``; about ``near``, where that is known."""
        return root_of_cut(self, level, cut, self.end, precision=precision, near=near)


SAME = 1e-9
"""Speeds, and reduced costs as a part of prices, that differ by less count as equal."""
MOST_TIED = 300
"""Kinds of jobs with a choice that are checked together; with more, shares count as not unique."""


def stopped_jobs(
    stage: StageJobs, program: PricedJobs, prices: np.ndarray, s: float, X: np.ndarray
) -> np.ndarray:
    """(n,) jobs that cannot rise without types that have a price, where their shares are unique.

    Raises:
        SolverError: the shares of some are not unique, and the stages to come depend on them.
    """
    closed = prices > 0
    if closed.all():
        return np.ones(len(X), dtype=bool)
    stopped = np.zeros(len(X), dtype=bool)
    stopped[program.jobs] = True
    priced = stage.columns.on(closed)
    open_rates = np.where(priced, 0.0, stage.rates)
    free = open_rates.max(axis=1)
    tied = (free > 0) & ((open_rates >= free[:, None] * (1 - SAME)).sum(axis=1) > 1)
    resting = np.where(priced, 0.0, X).sum(axis=1) > SAME
    if (stopped & tied & resting).any() or not _unique(stage, program, prices[closed]):
        raise SolverError("jobs that stop may use the other types in several ways")
    # Jobs that may be on several open types at full speed wait for a later stage to place them.
    stopped |= (stage.demand(s) >= free * (1 - SAME)) & ~tied
    return stopped


def _unique(stage: StageJobs, program: PricedJobs, prices: np.ndarray) -> bool:
    """True if jobs that may use three types or more (free ones count as one) have a single solution.

    At optimal prices they may use columns without a reduced cost only; speed, time and the GPUs of the
    limiting types are given. In GPUs of all jobs of the same speeds that is a system of equations, with one
    solution if its columns are independent. Which of these jobs has which GPUs does not matter to others.
    """
    rows = program.rows
    if not len(rows):
        return True
    at = respond(rows, prices, 0.0)
    used = at.reduced_costs(rows.rates) <= SAME * rows.gpus[:, None] * prices.max()
    several = np.flatnonzero(used.sum(axis=1) > 2)
    if not len(several):
        return True
    parts = [stage.rates[program.jobs[several]], used[several]]
    if rows.use is not None:
        parts += [each.T[several] for each in rows.use]
    several = several[equal_rows(np.concatenate(parts, axis=1))[1]]
    if len(several) > MOST_TIED:
        return False
    group, place = np.nonzero(used[several])
    here, k = np.arange(len(group)), len(prices)
    system = np.zeros((2 * len(several) + k + 1, len(group)))
    system[group, here] = rows.rates[several[group], place]
    system[len(several) + group, here] = 1.0
    if rows.use is None:
        system[2 * len(several) + place, here] = 1.0
    else:
        system[2 * len(several) : -1, here] = rows.use[:, place, several[group]]
    return bool(np.linalg.matrix_rank(system[:-1]) == len(group))
