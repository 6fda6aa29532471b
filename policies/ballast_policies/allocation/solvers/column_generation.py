"""Column generation for programs with very many pairs of jobs.

Of n jobs there are n^2 / 2 pairs, and an optimum uses a few for each job. So the program is solved with all
jobs alone and some pairs; its multipliers give the reduced value of every other pair,

    value + lambda_1 rate_1 + lambda_2 rate_2 - mu_1 - mu_2 - gpus p,

and the best for each job are added, until none has a positive one: then the multipliers are optimal for all.
"""

import dataclasses

import highspy
import numpy as np

from ballast_policies.allocation.solvers.simplex import InfeasibleError, Program, Solved, by_simplex

FIRST, THEN = 4, 3
"""Pairs of each job in the first program, and added to it in each round."""
WORTH = 1e-9
"""Reduced values below this part of the multipliers' size count as 0."""


def solve(program: Program) -> Solved:
    """Solve in rounds.

    Raises:
        InfeasibleError: the demands cannot be met, with all columns.
        SolverError: HiGHS failed.
    """
    columns = program.columns
    alone = columns.second < 0
    scale = program.scale
    speed = columns.rate_first * scale[columns.first]
    speed[~alone] += (columns.rate_second * scale[columns.second])[~alone]
    inside = alone | _best(program, np.where(alone, 0.0, speed - 1.0), FIRST)
    if program.enough is not None:
        try:
            return _turns(program, inside | program.enough)[0]
        except InfeasibleError:
            # By rounding only: the demands are met to within 1e-9. Then as if nothing were known.
            pass
    if not program.gain and program.base.any():
        # Demands that take pairs: raise them together first, and keep the pairs that this needed.
        raising = dataclasses.replace(
            program,
            value=np.zeros(len(columns)),
            base=np.zeros(len(program)),
            slope=program.base,
            gain=1.0,
        )
        inside = _turns(raising, inside)[1]
    return _turns(program, inside)[0]


def _turns(program: Program, inside: np.ndarray) -> tuple[Solved, np.ndarray]:
    """The solution from the columns ``inside`` (a mask) on, and the columns that it took."""
    inside, basis = inside.copy(), None
    here = np.flatnonzero(inside)
    while True:
        found = by_simplex(_only(program, here), start=basis)
        worth = _worth(program, found)
        worth[inside] = 0.0
        size = max(float(found.time.max(initial=0.0)), float(np.abs(program.value).max(initial=0.0)), 1e-300)
        wanted = np.where(worth > WORTH * size, worth, 0.0)
        if not wanted.any():
            x = np.zeros(len(program.columns))
            x[here] = found.x
            return dataclasses.replace(found, x=x), inside
        inside |= _best(program, wanted, THEN)
        before, here = here, np.flatnonzero(inside)
        basis = _enlarged(found.basis, before, here)


def _enlarged(basis: highspy.HighsBasis | None, before: np.ndarray, here: np.ndarray) -> highspy.HighsBasis:
    """The basis over the columns ``before``, over those ``here``: the new ones are at 0."""
    assert basis is not None
    statuses = np.full(len(here), highspy.HighsBasisStatus.kLower, dtype=object)
    old = list(basis.col_status)
    statuses[np.searchsorted(here, before)] = old[: len(before)]
    larger = highspy.HighsBasis()
    larger.col_status = [*statuses.tolist(), *old[len(before) :]]
    larger.row_status = basis.row_status
    larger.valid = True
    return larger


def _worth(program: Program, found: Solved) -> np.ndarray:
    """(columns,) reduced value of a unit of each."""
    columns, level = program.columns, found.level * program.scale
    first, second, shared = columns.first, columns.second, columns.second >= 0
    worth: np.ndarray = program.value + level[first] * columns.rate_first - found.time[first]
    worth[shared] += (level[second] * columns.rate_second - found.time[second])[shared]
    worth -= columns.cost(found.prices)
    return worth


def _best(program: Program, worth: np.ndarray, most: int) -> np.ndarray:
    """(columns,) whether a column is among the ``most`` of positive worth of one of its two jobs."""
    chosen = np.zeros(len(worth), dtype=bool)
    candidates = np.flatnonzero(worth > 0)
    for job in (program.columns.first[candidates], program.columns.second[candidates]):
        order = np.lexsort((-worth[candidates], job))
        sorted_job = job[order]
        begin = np.flatnonzero(np.append(True, sorted_job[1:] != sorted_job[:-1]))
        place = np.arange(len(order)) - np.repeat(begin, np.diff(np.append(begin, len(order))))
        chosen[candidates[order[place < most]]] = True
    return chosen


def _only(program: Program, here: np.ndarray) -> Program:
    return dataclasses.replace(
        program,
        columns=program.columns.take(here),
        value=program.value[here],
    )
