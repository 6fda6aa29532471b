"""Water filling: raise all levels together, freeze who is bottlenecked, go on with the others.

Section 5.4.3 of the dissertation. A stage raises the levels from where they are along the path that
the teams' policies give (``entities``), as far as the cluster allows (``demand_path``), with every
level reached before as a lower bound. Jobs that reach full speed on the way simply take no more, so
they cost no stage of their own.

Who is bottlenecked after a stage is read off the multipliers of its last LP: a job with lambda_m > 0
cannot get more unless another gets less, for lambda . throughput(x) <= B holds for every feasible x
and is tight. At least one job that was still rising has lambda_m > 0, so every stage freezes one and
the procedure ends. (No integer program, no big M, no epsilon on levels: those fail quietly.)
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.answer import Answer, nothing
from ballast_policies.allocation.fairness.demand_path import furthest
from ballast_policies.allocation.fairness.teams import Team
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers.linear import SolverError

FULL = 1e-9
"""Relative room below which a job counts as full."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stage:
    """Levels from ``base`` on, each job with ``left`` to its full speed or to where it was frozen."""

    root: Team
    base: np.ndarray
    left: np.ndarray
    scale: np.ndarray

    @property
    def end(self) -> float:
        """When the last member of the root is full."""
        root, left = self.root, self.left
        rooms = np.concatenate([left[root.jobs], [team.room(left) for team in root.teams]])
        return float((rooms / np.concatenate([root.job_weights, root.team_weights])).max())

    def levels(self, s: float) -> np.ndarray:
        given = np.zeros_like(self.base)
        self.root.pour_at_rates(s, self.left, given)
        levels: np.ndarray = self.base + given
        return levels

    def demand(self, s: float) -> np.ndarray:
        zeros = np.zeros_like(self.base)
        shares: np.ndarray = np.divide(self.levels(s), self.scale, out=zeros, where=self.scale > 0)
        return shares


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filled:
    """Outcome of water filling.

    Attributes:
        answer: the shares; the gap is the largest of any stage.
        levels: (n,) levels without weights, as demanded in the end.
        stages: how many LP paths it took.
    """

    answer: Answer
    levels: np.ndarray
    stages: int


def fill(problem: Instance, root: Team) -> Filled:
    """Fill until every job is bottlenecked or at full speed.

    Raises:
        SolverError: an LP failed.
    """
    scale = np.where(problem.runnable, problem.level_scale, 0.0)
    full = scale * problem.top
    levels, frozen = np.zeros(len(full)), full <= 0
    answer, stages, gap = nothing(problem), 0, 0.0
    while not frozen.all():
        stage = _Stage(root=root, base=levels, left=np.where(frozen, 0.0, full - levels), scale=scale)
        found = furthest(problem, stage)
        stages += 1
        # Measured on the whole way up: a last step of 1e-12 has no meaningful gap of its own.
        demand = stage.demand(found.s)
        missed = stage.demand(found.bound) - demand
        gap = max(gap, float((missed / np.where(demand > 0, demand, 1.0)).max()))
        levels = np.minimum(stage.levels(found.s), full)
        done = found.binding | (full - levels <= FULL * full)
        if not (done & ~frozen).any():
            raise SolverError(f"water filling froze no job in stage {stages}, at {found.s} of {stage.end}")
        frozen |= done
        answer = Answer(
            x=found.raised.x,
            solver=found.raised.solver,
            gap=gap,
            shadow_prices=found.raised.shadow_prices if stages == 1 else answer.shadow_prices,
        )
    return Filled(answer=answer, levels=levels, stages=stages)
