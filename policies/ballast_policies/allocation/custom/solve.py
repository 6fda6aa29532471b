"""Solution of a user's policy: checks of its answer, and a bound on the optimum of linear programs.

The shares are checked against every limit and against the user's constraints, independently of the
solver.  Where the problem is a linear program, weak duality bounds the optimum: for multipliers y
of ``min c x, A x (<)= b, l <= x <= u`` (at least 0 where the row is an inequality)

    c x  >=  -b y + sum_i min over [l_i, u_i] of (c + A' y)_i x_i

for every feasible x, with any y.  A variable that the user adds without bounds
counts as bounded by :data:`FREE_RANGE` times its value.  Otherwise the answer is ``uncertified`` and
``solver`` contains the gap that the solver reports.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ballast_policies.allocation.answer import Answer, nothing, relative_gap
from ballast_policies.allocation.custom.cluster import ClusterView, Posed, pose
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies import max_min_fairness
from ballast_policies.allocation.problem import ProblemError

if TYPE_CHECKING:
    import cvxpy

UNCERTIFIED = "uncertified"
"""Status of an answer that its solver reports as optimal, without a proven bound."""

TOLERANCE = 1e-5
"""By how much, relative to its largest term, a constraint of the user's may be exceeded."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Claim:
    """A solver's result: its name with the gap that it reports, and our bound where there is one."""

    solver: str
    bound: float | None


def _solved(problem: "cvxpy.Problem", posed: Posed, instance: Instance) -> Answer:
    import cvxpy

    claim = _attempt(problem)
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
        solver=claim.solver,
        gap=None if claim.bound is None else relative_gap(value, claim.bound),
        bound=claim.bound,
        objective=value,
        status="optimal" if claim.bound is not None else UNCERTIFIED,
        shadow_prices=None if duals is None else sign * np.asarray(duals, dtype=float),
    )


def _attempt(problem: "cvxpy.Problem") -> _Claim:
    import cvxpy

    try:
        return _run(problem)
    except cvxpy.error.SolverError as error:
        raise ProblemError(f"no solver solves it: {_one_line(error)}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ProblemError(f"cvxpy cannot solve it: {_one_line(error)}") from error


def _run(problem: "cvxpy.Problem") -> _Claim:
    """Solve; linear programs and whole numbers by HiGHS, the rest by Clarabel."""
    import cvxpy

    if problem.is_mixed_integer():
        data, chain, inverse = problem.get_problem_data(cvxpy.HIGHS, solver_opts={})
        raw = chain.solve_via_data(problem, data, False, False, {})
        problem.unpack_results(raw, chain, inverse)
        return _Claim(f"HiGHS, its own gap {raw['info'].mip_gap:.1e}", None)
    if problem.is_lp():
        data, chain, inverse = problem.get_problem_data(cvxpy.HIGHS, solver_opts={})
        raw = chain.solve_via_data(problem, data, False, False, {})
        problem.unpack_results(raw, chain, inverse)
        bound = _bound(problem, data, raw) if problem.status == cvxpy.OPTIMAL else None
        return _Claim("HiGHS", bound)
    data, chain, inverse = problem.get_problem_data(cvxpy.CLARABEL, solver_opts={})
    raw = chain.solve_via_data(problem, data, False, False, {})
    problem.unpack_results(raw, chain, inverse)
    own = abs(raw.obj_val - raw.obj_val_dual) / max(1.0, abs(raw.obj_val_dual))
    return _Claim(f"Clarabel, its own gap {own:.1e}", None)


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
