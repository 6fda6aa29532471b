"""Raise demands together as far as the cluster allows: the one LP under every fairness policy.

    maximise    t
    subject to  throughput_m(x) >= base_m + slope_m t   for every job m
                time and capacity limits (5.1)-(5.3)

Its value, with the bound that proves it, and the cut  lambda . throughput(x) <= B  that holds for every
feasible x, whatever the demands.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers import linear
from ballast_policies.allocation.start import Start


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Raised:
    """How far the demands could be raised.

    Attributes:
        x: (columns,) shares that reach ``t``.
        t: the value reached by x, exactly.
        bound: proven upper bound on t.
        level_duals: (n,) lambda, with lambda . slope = 1.
        shadow_prices: (k,) t gained per GPU more of each type.
        cut: B of the cut above.
        solver: what solved it.
        start: for a similar program; None: this one was small.
    """

    x: np.ndarray
    t: float
    bound: float
    level_duals: np.ndarray
    shadow_prices: np.ndarray
    cut: float
    solver: str
    start: Start | None = None


def raise_demands(
    problem: Instance, *, base: np.ndarray, slope: np.ndarray, start: Start | None = None
) -> Raised:
    """Solve the LP above, from ``start`` if it is large; some slope must be positive.

    Raises:
        SolverError: the base cannot be met, or the solver failed.
    """
    solution = linear.maximise(problem, base=base, slope=slope, start=start)
    return Raised(
        x=solution.x,
        t=solution.t,
        bound=solution.bound,
        level_duals=solution.level_duals,
        shadow_prices=solution.shadow_prices,
        cut=solution.cut,
        solver=linear.SOLVER if solution.start is None else f"prices and {linear.SOLVER}",
        start=solution.start,
    )
