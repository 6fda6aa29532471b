"""Policies that users write: an objective and constraints in cvxpy, over shares and throughputs.

A function is a row of the table of policies, registered or named as ``module:function``. The shares are
checked against every limit and against the user's constraints, independently of the solver. Where the problem
is a linear program, weak duality bounds the optimum: for multipliers y of ``min c x, A x (<)= b, l <= x <=
u`` (at least 0 where the row is an inequality)

    c x  >=  -b y + sum_i min over [l_i, u_i] of (c + A' y)_i x_i

for every feasible x, with any y.  A variable that the user adds without bounds
counts as bounded by :data:`FREE_RANGE` times its value.  Otherwise the answer is ``uncertified`` and
``solver`` contains the gap that the solver reports.
"""

import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies import max_min_fairness
from ballast_policies.allocation.policy import Answer, Policy, Reads, SpaceSharing, nothing, relative_gap
from ballast_policies.allocation.problem import ProblemError

if TYPE_CHECKING:
    import cvxpy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterView:
    """n jobs over k GPU types. Jobs that can run nowhere now are left out.

    Attributes:
        jobs: (n) names.
        gpu_types: (k) names.
        capacity: (k,) GPUs of each type.
        gpus: (n,) size of each gang.
        weights: (n,) weight of each job, above 0.
        teams: (n) the entity of each job, or None.
        speeds: (n, k) steps/s of the whole gang; 0 where it cannot run.
        equal: (n,) steps/s on the equal share, ``capacity / sum(capacity)`` of the time on each type.
        steps_remaining: (n,) steps left; where unknown, an hour's worth on the job's fastest type.
        elapsed: (n,) seconds since arrival.
        isolated_elapsed: (n,) seconds that the progress so far would have taken on the isolated share.
        deadlines: (n,) seconds until the job should be done; infinite where it has no deadline.
        budgets, budget: (n,) USD for the rest of each job, and for all together; infinite without a limit.
        prices: (k,) price of a GPU hour; of a type without one, the mean of the others, or 1.
        shares: expression of shape (n, k): fraction of its time that each job spends on each type.
        throughput: expression of shape (n,): steps/s of each job.
        level: expression of shape (n,): ``gpus x throughput / (weight x equal)``: the level.
    """

    jobs: tuple[str, ...]
    gpu_types: tuple[str, ...]
    capacity: np.ndarray
    gpus: np.ndarray
    weights: np.ndarray
    teams: tuple[str | None, ...]
    speeds: np.ndarray
    equal: np.ndarray
    steps_remaining: np.ndarray
    elapsed: np.ndarray
    isolated_elapsed: np.ndarray
    deadlines: np.ndarray
    budgets: np.ndarray
    budget: float
    prices: np.ndarray
    shares: "cvxpy.Expression"
    throughput: "cvxpy.Expression"
    level: "cvxpy.Expression"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posed:
    """A view, its variable, and the constraints that every allocation must satisfy.

    Attributes:
        view: the argument of the user's function.
        x: variable of shape (columns,), the instance's columns, between 0 and 1.
        time: (5.2) no job spends more than all of its time.
        capacity: (5.3) no type has more GPUs in use than there are.
    """

    view: ClusterView
    x: "cvxpy.Variable"
    time: "cvxpy.Constraint"
    capacity: "cvxpy.Constraint"


def pose(instance: Instance) -> Posed:
    """The instance, without pairs, in cvxpy."""
    import cvxpy
    import scipy.sparse

    columns, count, k = instance.columns, len(instance.columns), len(instance.gpu_types)
    rows = np.flatnonzero(instance.runnable)
    place = np.full(len(instance.gpus), -1)
    place[rows] = np.arange(len(rows))
    job, each = place[columns.first], np.arange(count)
    n = len(rows)

    def matrix(values: np.ndarray, index: np.ndarray, height: int) -> Any:
        return scipy.sparse.csr_array((values, (index, each)), shape=(height, count))

    x = cvxpy.Variable(count, bounds=[0, 1], name="shares")
    throughput = matrix(columns.rate_first, job, n) @ x
    ones = np.ones(count)
    deadlines = instance.deadlines[rows]
    view = ClusterView(
        jobs=tuple(instance.names[m] for m in rows.tolist()),
        gpu_types=instance.gpu_types,
        capacity=instance.capacity.copy(),
        gpus=instance.gpus[rows],
        weights=instance.weights[rows],
        teams=tuple(instance.entity_of[m] for m in rows.tolist()),
        speeds=instance.T[rows],
        equal=instance.equal[rows],
        steps_remaining=instance.steps()[rows],
        elapsed=np.asarray(instance.elapsed)[rows],
        isolated_elapsed=np.asarray(instance.isolated_elapsed)[rows],
        deadlines=np.where(np.isnan(deadlines), np.inf, deadlines),
        budgets=np.where(np.isnan(instance.budgets[rows]), np.inf, instance.budgets[rows]),
        budget=instance.budget,
        prices=instance.prices(),
        shares=cvxpy.reshape(matrix(ones, job * k + columns.kind, n * k) @ x, (n, k), order="C"),
        throughput=throughput,
        level=cvxpy.multiply(instance.level_scale[rows] / instance.weights[rows], throughput),
    )
    return Posed(
        view=view,
        x=x,
        time=matrix(ones, job, n) @ x <= 1,
        capacity=matrix(columns.gpus, columns.kind, k) @ x <= instance.capacity,
    )


UNCERTIFIED = "uncertified"
"""Status of an answer that its solver reports as optimal, without a proven bound."""

TOLERANCE = 1e-5
"""Excess of a user's constraint that is accepted, relative to its largest term."""

FREE_RANGE = 1e3

Function = Callable[[ClusterView], Any]
"""A user's function: the view -> an objective, or (objective, constraints), or shares of shape (n, k)."""


def solve(function: Function, instance: Instance) -> Answer:
    """The user's answer, checked.

    Raises:
        ProblemError: the function raises, its result is not a problem, or the problem has no solution.
    """
    if not len(instance.columns):
        return nothing(instance)
    posed = pose(instance)
    returned = call(function, posed.view)
    if isinstance(returned, np.ndarray):
        return _given_shares(returned, instance)
    answer = _solved(_problem(returned, posed), posed, instance)
    value = answer.objective
    assert value is not None

    def of(real: Instance) -> float:
        return value if real is instance else objective(function, real, answer.x)

    return dataclasses.replace(answer, value=of)


def objective(function: Function, instance: Instance, x: np.ndarray) -> float:
    """Value of the user's objective at shares ``x``; NaN where these break the user's constraints.

    Variables that the user adds take their best values.

    Raises:
        ProblemError: as :func:`solve`.
    """
    if not len(instance.columns):
        return 0.0
    posed = pose(instance)
    returned = call(function, posed.view)
    if isinstance(returned, np.ndarray):
        return max_min_fairness.objective(instance, x)
    problem = _problem(returned, posed)
    # Every share is fixed to within the tolerance of the solver.
    near = [posed.x >= x - TOLERANCE, posed.x <= x + TOLERANCE]
    fixed = type(problem)(problem.objective, [*problem.constraints[2:], *near])
    _attempt(fixed)
    return float(fixed.value) if posed.x.value is not None else math.nan


def call(function: Function, view: ClusterView) -> Any:
    """The result of the function.

    Raises:
        ProblemError: it raised; the text names the error and the line of its module.
    """
    try:
        return function(view)
    except (Exception, SystemExit) as error:  # any code may run here
        where = _line_of(error, function)
        raise ProblemError(f"it raised {type(error).__name__}: {_one_line(error)}{where}") from error


def _line_of(error: BaseException, function: Function) -> str:
    """The line of the function's file at which it raised, as text; empty if unknown."""
    path = getattr(getattr(function, "__code__", None), "co_filename", None)
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == path:
            line = frame.tb_lineno
        frame = frame.tb_next
    return "" if line is None else f" ({path}, line {line})"


def _problem(returned: Any, posed: Posed) -> "cvxpy.Problem":
    import cvxpy

    objective, constraints = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, [])
    )
    if isinstance(returned, cvxpy.Problem):
        objective, constraints = returned.objective, returned.constraints
    if not isinstance(objective, cvxpy.Maximize | cvxpy.Minimize):
        raise ProblemError(
            f"it returned {type(returned).__name__}. To fix: return cvxpy.Maximize(...) or "
            "cvxpy.Minimize(...), or (objective, constraints), or an array of shares"
        )
    try:
        problem = cvxpy.Problem(objective, [posed.time, posed.capacity, *constraints])
    except Exception as error:  # cvxpy has no common base of its errors
        raise ProblemError(f"its constraints are none of cvxpy's: {error}") from error
    if problem.parameters():
        raise ProblemError("it uses cvxpy.Parameter. To fix: use numbers, it is called for each round")
    if not problem.is_dcp():
        parts = [objective, *constraints]
        wrong = " ".join(next((str(part) for part in parts if not part.is_dcp()), str(objective)).split())
        raise ProblemError(
            f"it is not convex by cvxpy's rules (DCP): {wrong[:300]}. To fix: see https://www.cvxpy.org/tutorial/dcp"
        )
    return problem


def _solved(problem: "cvxpy.Problem", posed: Posed, instance: Instance) -> Answer:
    import cvxpy

    solver, bound = _attempt(problem)
    if problem.status in (cvxpy.INFEASIBLE, cvxpy.INFEASIBLE_INACCURATE):
        raise ProblemError("it is infeasible: no shares keep all of its constraints. To fix: loosen them")
    if problem.status in (cvxpy.UNBOUNDED, cvxpy.UNBOUNDED_INACCURATE):
        raise ProblemError("its objective is unbounded. To fix: bound the variables that it adds")
    if problem.status not in (cvxpy.OPTIMAL, cvxpy.OPTIMAL_INACCURATE) or posed.x.value is None:
        raise ProblemError(f"its solver ended with status {problem.status}")
    x = np.asarray(posed.x.value, dtype=float)
    if not np.isfinite(x).all():
        raise ProblemError("its shares are no numbers (NaN or infinite)")
    x = instance.feasible(x)
    posed.x.value = np.minimum(x, 1.0)
    value = float(problem.objective.value)
    if not math.isfinite(value):
        raise ProblemError(f"its objective is {value} at the best shares. To fix: keep it finite")
    _check_constraints(problem)
    sign = 1.0 if isinstance(problem.objective, cvxpy.Maximize) else -1.0
    duals = posed.capacity.dual_value
    return Answer(
        x=x,
        solver=solver,
        gap=relative_gap(value, bound),
        bound=bound,
        objective=value,
        status="optimal" if bound is not None else UNCERTIFIED,
        shadow_prices=None if duals is None else sign * np.asarray(duals, dtype=float),
    )


def _attempt(problem: "cvxpy.Problem") -> tuple[str, float | None]:
    """(the solver with the gap that it reports, our bound where there is one) of a problem, now solved."""
    import cvxpy

    try:
        return _run(problem)
    except cvxpy.error.SolverError as error:
        raise ProblemError(f"no solver solves it: {_one_line(error)}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ProblemError(f"cvxpy cannot solve it: {_one_line(error)}") from error


def _run(problem: "cvxpy.Problem") -> tuple[str, float | None]:
    """Solve; linear programs and whole numbers by HiGHS, the rest by Clarabel."""
    import cvxpy

    whole, linear = problem.is_mixed_integer(), problem.is_lp()
    solver = cvxpy.HIGHS if whole or linear else cvxpy.CLARABEL
    data, chain, inverse = problem.get_problem_data(solver, solver_opts={})
    raw = chain.solve_via_data(problem, data, False, False, {})
    problem.unpack_results(raw, chain, inverse)
    if whole:
        return f"HiGHS, its own gap {raw['info'].mip_gap:.1e}", None
    if linear:
        return "HiGHS", _bound(problem, data, raw) if problem.status == cvxpy.OPTIMAL else None
    own = abs(raw.obj_val - raw.obj_val_dual) / max(1.0, abs(raw.obj_val_dual))
    return f"Clarabel, its own gap {own:.1e}", None


def _bound(problem: "cvxpy.Problem", data: dict[str, Any], raw: dict[str, Any]) -> float | None:
    """Proven bound on the optimum of a linear program, from the rows' multipliers; None: it is infinite."""
    import cvxpy

    c, A, b = np.asarray(data["c"], dtype=float), data["A"], np.asarray(data["b"], dtype=float)
    at = np.array(raw["solution"].col_value)
    y = -np.array(raw["solution"].row_dual)
    equalities = data["dims"].zero
    y[equalities:] = np.maximum(y[equalities:], 0.0)
    lower, upper = _box(data.get("lower_bounds"), -np.inf, at), _box(data.get("upper_bounds"), np.inf, at)
    reduced = c + A.T @ y
    least = -float(b @ y) + float(np.minimum(reduced * lower, reduced * upper).sum())
    sign = -1.0 if isinstance(problem.objective, cvxpy.Maximize) else 1.0
    # The constant that cvxpy keeps outside the program: its value less that of the program at the same point.
    constant = sign * float(problem.value) - float(c @ at)
    bound = sign * (least + constant)
    return bound if math.isfinite(bound) else None


def _box(given: np.ndarray | None, missing: float, at: np.ndarray) -> np.ndarray:
    bounds = np.full(len(at), missing) if given is None else np.asarray(given, dtype=float)
    free = math.copysign(FREE_RANGE, missing) * np.maximum(1.0, np.abs(at))
    return np.where(np.isfinite(bounds), bounds, free)


def _check_constraints(problem: "cvxpy.Problem") -> None:
    """Check the user's constraints to the solver's tolerance; our own hold by construction."""
    for constraint in problem.constraints:
        excess = float(np.max(constraint.violation(), initial=0.0))
        size = max((float(np.max(np.abs(a.value), initial=0.0)) for a in constraint.args), default=0.0)
        if not excess <= TOLERANCE * max(1.0, size):
            raise ProblemError(
                f"its answer exceeds its own constraint {str(constraint)[:200]} by {excess:.3g}. "
                "To fix: bring its numbers closer together"
            )


def _given_shares(X: np.ndarray, instance: Instance) -> Answer:
    """Shares that the function has computed itself: checked for feasibility, with no bound."""
    rows = np.flatnonzero(instance.runnable)
    shape = (len(rows), len(instance.gpu_types))
    if X.shape != shape:
        raise ProblemError(f"its shares have shape {X.shape}, not (jobs, GPU types) = {shape}")
    if X.dtype.kind not in "biuf":
        raise ProblemError(f"its shares are of type {X.dtype}. To fix: return an array of floats")
    X = X.astype(float)
    if not np.isfinite(X).all():
        raise ProblemError("its shares are no numbers (NaN or infinite)")
    full = np.zeros_like(instance.T)
    full[rows] = X
    limits = (
        ("a share is below 0 by", float(-X.min())),
        ("a job spends more than all of its time, by", float(X.sum(axis=1).max()) - 1.0),
        ("a GPU type has too many GPUs in use, by", float((instance.gpus @ full - instance.capacity).max())),
        (
            "a job has a share of a GPU type on which it cannot run,",
            float(full[instance.T <= 0].max(initial=0.0)),
        ),
    )
    for what, excess in limits:
        if excess > TOLERANCE:
            raise ProblemError(f"its shares are infeasible: {what} {excess:.3g}")
    x = instance.feasible(full[instance.columns.first, instance.columns.kind])
    return Answer(
        x=x,
        solver="its own",
        status="heuristic",
        value=lambda real: max_min_fairness.objective(real, x),
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


CALLABLE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
"""``module:function``; it is imported on its first allocation."""

MAY_READ = (
    Reads.WEIGHTS,
    Reads.PRICES,
    Reads.STEPS,
    Reads.ARRIVAL_ORDER,
    Reads.ELAPSED,
    Reads.ISOLATED_ELAPSED,
    Reads.DEADLINES,
    Reads.BUDGETS,
)
"""Inputs that a function may read unless it declares its own."""


def own_policy(
    function: Function,
    *,
    name: str = "",
    summary: str = "",
    reads: Iterable[Reads] = MAY_READ,
    compares_speeds: bool = True,
) -> Policy:
    """The row of a function, for an entry point of the group ``ballast.policies``.

    Args:
        function: see :data:`~ballast_policies.allocation.custom.Function`.
        name: for messages; the function's own, if left out.
        summary: the problem that it solves, for the documentation.
        reads: inputs that it reads beyond throughputs and gangs. Where a job lacks one, a
            condition names the default in use; a change of one of them causes a new allocation.
        compares_speeds: it weighs steps per second of one job against those of another.
    """
    called = name or getattr(function, "__name__", "policy")
    return Policy(
        summary=summary or (function.__doc__ or "").strip().partition("\n")[0] or called,
        solve=functools.partial(_solve, called, function),
        objective=functools.partial(objective, function),
        reads=frozenset(reads),
        compares_speeds=compares_speeds,
        space_sharing=SpaceSharing.NEVER,
        proves_gap=False,
    )


def named_policy(name: str) -> Policy:
    """The row of ``module:function``; the module is imported on its first allocation.

    Raises:
        ProblemError: the name is no module and function.
    """
    if not re.fullmatch(CALLABLE, name):
        raise ProblemError(f"policy: {name!r} is not module:function. To fix: e.g. my_policies:longest_first")
    return Policy(
        summary=f"the function {name}",
        solve=functools.partial(_import_and_solve, name),
        objective=functools.partial(_import_and_evaluate, name),
        reads=frozenset(MAY_READ),
        compares_speeds=True,
        space_sharing=SpaceSharing.NEVER,
        proves_gap=False,
    )


def _solve(name: str, function: Function, instance: Instance) -> Answer:
    try:
        return solve(function, instance)
    except ModuleNotFoundError as error:
        raise ProblemError(
            f"policy {name}: it needs the Python package {error.name!r}. "
            "To fix: pip install 'ballast-operator[policies]'"
        ) from error
    except ProblemError as error:
        raise ProblemError(f"policy {name}: {error}") from error


def _import_and_solve(name: str, instance: Instance) -> Answer:
    found = _imported(name)
    return found.solve(instance) if isinstance(found, Policy) else _solve(name, found, instance)


def _import_and_evaluate(name: str, instance: Instance, x: np.ndarray) -> float:
    found = _imported(name)
    return found.objective(instance, x) if isinstance(found, Policy) else objective(found, instance, x)


def _imported(name: str) -> Policy | Function:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # any code may run here
        raise ProblemError(
            f"policy {name} cannot be imported: {type(error).__name__}: {error}. "
            "To fix: name a function of a module that this installation has"
        ) from error
    if isinstance(found, Policy):
        return found
    if not callable(found):
        raise ProblemError(f"policy {name} is of type {type(found).__name__}, not a function")
    function: Function = found
    return function
