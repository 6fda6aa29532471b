"""The furthest feasible point of a path of demands, the common subproblem of the fairness policies.

A path gives the throughput demanded of each job, d(s), growing with s in every component.  Max-min
fairness, makespan, finish-time fairness and each stage of water filling all solve

    maximise s   subject to   throughput_m(x) >= d_m(s) for every job m,   x feasible (5.1)-(5.3).

A linear path is one LP (``linear.maximise``).  Others are solved from above by cuts: at a trial point s'
the LP "raise all demands from d(start) towards d(s')" has multipliers lambda with
lambda . throughput(x) <= B for every feasible x, so s is no larger than the root of
lambda . d(s) = B.  Each root is a proven bound and the next trial point, and they converge like
Newton's method.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers import linear
from ballast_policies.allocation.solvers.dense_program import dot

TOLERANCE = 1e-9
"""Relative tolerance: gap between bound and value, and by how much a demand may be missed."""

ROUNDING = 1e-12
"""Part of a job's full speed up to which a demand is rounding: what a stage before ended 1e-16 too late."""

FIRST_PART = 1e-3
"""First distance of a root from its expected place, as a part of it."""

DIFFERENCE = 1e-6
"""Part of s over which the growth of demands is measured."""

BINDING = 1e-9
"""Part of the largest multiplier (per full speed) from which on a job's counts as positive."""


class DemandPath(Protocol):
    """Demands d(s) for s from a feasible start to ``end``, growing with s."""

    @property
    def end(self) -> float:
        """The end of the path: beyond it no demand grows, or a job cannot meet its own alone. Finite."""
        ...

    def demand(self, s: float) -> np.ndarray:
        """(n,) steps/s demanded of each job at ``s``."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaxFeasible:
    """The furthest point of a path.

    Attributes:
        s: how far ``raised.x`` reaches.
        bound: proven upper bound on s.
        raised: the last LP; its x are the shares.
        proof: the LP whose multipliers prove ``bound``: at the last, a job that is full there may seem to.
        binding: (n,) whether lambda_m > 0 in a cut that is tight at s: such a job can get more only if
            another gets less.
    """

    s: float
    bound: float
    raised: linear.LinearSolution
    proof: linear.LinearSolution
    binding: np.ndarray


def max_feasible(instance: Instance, path: DemandPath) -> MaxFeasible:
    """The furthest point of ``path``, whose point 0 must be feasible.

    Raises:
        SolverError: it is not, or the solver failed.
    """
    lowest = path.demand(0.0)
    trial, bound, proof = path.end, path.end, None
    cuts: list[tuple[float, np.ndarray]] = []
    while True:
        slope = np.maximum(path.demand(trial) - lowest, 0.0)
        raised = linear.maximise(instance, base=lowest * (1 - TOLERANCE), slope=slope)
        root = root_of_cut(path, raised.level_duals, raised.cut, trial)
        if proof is None or root < bound * (1 - TOLERANCE):
            proof = raised
        bound = min(bound, root)
        weight = raised.level_duals * instance.top
        cuts.append((root, weight > BINDING * weight.max()))
        s = _reached(path, instance.throughput(raised.x) + ROUNDING * instance.top, bound)
        close = bound - s <= 10 * TOLERANCE * abs(bound)
        # A root that no longer moves is exact to floating-point precision.
        if close or root >= trial * (1 - 1e-13):
            tight = [jobs for end, jobs in cuts if end <= bound + 10 * TOLERANCE * max(abs(bound), 1e-300)]
            binding = np.logical_or.reduce(tight)
            return MaxFeasible(s=s, bound=bound, raised=raised, proof=proof, binding=binding)
        trial = root


def per_gpu(path: DemandPath, s: float, level_duals: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """(k,) how much further than ``s`` the path could go with one GPU more of each type.

    ``level_duals``: (n,) lambda of a cut that is tight at s; ``prices``: (k,) increase of B per GPU.
    """
    before = s * (1 - DIFFERENCE)
    rise = dot(level_duals, path.demand(s) - path.demand(before))
    return prices * ((s - before) / rise) if rise > 0 else prices


def _reached(path: DemandPath, throughput: np.ndarray, high: float) -> float:
    """The largest s up to ``high`` whose demands are met, to a relative 1e-9."""
    low, enough = 0.0, throughput * (1 + 2 * TOLERANCE)
    if (path.demand(high) <= enough).all():
        return high
    for _ in range(100):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if (path.demand(middle) <= enough).all():
            low = middle
        else:
            high = middle
    return low


def root_of_cut(
    path: DemandPath,
    level_duals: np.ndarray,
    cut: float,
    end: float,
    *,
    precision: float = 1e-15,
    near: float | None = None,
) -> float:
    """An s at or just above lambda . d(s) = cut between 0 and end; the end where that is not reached.

    ``path``: d; ``level_duals``: (n,) lambda; ``precision``: relative, of s; ``near``: a guess of s.
    """

    def excess(s: float) -> float:
        return float((level_duals * path.demand(s)).sum()) - cut

    low, high = 0.0, end
    below, above = excess(low), excess(high)
    if above <= 0:
        return end
    if below >= 0:
        return 0.0
    if near is not None and 0.0 < near < end:
        low, high = _around(excess, near, end)
        below, above = excess(low), excess(high)
        if above <= 0:
            return high
    # Illinois: false position, with the weight of an end halved that stays for a second time.
    side = 0
    for _ in range(200):
        if high - low <= precision * max(abs(high), abs(low)):
            break
        s = high - above * (high - low) / (above - below)
        s = s if low < s < high else 0.5 * (low + high)
        value = excess(s)
        if value >= 0:
            high, above = s, value
            below, side = (0.5 * below, 1) if side == 1 else (below, 1)
        else:
            low, below = s, value
            above, side = (0.5 * above, -1) if side == -1 else (above, -1)
        if value == 0 or low >= high:
            break
    return high


def _around(excess: Callable[[float], float], near: float, end: float) -> tuple[float, float]:
    """Two points around ``near`` between which the growing ``excess`` is 0, within 0 and ``end``."""
    part, here = FIRST_PART, near
    up = excess(near) < 0
    while True:
        before, here = here, near * (1.0 + part) if up else near * (1.0 - part)
        if up and (here >= end or excess(here) >= 0):
            return before, min(here, end)
        if not up and (here <= 0.0 or excess(here) <= 0):
            return max(here, 0.0), before
        part *= 8.0
