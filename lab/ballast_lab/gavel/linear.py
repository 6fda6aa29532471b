"""Gavel's LPs: which of many optimal shares a solver returns.

Its fairness LPs have many optima, and what the solver of its published curves (ECOS, an interior-point
method) returns is near the middle of them: a job that needs little of its time for the common level still
gets much.  HiGHS's interior-point method, stopped before it goes to a vertex, stands for ECOS
here.  HiGHS's simplex returns a vertex: with the columns job by job and the types by name, as Gavel
has them, the same one as Gavel gets when it is made to use HiGHS.
"""

import highspy
import numpy as np
from ballast_policies.allocation.columns import Columns
from ballast_policies.allocation.solvers.linear import SolverError

COMMON_OPTIONS = (("output_flag", False), ("threads", 1))
INTERIOR_OPTIONS = (("solver", "ipm"), ("run_crossover", "off"), ("presolve", "off"))


def alone(rates: np.ndarray, gpus: np.ndarray, order: np.ndarray) -> Columns:
    """Every group by itself on every type where it runs, the types in ``order``.

    ``rates``: (n, k) steps/s; ``gpus``: (n,) of each job; ``order``: (k,) columns.
    """
    first, place = np.nonzero(rates[:, order] > 0)
    kind = order[place]
    return Columns(
        first=first,
        second=np.full(len(first), -1),
        place=kind,
        kind=kind,
        rate_first=rates[first, kind],
        rate_second=np.zeros(len(first)),
        gpus=gpus[first],
        pair=np.full(len(first), -1),
    )


def solve(
    ways: Columns,
    *,
    size: np.ndarray,
    capacity: np.ndarray,
    base: np.ndarray,
    slope: np.ndarray | None = None,
    interior: bool,
) -> np.ndarray:
    """(columns,) jobs of the first group that spend their time so: optimal shares.

    Args:
        ways: columns; jobs are groups of like jobs here, and a pair may be of two of the same group.
        size: (n,) jobs in each group.
        capacity: (k,) GPUs.
        base: (n,) steps/s that every job of a group gets.
        slope: (n,) steps/s more per unit of t, which is raised as far as it goes; None: any shares that
            give ``base``.
        interior: in the middle of what is optimal; else a vertex.

    Raises:
        SolverError: HiGHS ended without an optimum.
    """
    n, k, c = len(size), len(capacity), len(ways.first)
    full = np.zeros(n)
    np.maximum.at(full, ways.first, ways.rate_first)
    shared = np.flatnonzero(ways.second >= 0)
    second = ways.second[shared]
    np.maximum.at(full, second, ways.rate_second[shared])
    full = np.where(full > 0, full, 1.0)
    level = np.flatnonzero((base > 0) if slope is None else (base > 0) | (slope > 0))
    d = len(level)
    row_of = np.full(n, -1)
    row_of[level] = np.arange(d)
    here = np.arange(c)
    entries = [
        (row_of[ways.first], here, ways.rate_first / full[ways.first]),
        (d + ways.first, here, np.ones(c)),
        (d + n + ways.kind, here, ways.gpus.astype(float)),
        (row_of[second], shared, ways.rate_second[shared] / full[second]),
        (d + second, shared, np.ones(len(shared))),
    ]
    if slope is not None:
        unit = float((slope[level] / full[level]).max())
        raised = -slope[level] / (full[level] * unit) * size[level]
        entries.append((np.arange(d), np.full(d, c), raised))
    model = _model(
        entries,
        columns=c + (slope is not None),
        cost=np.concatenate([np.zeros(c), np.ones(int(slope is not None))]),
        lower=np.concatenate([base[level] / full[level] * size[level], np.full(n + k, -highspy.kHighsInf)]),
        upper=np.concatenate([np.full(d, highspy.kHighsInf), size, capacity]).astype(float),
    )
    highs = highspy.Highs()
    for option, setting in COMMON_OPTIONS + (INTERIOR_OPTIONS if interior else ()):
        highs.setOptionValue(option, setting)
    highs.passModel(model)
    highs.run()
    status = highs.getModelStatus()
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kUnknown):
        raise SolverError(f"HiGHS ended with {highs.modelStatusToString(status)}")
    x: np.ndarray = np.clip(np.array(highs.getSolution().col_value)[:c], 0.0, None)
    return x


def _model(
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    *,
    columns: int,
    cost: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
) -> highspy.HighsLp:
    """The matrix column by column; entries of the same place are added, rows below 0 left out."""
    row, place, value = (np.concatenate(part) for part in zip(*entries, strict=True))
    kept = (row >= 0) & (value != 0)
    row, place, value = row[kept], place[kept], value[kept]
    order = np.lexsort((row, place))
    row, place, value = row[order], place[order], value[order]
    new = np.concatenate([[True], (np.diff(row) != 0) | (np.diff(place) != 0)])
    at = np.flatnonzero(new)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, len(lower)
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_ = cost
    model.col_lower_, model.col_upper_ = np.zeros(columns), np.full(columns, highspy.kHighsInf)
    model.row_lower_, model.row_upper_ = lower, upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.searchsorted(place[at], np.arange(columns + 1))
    model.a_matrix_.index_ = row[at]
    model.a_matrix_.value_ = np.add.reduceat(value, at)
    return model
