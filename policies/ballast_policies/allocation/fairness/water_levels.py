"""Water filling in stages: all levels rise together until jobs are bottlenecked; the others continue.

Section 5.4.3 of the dissertation. A stage raises the levels from where they are along the path that
the teams' policies give (``teams``), as far as the cluster allows (``demand_path``), with every
level reached before as a lower bound. Jobs that reach full speed on the way simply take no more, so
they need no additional stage.

The jobs bottlenecked after a stage are read off the multipliers of its last LP: a job with lambda_m > 0
cannot get more unless another gets less, for lambda . throughput(x) <= B holds for every feasible x
and is tight. At least one job that was still rising has lambda_m > 0, so every stage freezes one and
the procedure ends. (No integer program, no big M, no epsilon on levels: those fail without an error.)
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.fairness.demand_path import max_feasible, per_gpu
from ballast_policies.allocation.fairness.teams import FillStage, Team
from ballast_policies.allocation.fairness.water_prices import (
    FULL,
    Filled,
    FirstStage,
    fill_by_prices,
    largest_gap,
)
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import CERTIFIED_GAP, Answer, nothing
from ballast_policies.allocation.solvers.linear import SolverError
from ballast_policies.allocation.solvers.methods import BY_LEVELS, BY_TYPES, Size, Task, choose, fell_back


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stage:
    """The path of demands of a stage."""

    fill: FillStage
    scale: np.ndarray

    @property
    def end(self) -> float:
        """Level at which the last member of the root is full."""
        return self.fill.end

    def demand(self, s: float) -> np.ndarray:
        levels = self.fill.levels(s)
        zeros = np.zeros_like(levels)
        speeds: np.ndarray = np.divide(levels, self.scale, out=zeros, where=self.scale > 0)
        return speeds


def fill(instance: Instance, root: Team) -> Filled:
    """Fill until every job is bottlenecked or at full speed. Raises SolverError: an LP failed."""
    size = Size(rows=len(instance.gpus), pairs=len(instance.pairs))
    if choose(Task.FILLING, size) is BY_TYPES:
        try:
            return fill_by_prices(instance, root)
        except SolverError as error:
            # Equal speeds leave several optima; linear programs over all jobs choose one.
            fell_back(BY_TYPES, str(error), BY_LEVELS)
            return fill_by_programs(instance, root)
    try:
        filled = fill_by_programs(instance, root)
    except SolverError as error:
        if instance.pairs:
            raise
        fell_back(BY_LEVELS, str(error), BY_TYPES)
        return fill_by_prices(instance, root)
    gap = filled.answer.gap or 0.0
    if instance.pairs or gap <= CERTIFIED_GAP:
        return filled
    # The errors of hundreds of stages add up.
    try:
        better = fill_by_prices(instance, root)
    except SolverError:
        return filled
    if (better.answer.gap or 0.0) >= gap:
        return filled
    fell_back(BY_LEVELS, f"gap {gap:.0e} over {filled.stages} stages", BY_TYPES)
    return better


def fill_by_programs(instance: Instance, root: Team) -> Filled:
    """Filling as :func:`fill` does it, by linear programs over all jobs. Raises SolverError: one failed."""
    scale = np.where(instance.runnable, instance.level_scale, 0.0)
    full = scale * instance.top
    levels, frozen = np.zeros(len(full)), full <= 0
    bound = np.zeros(len(full))
    answer, stages, first = nothing(instance), 0, None
    while not frozen.all():
        filling = FillStage(root, levels, np.where(frozen, 0.0, full - levels))
        stage = _Stage(fill=filling, scale=scale)
        found = max_feasible(instance, stage)
        stages += 1
        if first is None:
            prices = per_gpu(stage, found.s, found.proof.level_duals, found.proof.shadow_prices)
            first = FirstStage(s=found.s, prices=prices)
        levels = np.minimum(filling.levels(found.s), full)
        done = found.binding | (full - levels <= FULL * full)
        if not (done & ~frozen).any():
            raise SolverError(f"water filling froze no job in stage {stages}, at {found.s} of {stage.end}")
        bound = np.where(frozen, bound, np.minimum(filling.levels(found.bound), full))
        frozen |= done
        answer = Answer(
            x=found.raised.x,
            solver=found.raised.solver,
            gap=largest_gap(instance, found.raised.x, bound),
            shadow_prices=first.shadow_prices(root, full, levels),
        )
    return Filled(answer=answer, levels=levels, stages=stages)
