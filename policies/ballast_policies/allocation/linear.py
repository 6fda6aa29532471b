"""Linear programs over the columns of an instance, by HiGHS, with a bound of our own.

    maximise    value . x + gain t
    subject to  throughput_m(x) >= base_m + slope_m t   for the jobs in ``demanded``  (level, dual lambda_m)
                time_m(x) <= 1                             for every job m  (5.2)         (time, dual mu_m)
                gpus_j(x) <= capacity_j                    for every type j (5.3)        (capacity, dual p_j)
                x >= 0                                                      (5.1)

``gain`` is 1 with ``value`` = 0 (how far can all demands be raised together), or 0 (then t = 0).
The bound on the optimum is computed here from the duals by weak duality, so that it rests on
arithmetic and not on the solver's word: any multipliers of the right sign give a valid one.

Where several x are optimal, HiGHS's simplex with one thread returns the same vertex for the same
input, and that is the rule for ties unless a policy states a finer one.
"""

import dataclasses

import highspy
import numpy as np

from ballast_policies.allocation.instance import Columns, Instance
from ballast_policies.allocation.merging import merged

SOLVER = f"HiGHS {highspy.Highs().version()}"
TIME_LIMIT_SECONDS = 600.0


class SolverError(RuntimeError):
    """The solver ended without an optimal solution; the text says how."""


class InfeasibleError(SolverError):
    """No x satisfies the demands."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearSolution:
    """Solution of a linear program.

    Attributes:
        x: (columns,) shares; every limit on time and GPUs holds exactly.
        t: how far the demands are raised; 0 where the program has no ``gain``.
        bound: proven upper bound on the optimum.
        level_duals: (n,) lambda: what one step/s less demanded of job m would add to the objective.
        shadow_prices: (k,) p: what one GPU more of type j would add to the objective.
        cut: ``level_duals @ throughput(x) <= cut`` for every feasible x; only with ``gain``.
    """

    x: np.ndarray
    t: float
    bound: float
    level_duals: np.ndarray
    shadow_prices: np.ndarray
    cut: float = float("inf")


def maximise(
    problem: Instance,
    *,
    value: np.ndarray | None = None,
    base: np.ndarray | None = None,
    slope: np.ndarray | None = None,
) -> LinearSolution:
    """Solve the program above; with ``slope``, ``gain`` is 1 and ``value`` must be left out.

    Args:
        problem: the instance.
        value: (columns,) worth of full time on each column.
        base: (n,) steps/s demanded of each job; 0: nothing demanded.
        slope: (n,) steps/s demanded per unit of t.

    Raises:
        InfeasibleError: the demands cannot be met.
        SolverError: HiGHS ended otherwise without an optimum.
    """
    n = len(problem.gpus)
    gain = 1.0 if slope is not None else 0.0
    value = np.zeros(len(problem.columns)) if value is None else value
    base = np.zeros(n) if base is None else base
    slope = np.zeros(n) if slope is None else slope
    demanded = np.flatnonzero((base > 0) | (slope > 0))
    if not len(problem.columns):
        if len(demanded):
            raise InfeasibleError("nobody can run, and something is demanded")
        return LinearSolution(
            x=np.zeros(0),
            t=0.0,
            bound=0.0,
            level_duals=np.zeros(n),
            shadow_prices=np.zeros(len(problem.capacity)),
        )
    # Rows in fractions of a job's full speed, and t of order one, so that tolerances mean the same for all.
    full = np.where(problem.top > 0, problem.top, 1.0)
    unit = float((slope[demanded] / full[demanded]).max()) if gain else 1.0
    same = merged(problem, base, slope, value=value)
    if same is None:
        program = _Program(
            columns=problem.columns,
            time_first=np.ones(len(problem.columns)),
            time_second=(problem.columns.second >= 0).astype(float),
            value=value,
            base=base / full,
            slope=slope / (full * unit),
            scale=1.0 / full,
        )
    else:
        columns, time_first, time_second = same.program()
        one = same.chosen
        program = _Program(
            columns=columns,
            time_first=time_first,
            time_second=time_second,
            value=same.sum_of(value),
            base=(base / full)[one],
            slope=(slope / (full * unit))[one],
            scale=1.0 / full[one],
        )
    status, x, level, time, prices = _run(program, problem.capacity, gain)
    if status == highspy.HighsModelStatus.kInfeasible:
        raise InfeasibleError("the demands cannot be met")
    if status != highspy.HighsModelStatus.kOptimal:
        raise SolverError(f"HiGHS ended with {highspy.Highs().modelStatusToString(status)}")
    if same is not None:
        x = same.spread(x)
        level, time = (level / same.size)[same.of], (time / same.size)[same.of]
    return certified(
        problem,
        x=problem.feasible(x),
        value=value,
        base=base,
        slope=slope,
        level=level / full,
        time=time,
        prices=prices,
    )


def certified(
    problem: Instance,
    *,
    x: np.ndarray,
    value: np.ndarray,
    base: np.ndarray,
    slope: np.ndarray,
    level: np.ndarray,
    time: np.ndarray,
    prices: np.ndarray,
) -> LinearSolution:
    """A feasible ``x`` and any multipliers, as a solution with the bound that the multipliers prove.

    For every feasible (x, t): value.x + gain t
        <= sum_c x_c (value_c + lambda r_c - mu_c - gpus_c p_c) + sum mu + p.capacity - lambda.base,
    if lambda.slope = gain.  Raising mu_m until no bracket is positive leaves the constant terms.
    """
    columns = problem.columns
    gained = bool((slope > 0).any())
    if gained:
        total = level @ slope
        scale = 1.0 / total if total > 0 else 0.0
        level, time, prices = level * scale, time * scale, prices * scale
    first, second = columns.first, columns.second
    shared = second >= 0
    worth = value + level[first] * columns.rate_first - columns.gpus * prices[columns.kind]
    if shared.any():
        worth[shared] += level[second[shared]] * columns.rate_second[shared] - time[second[shared]]
    else:
        # Without pairs the best mu for these lambda and p is known, whatever the solver said.
        time = np.zeros_like(time)
    missing = np.zeros_like(time)
    np.maximum.at(missing, first, worth - time[first])
    available = float((time + missing).sum() + prices @ problem.capacity)
    bound = available - float(level @ base)
    if not gained:
        return LinearSolution(x=x, t=0.0, bound=bound, level_duals=level, shadow_prices=prices)
    reached = problem.throughput(x)
    rising = slope > 0
    t = float(((reached - base)[rising] / slope[rising]).min())
    if not (level > 0).any():
        bound = available = float("inf")
    return LinearSolution(x=x, t=t, bound=bound, level_duals=level, shadow_prices=prices, cut=available)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Program:
    """What goes to the solver: jobs or classes of jobs, demands as fractions of full speed.

    Attributes:
        columns: rates as steps/s of one job at 1, GPUs of all that run.
        time_first, time_second: (columns,) time that the first and the second spend there at 1.
        value: (columns,) worth at 1.
        base, slope: (n,) demands; both 0: no row.
        scale: (n,) 1 / full speed.
    """

    columns: Columns
    time_first: np.ndarray
    time_second: np.ndarray
    value: np.ndarray
    base: np.ndarray
    slope: np.ndarray
    scale: np.ndarray


def _run(
    program: _Program, capacity: np.ndarray, gain: float
) -> tuple[highspy.HighsModelStatus, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Status, x, and the duals of level (per fraction of full speed), time and capacity; 0 on failure."""
    demanded = np.flatnonzero((program.base > 0) | (program.slope > 0))
    c, n, d, k = len(program.columns), len(program.scale), len(demanded), len(capacity)
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("time_limit", TIME_LIMIT_SECONDS)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("primal_feasibility_tolerance", 1e-10)
    highs.setOptionValue("dual_feasibility_tolerance", 1e-10)
    highs.passModel(_model(program, demanded, capacity, gain))
    highs.run()
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        return status, np.zeros(c), np.zeros(n), np.zeros(n), np.zeros(k)
    solution = highs.getSolution()
    duals = np.array(solution.row_dual)
    level = np.zeros(n)
    level[demanded] = np.maximum(-duals[:d], 0.0)
    time, prices = np.maximum(duals[d : d + n], 0.0), np.maximum(duals[d + n :], 0.0)
    return status, np.array(solution.col_value)[:c], level, time, prices


def _model(program: _Program, demanded: np.ndarray, capacity: np.ndarray, gain: float) -> highspy.HighsLp:
    """Rows in the order level of the demanded, time, capacity; columns x, then t where there is a gain."""
    columns = program.columns
    c, n, d, k = len(columns), len(program.scale), len(demanded), len(capacity)
    level_row = np.full(n, -1)
    level_row[demanded] = np.arange(d)
    here = np.arange(c)
    shared = np.flatnonzero(columns.second >= 0)
    rows = [level_row[columns.first], d + columns.first, d + n + columns.kind]
    values = [columns.rate_first * program.scale[columns.first], program.time_first, columns.gpus]
    places = [here, here, here]
    if len(shared):
        second = columns.second[shared]
        rows += [level_row[second], d + second]
        values += [columns.rate_second[shared] * program.scale[second], program.time_second[shared]]
        places += [shared, shared]
    if gain:
        rows.append(level_row[demanded])
        values.append(-program.slope[demanded])
        places.append(np.full(d, c))
    row, entry, place = np.concatenate(rows), np.concatenate(values), np.concatenate(places)
    kept = (row >= 0) & (entry != 0)
    row, entry, place = row[kept], entry[kept], place[kept]
    order = np.argsort(place, kind="stable")
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
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    counts = np.bincount(place, minlength=width)
    lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lp.a_matrix_.index_ = row[order].astype(np.int32)
    lp.a_matrix_.value_ = entry[order]
    return lp
