"""Linear programs over columns for the simplex method of HiGHS, and their optimum."""

import dataclasses

import highspy
import numpy as np

from ballast_policies.allocation.columns import Columns
from ballast_policies.allocation.solvers.dense_program import Rows, dense

SOLVER = f"HiGHS {highspy.Highs().version()}"
TIME_LIMIT_SECONDS = 600.0
PRIMAL = 4
"""HiGHS's number for the primal simplex method."""
TOLERANCE = 1e-10
"""Tolerance of primal and dual feasibility."""
SMALL = 300
"""Rows up to which HiGHS is faster without presolving."""

SMALLEST_ENTRIES = 1e-9, 1e-12
"""HiGHS takes smaller entries for 0: by itself, and at least. Speeds, as parts of the fastest, count in what
a job had before. Its presolving finds fewer programs infeasible with the second: that is for those with such
entries."""


class SolverError(RuntimeError):
    """The solver ended without an optimal solution; the text gives the reason."""


class InfeasibleError(SolverError):
    """No x satisfies the demands."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """Jobs or classes of jobs, demands as fractions of full speed.

        maximise    value . x + gain t    within levels, times and capacities, as in ``linear``

    Attributes:
        columns: rates as steps/s of one job at 1, GPUs of all that run.
        value: (columns,) worth at 1.
        base, slope: (n,) demands; both 0: no row.
        scale: (n,) 1 / full speed.
        capacity: (k,) GPUs.
        gain: 1, or 0: there is no t.
        elastic: some jobs have configurations.
        enough: (columns,) whether it is among columns that are known to meet the demands; None: not known.
    """

    columns: Columns
    value: np.ndarray
    base: np.ndarray
    slope: np.ndarray
    scale: np.ndarray
    capacity: np.ndarray
    gain: float
    elastic: bool = False
    enough: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.scale)

    def rows(self) -> Rows | None:
        """The same with a dense row a job; None where jobs share, or one has a demand and no column.

        None also where one job has very many more configurations than the others.
        """
        columns = self.columns
        if (columns.second >= 0).any():
            return None
        present = np.zeros(len(self), dtype=bool)
        present[columns.first] = True
        if ((self.base > 0) | (self.slope > 0))[~present].any():
            return None
        worth, k = self.value if self.value.any() else None, len(self.capacity)
        tables = dense(columns, self.scale, k, elastic=self.elastic, value=worth)
        if tables is None:
            return None
        rates, gpus, value, use = tables
        return Rows(
            rates=rates,
            gpus=gpus,
            value=value,
            base=self.base,
            slope=self.slope,
            capacity=self.capacity,
            lift=np.zeros(k),
            gain=self.gain,
            use=use,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """Optimal shares and multipliers of a program.

    Attributes:
        x: (columns,).
        level, time: (n,) of the demands (per fraction of full speed) and of the jobs' time.
        prices: (k,) of the capacities.
        basis: of the simplex method, where that was used; columns x, then t.
        solver: name of the method or solver.
    """

    x: np.ndarray
    level: np.ndarray
    time: np.ndarray
    prices: np.ndarray
    basis: highspy.HighsBasis | None = None
    solver: str = SOLVER


def by_simplex(program: Program, *, start: highspy.HighsBasis | None = None) -> Solved:
    """Solve by HiGHS.

    ``start``: a feasible basis, from which the primal simplex method continues.

    Raises:
        InfeasibleError: the demands cannot be met.
        SolverError: HiGHS ended otherwise without an optimum.
    """
    demanded = np.flatnonzero((program.base > 0) | (program.slope > 0))
    c, n, d = len(program.columns), len(program), len(demanded)
    model = _model(program, demanded)
    highs, status = _run(model, start)
    worth = 1.0
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible):
        # Jobs that are a million million times faster than others: worths near 1 it may still solve.
        worth = float(np.abs(model.col_cost_).max(initial=0.0)) or 1.0
        model.col_cost_ = np.array(model.col_cost_) / worth
        highs, status = _run(model, start)
    if status == highspy.HighsModelStatus.kInfeasible:
        raise InfeasibleError("the demands cannot be met")
    if status != highspy.HighsModelStatus.kOptimal:
        raise SolverError(f"HiGHS ended with {highs.modelStatusToString(status)}")
    solution = highs.getSolution()
    duals = np.array(solution.row_dual) * worth
    level = np.zeros(n)
    level[demanded] = np.maximum(-duals[:d], 0.0)
    return Solved(
        x=np.array(solution.col_value)[:c],
        level=level,
        time=np.maximum(duals[d : d + n], 0.0),
        prices=np.maximum(duals[d + n :], 0.0),
        basis=highs.getBasis(),
    )


def _run(
    model: highspy.HighsLp, start: highspy.HighsBasis | None
) -> tuple[highspy.Highs, highspy.HighsModelStatus]:
    """HiGHS after it has ended, and how it has."""
    highs = _quiet(model)
    highs.setOptionValue("time_limit", TIME_LIMIT_SECONDS)
    highs.passModel(model)
    if start is not None:
        highs.setBasis(start)
        highs.setOptionValue("simplex_strategy", PRIMAL)
    highs.run()
    return highs, highs.getModelStatus()


def _quiet(lp: highspy.HighsLp) -> highspy.Highs:
    """HiGHS for the program, on one thread, without output."""
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("primal_feasibility_tolerance", TOLERANCE)
    highs.setOptionValue("dual_feasibility_tolerance", TOLERANCE)
    usual, least = SMALLEST_ENTRIES
    if np.abs(lp.a_matrix_.value_).min(initial=1.0) < usual:
        highs.setOptionValue("small_matrix_value", least)
    return highs


def optimum(lp: highspy.HighsLp) -> tuple[np.ndarray, np.ndarray] | None:
    """(values of the columns, duals of the rows) of a program; None where HiGHS finds no optimum."""
    highs = _quiet(lp)
    if lp.num_row_ < SMALL:
        highs.setOptionValue("presolve", "off")
    highs.passModel(lp)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = highs.getSolution()
    return np.array(solution.col_value), np.array(solution.row_dual)


def set_entries(lp: highspy.HighsLp, row: np.ndarray, column: np.ndarray, entry: np.ndarray) -> None:
    """Give a program of ``lp.num_col_`` columns its matrix: (m,) rows, columns and entries, in any order.

    Entries of 0 are left out.
    """
    kept = np.flatnonzero(entry)
    row, column, entry = row[kept], column[kept], entry[kept]
    order = np.argsort(column, kind="stable")
    counts = np.bincount(column, minlength=lp.num_col_)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lp.a_matrix_.index_ = row[order].astype(np.int32)
    lp.a_matrix_.value_ = entry[order]


def _model(program: Program, demanded: np.ndarray) -> highspy.HighsLp:
    """Rows in the order level of the demanded, time, capacity; columns x, then t where there is a gain."""
    columns, capacity, gain = program.columns, program.capacity, program.gain
    c, n, d, k = len(columns), len(program), len(demanded), len(capacity)
    level_row = np.full(n, -1)
    level_row[demanded] = np.arange(d)
    here = np.arange(c)
    shared = np.flatnonzero(columns.second >= 0)
    taking, kind, gpus = columns.entries()
    rows = [level_row[columns.first], d + columns.first, d + n + kind]
    values = [columns.rate_first * program.scale[columns.first], np.ones(c), gpus]
    places = [here, here, taking]
    if len(shared):
        second = columns.second[shared]
        rows += [level_row[second], d + second]
        values += [columns.rate_second[shared] * program.scale[second], np.ones(len(shared))]
        places += [shared, shared]
    if gain:
        rows.append(level_row[demanded])
        values.append(-program.slope[demanded])
        places.append(np.full(d, c))
    row, entry, place = np.concatenate(rows), np.concatenate(values), np.concatenate(places)
    kept = row >= 0
    row, entry, place = row[kept], entry[kept], place[kept]
    width = c + (1 if gain else 0)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = width, d + n + k
    lp.sense_ = highspy.ObjSense.kMaximize
    infinite = highspy.kHighsInf
    lp.col_cost_ = np.concatenate([program.value, [gain] if gain else []])
    lp.col_lower_ = np.concatenate([np.zeros(c), [-infinite] if gain else []])
    lp.col_upper_ = np.full(width, infinite)
    lp.row_lower_ = np.concatenate([program.base[demanded], np.full(n + k, -infinite)])
    lp.row_upper_ = np.concatenate([np.full(d, infinite), np.ones(n), capacity])
    set_entries(lp, row, place, entry)
    return lp
