"""Finish-time fairness, Themis's rho (dissertation section 5.4.2).

    minimise_X  max_m  rho_m,   rho_m = (t_m + num_steps_m / throughput(m, X))
                                        / (t_m_isolated + num_steps_m / throughput(m, X_isolated))

t_m is ``elapsed``, t_m_isolated ``isolated_elapsed``; X_isolated, by weight, as in ``isolated``, also of
elastic jobs.  Not an LP: rho <= r requires throughput(m, X) >= num_steps_m / (r D_m - t_m) with D_m the
denominator, which grows as r falls.  So it is the furthest point of a path of demands with s = 1/r, found
exactly by cuts, each an LP (``demand_path``).  Jobs that can run nowhere do not
count.  Ties as in ``max_min_fairness``.  Unit: 1.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.fairness.demand_path import max_feasible
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.isolated import isolated_speeds
from ballast_policies.allocation.policies.max_min_fairness import fill_idle_capacity
from ballast_policies.allocation.policy import Answer, nothing
from ballast_policies.allocation.solvers.linear import SolverError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Path:
    """d_m(s) = num_steps_m s / (D_m - t_m s) for the jobs with steps left; s = 1 / rho."""

    steps: np.ndarray
    elapsed: np.ndarray
    isolated: np.ndarray
    full: np.ndarray

    @property
    def end(self) -> float:
        """The s at which the first job would have to run at full speed for all of its time."""
        busy = self.steps > 0
        ends = self.isolated[busy] / (self.elapsed[busy] + self.steps[busy] / self.full[busy])
        return float(ends.min())

    def demand(self, s: float) -> np.ndarray:
        left = self.isolated - self.elapsed * s
        # Up to the end of the path no job needs more than full speed. What is left may round to 0 before.
        needed, busy = self.steps * s, self.steps > 0
        slower = busy & (needed < self.full * left)
        return np.divide(needed, left, out=np.where(busy, self.full, 0.0), where=slower)


def _path(instance: Instance) -> _Path:
    steps = np.where(instance.runnable, instance.steps(), 0.0)
    alone = isolated_speeds(instance)
    isolated = instance.isolated_elapsed + np.divide(steps, alone, out=np.zeros_like(steps), where=alone > 0)
    return _Path(steps=steps, elapsed=instance.elapsed, isolated=isolated, full=instance.top)


def solve(instance: Instance) -> Answer:
    """Shares that minimise the largest rho."""
    path = _path(instance)
    if not (path.steps > 0).any():
        return nothing(instance)
    found = max_feasible(instance, path)
    if found.bound <= 0:
        raise SolverError("the largest rho is too large for a number")
    return Answer(
        x=fill_idle_capacity(instance, found.raised.x, path.demand(found.s), found.raised),
        solver=found.raised.solver,
        bound=1.0 / found.bound,
    )


def objective(instance: Instance, x: np.ndarray) -> float:
    """The largest rho of the jobs with steps left; 0 without any."""
    path = _path(instance)
    busy = path.steps > 0
    if not busy.any():
        return 0.0
    speed = instance.throughput(x)[busy]
    if not (speed > 0).all():
        return float("inf")
    rho = (path.elapsed[busy] + path.steps[busy] / speed) / path.isolated[busy]
    return float(rho.max())
