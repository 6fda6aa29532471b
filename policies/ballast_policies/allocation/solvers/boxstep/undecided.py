"""The jobs whose answer can change inside a box of prices, and the LP of them."""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.best_response import Response
from ballast_policies.allocation.solvers.boxstep.sampling import stratified
from ballast_policies.allocation.solvers.crossover import (
    Box,
    Closeness,
    CrossoverSolution,
    crossover,
    decided,
)
from ballast_policies.allocation.solvers.dense_program import Rows

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


def undecided_in(
    rows: Rows, at: Response, box: Box, *, close: Closeness, lp_jobs: int, widest: float
) -> Undecided:
    """The undecided jobs in the box, a sample of them where they are more than ``lp_jobs``.

    Args:
        rows: the program.
        at: the response in the middle of the box.
        box: the box.
        close: how close the jobs are to a change.
        lp_jobs: jobs in an LP.
        widest: factor by which the box may grow where the LP has room for more jobs.
    """
    nearest = close.nearest
    inside = nearest <= 1.0
    if inside.sum() > lp_jobs:
        free = np.flatnonzero(inside)
        stratum = at.high[free] * close.columns.shape[1] + close.place[free]
        some, weight = stratified(
            rows.gpus[free], stratum, nearest[free], _sample_size(rows, close, free, lp_jobs)
        )
        chosen = free[some]
        near = close.take(chosen)
        return Undecided(
            box=box, inside=inside, chosen=chosen, weight=weight, near=near.columns, corner=near.corner
        )
    wider = 1.0
    if len(nearest) > lp_jobs:
        # As wide as the LP has room for.
        room = float(np.partition(nearest, lp_jobs)[lp_jobs])
        wider = min(max(1.0, room), widest) if np.isfinite(room) else 1.0
    inside = nearest <= wider
    chosen = np.flatnonzero(inside)
    near = close.take(chosen)
    return Undecided(
        box=Box(prices=box.prices * wider, t=box.t * wider),
        inside=inside,
        chosen=chosen,
        weight=None,
        near=near.columns / wider,
        corner=near.corner / wider,
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
