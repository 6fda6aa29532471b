"""Water filling with thousands of jobs: at most one stage for each GPU type, each in the types' prices.

When a stage ends, the types with a price are full, and every job that needs them to reach its level can get
no more: it keeps its GPUs. What remains is a smaller problem on the other types (``stage_program``), in which
a job may rise as far as these types take it. So there are no more stages than types, where one linear program
for each level would be thousands.

A job that stops keeps its shares on the full types and, for the rest of its time, its fastest other type:
complementary slackness leaves it no other choice. That is checked for the few jobs that are indifferent
between three types or more; where ties leave a choice, ``TiedError`` is raised.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.fairness.fill_stage import FillStage
from ballast_policies.allocation.fairness.stage_columns import stage_columns
from ballast_policies.allocation.fairness.stage_jobs import StageJobs
from ballast_policies.allocation.fairness.stage_program import MoreTypesError, StageEnd, StageSearch
from ballast_policies.allocation.fairness.teams import Team
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers.dense_program import largest
from ballast_policies.allocation.solvers.simplex import SolverError

FULL = 1e-9
"""Relative room below which a job counts as full."""
OVER = 1e-8
"""Part of a type's GPUs that may be exceeded; the excess is scaled away at the end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedFilling:
    """Outcome of water filling by prices.

    Attributes:
        X: (n, w) shares, w columns as in ``StageColumns``.
        levels, bound: (n,) levels reached, and their proven upper bounds.
        prices: (k,) of the first stage: how much further it would reach with one more GPU.
    """

    X: np.ndarray
    levels: np.ndarray
    bound: np.ndarray
    prices: np.ndarray
    stages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _State:
    """Between two stages.

    Attributes:
        levels, bound: (n,) so far.
        settled: (n,) jobs whose shares X are final.
        open_types: (k,) types that do not limit.
        reserved: (k,) GPUs of settled jobs.
        prices: (k,) of the first stage.
    """

    levels: np.ndarray
    bound: np.ndarray
    settled: np.ndarray
    X: np.ndarray
    open_types: np.ndarray
    reserved: np.ndarray
    prices: np.ndarray


class _Filling:
    """The instance and its arrays, which are the same in all stages."""

    def __init__(self, instance: Instance, root: Team) -> None:
        self.instance, self.root = instance, root
        self.full = np.where(instance.runnable, instance.level_scale, 0.0) * instance.top
        self.columns = stage_columns(instance)
        self.alike = self.columns.alike()

    def start(self) -> _State:
        n, k = len(self.full), len(self.instance.capacity)
        return _State(
            levels=np.zeros(n),
            bound=np.zeros(n),
            settled=self.full <= 0,
            X=np.zeros(self.columns.rates.shape),
            open_types=self.instance.capacity > 0,
            reserved=np.zeros(k),
            prices=np.zeros(k),
        )

    def stage(
        self, state: _State, more: np.ndarray, known: StageEnd | None
    ) -> tuple[_State, np.ndarray, StageEnd]:
        """(state after the next stage, (k,) types that limited it, its end).

        Args:
            state: before it.
            more: (k,) types that are known to limit.
            known: the end as found when not all of them were known.

        Raises:
            MoreTypesError: types that had the price 0 limit, too.
            SolverError: no end was found.
        """
        reach = self._reach(state.open_types)
        left = np.where(state.settled, 0.0, np.maximum(reach * self.full - state.levels, 0.0))
        left[left <= FULL * self.full] = 0.0
        fill = FillStage(self.root, state.levels, left)
        jobs, kinds = np.flatnonzero(~state.settled), np.flatnonzero(state.open_types)
        # A job that no open type serves has level 0 and is settled, so every job here has a rate.
        stage = StageJobs(
            fill,
            jobs=jobs,
            columns=self.columns.restricted(jobs, kinds),
            full=self.full[jobs],
            size=self.instance.capacity[kinds],
            reserved=state.reserved[kinds],
            alike=self.alike,
        )
        limits = np.zeros(len(state.reserved), dtype=bool)
        try:
            end = StageSearch(stage).solve(more[kinds], known=known)
        except MoreTypesError as error:
            limits[kinds] = error.types
            raise MoreTypesError(limits) from error
        limits[kinds] = end.prices > 0
        return self._after(state, fill, jobs, kinds, end, limits), limits, end

    def _after(
        self,
        state: _State,
        fill: FillStage,
        jobs: np.ndarray,
        kinds: np.ndarray,
        end: StageEnd,
        limits: np.ndarray,
    ) -> _State:
        mine = jobs[end.stopped]
        every, settled, bound = state.X.copy(), state.settled.copy(), state.bound.copy()
        if self.columns.use is None:
            every[np.ix_(mine, kinds)] = end.X[end.stopped]
        else:
            every[mine] = end.X[end.stopped]
        settled[mine] = True
        now = np.zeros_like(every)
        now[mine] = every[mine]
        bound[mine] = fill.levels(end.bound, mine)
        first = not state.settled[self.full > 0].any()
        prices = np.zeros(len(state.reserved))
        prices[kinds] = end.prices
        return _State(
            levels=fill.levels(end.s),
            bound=bound,
            settled=settled,
            X=every,
            open_types=state.open_types & ~limits,
            reserved=state.reserved + self.columns.used(now),
            prices=prices if first else state.prices,
        )

    def _reach(self, types: np.ndarray) -> np.ndarray:
        """(n,) the fastest rate on ``types``."""
        if self.columns.use is not None:
            return largest(np.where(self.columns.on(~types), 0.0, self.columns.rates))
        reach = np.zeros(len(self.full))
        for j in np.flatnonzero(types):
            np.maximum(reach, self.columns.rates[:, j], out=reach)
        return reach


def fill_by_prices(instance: Instance, root: Team) -> PricedFilling:
    """Fill until every job is bottlenecked or at full speed; no pairs.

    Raises:
        TiedError: there are several ways to end a stage, and the next depends on which.
        SolverError: a stage found no end.
    """
    filling = _Filling(instance, root)
    state, k = filling.start(), len(instance.capacity)
    before: list[tuple[_State, np.ndarray, StageEnd]] = []
    more, known = np.zeros(k, dtype=bool), None
    for _ in range(3 * k + 3):
        if state.settled.all():
            return PricedFilling(
                X=state.X, levels=state.levels, bound=state.bound, prices=state.prices, stages=len(before)
            )
        try:
            after, limits, end = filling.stage(state, more, known)
        except MoreTypesError as error:
            if not before:
                break
            # The stage before ended too late: these types limit it, too.
            state, more, known = before.pop()
            more = more | error.types
            continue
        over = after.open_types & (after.reserved > instance.capacity * (1 + OVER))
        if over.any():
            # Jobs that stopped do not fit on the rest.
            more, known = more | limits | over, end
            continue
        before.append((state, limits, end))
        state, more, known = after, np.zeros(k, dtype=bool), None
    raise SolverError("water filling by prices found no end")
