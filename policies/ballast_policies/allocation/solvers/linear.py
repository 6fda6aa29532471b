"""Linear programs over the columns of an instance, by HiGHS, with an independent bound.

    maximise    value . x + gain t
    subject to  throughput_m(x) >= base_m + slope_m t   for the jobs in ``demanded``  (level, dual lambda_m)
                time_m(x) <= 1                             for every job m  (5.2)         (time, dual mu_m)
                gpus_j(x) <= capacity_j                    for every type j (5.3)        (capacity, dual p_j)
                x >= 0                                                      (5.1)

``gain`` is 1 with ``value`` = 0 (how far can all demands be raised together), or 0 (then t = 0).
The bound on the optimum is computed here from the duals by weak duality, so that it rests on
arithmetic and not on the solver's report: any multipliers of the right sign give a valid one.

Where several x are optimal, HiGHS's simplex with one thread returns the same vertex for the same
input, and that is the rule for ties unless a policy states a finer one.

Of n jobs there are n^2 / 2 pairs, and an optimum uses a few for each job. So a program with very many pairs
is solved by column generation: with all jobs alone and some pairs; its multipliers give the reduced value of
every other pair,

    value + lambda_1 rate_1 + lambda_2 rate_2 - mu_1 - mu_2 - gpus p,

and the best for each job are added, until none has a positive one: then the multipliers are optimal for all.

A cluster runs thousands of jobs of a few dozen models. Jobs with the same speeds, gang, demands and worth are
interchangeable: averaging a solution over them changes no limit, demand or objective, so there is an optimum
in which their shares are equal, and without pairs it is found with one row for a *class* of them. A column of
a class of n jobs is the share of each member, and takes n times its GPUs. Level and time rows are those of
one member. Multipliers of a class row are divided by n to become those of its members.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import highspy
import numpy as np

from ballast_policies.allocation.columns import Columns
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers import boxstep
from ballast_policies.allocation.solvers.dense_program import WORTH_IT, dot, equal_rows, mostly_distinct
from ballast_policies.allocation.solvers.methods import (
    PAIRS,
    PRICES,
    SIMPLEX,
    Size,
    Task,
    choose,
    fell_back,
)
from ballast_policies.allocation.solvers.simplex import (
    SOLVER,
    InfeasibleError,
    Program,
    Solved,
    SolverError,
    by_simplex,
)

__all__ = ["SOLVER", "InfeasibleError", "LinearSolution", "SolverError", "certified", "maximise", "watched"]

FIRST, THEN = 4, 3
"""Pairs of each job in the first program, and added to it in each round."""
WORTH = 1e-9
"""Reduced values below this part of the multipliers' size count as 0."""


def _by_pairs(program: Program) -> Solved:
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
        columns = program.columns.take(here)
        some = dataclasses.replace(program, columns=columns, value=program.value[here])
        found = by_simplex(some, start=basis)
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


SMALLEST_SLOPE = 2e-9
"""Slopes below this part of the largest are raised to it: HiGHS takes smaller entries for 0, and a job with a
second left would get no time at all beside one with months. The bound is that of the slopes as given."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearSolution:
    """Solution of a linear program.

    Attributes:
        x: (columns,) shares; every limit on time and GPUs holds exactly.
        t: how far the demands are raised; 0 where the program has no ``gain``.
        bound: proven upper bound on the optimum.
        level_duals: (n,) lambda: increase of the objective per step/s less demanded of job m.
        shadow_prices: (k,) p: increase of the objective per additional GPU of type j.
        solver: name of the method or solver.
        cut: ``level_duals @ throughput(x) <= cut`` for every feasible x; only with ``gain``.
    """

    x: np.ndarray
    t: float
    bound: float
    level_duals: np.ndarray
    shadow_prices: np.ndarray
    cut: float = float("inf")
    solver: str = SOLVER


def maximise(
    instance: Instance,
    *,
    value: np.ndarray | None = None,
    base: np.ndarray | None = None,
    slope: np.ndarray | None = None,
    feasible_x: np.ndarray | None = None,
) -> LinearSolution:
    """Solve the program above; with ``slope``, ``gain`` is 1 and ``value`` must be left out.

    Args:
        instance: the instance.
        value: (columns,) worth of full time on each column.
        base: (n,) steps/s demanded of each job; 0: nothing demanded.
        slope: (n,) steps/s demanded per unit of t.
        feasible_x: (columns,) shares that meet the demands, where some are known.

    Raises:
        InfeasibleError: the demands cannot be met.
        SolverError: HiGHS ended otherwise without an optimum.
    """
    n = len(instance.gpus)
    gain = 1.0 if slope is not None else 0.0
    value = np.zeros(len(instance.columns)) if value is None else value
    base = np.zeros(n) if base is None else base
    slope = np.zeros(n) if slope is None else slope
    demanded = np.flatnonzero((base > 0) | (slope > 0))
    if not len(instance.columns):
        if len(demanded):
            raise InfeasibleError("no job can run, and something is demanded")
        return LinearSolution(
            x=np.zeros(0),
            t=0.0,
            bound=0.0,
            level_duals=np.zeros(n),
            shadow_prices=np.zeros(len(instance.capacity)),
        )
    # Rows in fractions of a job's full speed, and t of order one, so that tolerances mean the same for all.
    full = np.where(instance.top > 0, instance.top, 1.0)
    unit = float((slope[demanded] / full[demanded]).max()) if gain else 1.0
    fraction = slope / (full * unit)
    fraction = np.where(slope > 0, np.maximum(fraction, SMALLEST_SLOPE), 0.0)
    same = _merged(instance, full, base, slope, value=value)
    rows = slice(None) if same is None else same.chosen
    program = Program(
        columns=instance.columns if same is None else same.columns,
        value=value if same is None else same.sum_of(value),
        base=(base / full)[rows],
        slope=fraction[rows],
        scale=1.0 / full[rows],
        capacity=instance.capacity,
        gain=gain,
        elastic=bool(instance.elastic.any()),
        enough=None if feasible_x is None or same is not None else feasible_x > 0,
    )
    solved = _solved(program)
    x, level, time = solved.x, solved.level, solved.time
    if same is not None:
        x = x[same.column]
        level, time = (level / same.size)[same.of], (time / same.size)[same.of]
    solved = dataclasses.replace(solved, x=instance.feasible(x), level=level / full, time=time)
    solution = certified(instance, solved, value=value, base=base, slope=slope)
    programs = _watched.get()
    if programs is not None:
        programs.append((instance, value, solution))
    return solution


_watched: ContextVar[list[tuple[Instance, np.ndarray, LinearSolution]] | None] = ContextVar(
    "programs", default=None
)


@contextmanager
def watched() -> Iterator[list[tuple[Instance, np.ndarray, LinearSolution]]]:
    """A list that receives (instance, value, solution) of every program solved meanwhile."""
    programs: list[tuple[Instance, np.ndarray, LinearSolution]] = []
    token = _watched.set(programs)
    try:
        yield programs
    finally:
        _watched.reset(token)


def _solved(program: Program) -> Solved:
    """The solution by the table's method."""
    columns = program.columns
    pairs = int((columns.second >= 0).sum())
    method = choose(Task.PROGRAM, Size(rows=len(program), pairs=pairs, elastic=program.elastic))
    if method is PAIRS:
        return _by_pairs(program)
    if method is SIMPLEX:
        return by_simplex(program)
    rows = program.rows()
    priced = None if rows is None else boxstep.solve(rows)
    if priced is None:
        # Also where the demands cannot be met: HiGHS then reports it.
        solved = by_simplex(program)
        fell_back(PRICES, "no dense table" if rows is None else "the search did not close", SIMPLEX)
        return solved
    return Solved(
        x=priced.X[columns.first, columns.place],
        level=priced.level,
        time=priced.time,
        prices=priced.prices,
        solver=f"prices and {SOLVER}",
    )


def certified(
    instance: Instance, solved: Solved, *, value: np.ndarray, base: np.ndarray, slope: np.ndarray
) -> LinearSolution:
    """A feasible x and any multipliers, as a solution with the bound that the multipliers prove.

    For every feasible (x, t): value.x + gain t
        <= sum_c x_c (value_c + lambda r_c - mu_c - gpus_c p_c) + sum mu + p.capacity - lambda.base,
    if lambda.slope = gain.  Raising mu_m until no bracket is positive leaves the constant terms.
    """
    columns, x = instance.columns, solved.x
    level, time, prices = solved.level, solved.time, solved.prices
    gained = bool((slope > 0).any())
    if gained:
        if not dot(level, slope) > 0:
            level = _level_of_own_time(instance, base, slope)
            time = level * instance.top
        total = dot(level, slope)
        scale = 1.0 / total if total > 0 else 0.0
        level, time, prices = level * scale, time * scale, prices * scale
    first, second = columns.first, columns.second
    shared = second >= 0
    worth = value + level[first] * columns.rate_first - columns.cost(prices)
    if shared.any():
        worth[shared] += level[second[shared]] * columns.rate_second[shared] - time[second[shared]]
    else:
        # Without pairs the best mu for these lambda and p is known in closed form.
        time = np.zeros_like(time)
    missing = np.zeros_like(time)
    excess = worth - time[first] if shared.any() else worth
    np.maximum.at(missing, first, excess)
    available = float((time + missing).sum() + prices @ instance.capacity)
    bound = available - dot(level, base)
    t, rising = 0.0, slope > 0
    if gained:
        t = float(((instance.throughput(x) - base)[rising] / slope[rising]).min())
    return LinearSolution(
        x=x,
        t=t,
        bound=bound,
        level_duals=level,
        shadow_prices=prices,
        cut=available if gained else float("inf"),
        solver=solved.solver,
    )


def _level_of_own_time(instance: Instance, base: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """(n,) the multipliers where no GPUs are short: the time of one job limits t.

    A solver may count that limit as a bound on t instead of as this job's demand.
    """
    rising = np.flatnonzero(slope > 0)
    job = rising[((instance.top - base)[rising] / slope[rising]).argmin()]
    level = np.zeros(len(slope))
    level[job] = 1.0 / slope[job]
    return level


MOST_ENTRIES = 30_000_000
"""Entries of the table of jobs with configurations up to which classes are looked for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Merged:
    """An instance's jobs by class, and its columns by merged column.

    Attributes:
        of: (n,) class of each job.
        size: (classes,) number of members.
        chosen: (classes,) row of a member that stands for the class.
        columns: merged columns, over classes: speeds of one member, GPUs of all.
        column: (columns,) merged column of each original one.
    """

    of: np.ndarray
    size: np.ndarray
    chosen: np.ndarray
    columns: Columns
    column: np.ndarray

    def sum_of(self, value: np.ndarray) -> np.ndarray:
        """(merged,) worth of a class in original columns worth ``value`` each at full time."""
        one = np.zeros(len(self.columns))
        one[self.column] = value
        worth: np.ndarray = one * self.size[self.columns.first]
        return worth


def _merged(instance: Instance, *per_job: np.ndarray, value: np.ndarray) -> _Merged | None:
    """The classes of jobs that agree in speeds, gangs, the arrays ``per_job`` (n,) and worth.

    ``per_job``: further values that must be equal, e.g. demands; ``value``: (columns,) worth of full time.

    Returns:
        None where there are pairs, or merging does not pay.
    """
    columns, n = instance.columns, len(instance.gpus)
    elastic = bool(instance.elastic.any())
    if n < 2 or (columns.second >= 0).any() or (not elastic and mostly_distinct(instance.T)):
        return None
    first, place = columns.first, columns.place
    width = int(place.max(initial=0)) + 1
    if n * width * (2 + len(instance.capacity)) > MOST_ENTRIES and elastic:
        return None
    parts = [_table(first, place, columns.rate_first, (n, width)), *(a[:, None] for a in per_job)]
    if elastic:
        parts += [_table(first, place, gpus, (n, width)) for gpus in _gpus_by_type(columns)]
    else:
        parts.append(instance.gpus[:, None])
    if value.any():
        parts.append(_table(first, place, value, (n, width)))
    features = np.concatenate(parts, axis=1)
    if mostly_distinct(features):
        return None
    of, chosen = equal_rows(features)
    if len(chosen) > WORTH_IT * n:
        return None
    size = np.bincount(of, minlength=len(chosen)).astype(float)
    # One merged column for each (class, place); that of its first member stands for it.
    kept, first_at, column = np.unique(of[first] * width + place, return_index=True, return_inverse=True)
    one = dataclasses.replace(columns.take(first_at), first=kept // width)
    return _Merged(of=of, size=size, chosen=chosen, columns=one.scaled(size[one.first]), column=column)


def _table(row: np.ndarray, place: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """``values`` at (row, place), 0 elsewhere."""
    table = np.zeros(shape)
    table[row, place] = values
    return table


def _gpus_by_type(columns: Columns) -> Iterator[np.ndarray]:
    """(columns,) GPUs of one type after the other."""
    column, kind, gpus = columns.entries()
    for j in range(int(kind.max(initial=-1)) + 1):
        here = kind == j
        yield np.bincount(column[here], weights=gpus[here], minlength=len(columns))
