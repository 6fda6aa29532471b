"""A policy of one's own: what it may return, what is proven of its answer, and how it is refused."""

import math
import sys

import numpy as np
import pytest
from ballast_policies.allocation.custom import own_policy
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.problem import Job, Problem, ProblemError
from ballast_policies.allocation.registry import allocate, find_policy

from tests.policies.allocation.custom import problems
from tests.policies.allocation.custom.problems import PROBLEM

NAME = f"{problems.__name__}:"
CERTIFIED = ("least_level", "least_level_by_a_variable", "cheapest", "whole_problem")
UNCERTIFIED = ("nash", "whole_jobs")
REFUSED = {
    "raises": r"raised KeyError: 'nobody' \(.*problems\.py, line \d+\)",
    "quits": "raised SystemExit: 3",
    "nothing": "returned NoneType. To fix: return cvxpy.Maximize",
    "no_constraint": "constraints are none of cvxpy's",
    "no_scalar": "must resolve to a scalar",
    "nan_objective": "NaN",
    "infeasible": "no shares keep all of its constraints",
    "unbounded": "unbounded",
    "not_convex": "not convex by cvxpy's rules",
    "with_parameter": "uses cvxpy.Parameter",
    "wrong_shape": r"shape \(1, 1\), not \(jobs, GPU types\) = \(4, 2\)",
    "too_much_time": "a job spends more than all of its time, by 1",
    "too_many_gpus": "a GPU type has too many GPUs in use, by 3",
    "where_it_cannot_run": "a GPU type on which it cannot run",
    "below_zero": "a share is below 0",
    "nan_shares": "no numbers",
    "text_shares": "of type <U4. To fix: return an array of floats",
    "complex_shares": "of type complex128. To fix",
}


def assert_feasible(allocation, problem):
    """Within (5.1) to (5.3), with no tolerance."""
    for row in allocation.allocation.values():
        assert min(row.values()) >= 0
        assert sum(row.values()) <= 1 + 1e-12
    for gpu_type in problem.gpu_types:
        used = sum(job.gpus * allocation.allocation[job.name][gpu_type] for job in problem.jobs)
        assert used <= problem.capacity[gpu_type] * (1 + 1e-12)


@pytest.mark.parametrize("function", CERTIFIED)
def test_a_linear_program_is_certified(function):
    """Its gap is to a bound of ours, not the solver's."""
    found = allocate(NAME + function, PROBLEM)
    assert found.status == "optimal"
    assert found.gap <= 1e-6
    assert_feasible(found, PROBLEM)
    assert found.allocation["too-large"] == {"v100": 0.0, "p100": 0.0}


@pytest.mark.parametrize("function", UNCERTIFIED)
def test_other_programs_say_that_nothing_is_proven(function):
    """The solver's own gap stands beside the solver's name."""
    found = allocate(NAME + function, PROBLEM)
    assert found.status == "uncertified"
    assert found.gap is None
    assert "its own gap" in found.solver
    assert_feasible(found, PROBLEM)


def test_the_bound_holds_whatever_the_multipliers():
    """Wrong multipliers make it loose; they never make it cut off the optimum."""
    import cvxpy as cp
    from ballast_policies.allocation import custom

    posed = custom.pose(instance(PROBLEM))
    problem = cp.Problem(cp.Minimize(-cp.min(posed.view.level)), [posed.time, posed.capacity])
    data, chain, inverse = problem.get_problem_data(cp.HIGHS, solver_opts={})
    raw = chain.solve_via_data(problem, data, False, False, {})
    problem.unpack_results(raw, chain, inverse)
    random = np.random.default_rng(0)
    for noise in (0.0, 1e-3, 0.1, 10.0):
        solution = type("Solution", (), {})()
        solution.col_value = raw["solution"].col_value
        duals = np.array(raw["solution"].row_dual)
        solution.row_dual = duals + noise * random.normal(size=len(duals))
        bound = custom._bound(problem, data, {"solution": solution})
        assert bound <= problem.value + 1e-9
        assert noise > 0 or bound == pytest.approx(problem.value)


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_be_used_is_refused(function):
    """With the policy's name and the reason; no error of another kind leaves."""
    with pytest.raises(ProblemError, match=REFUSED[function]) as caught:
        allocate(NAME + function, PROBLEM)
    assert str(caught.value).startswith(f"policy {NAME}{function}: ")


@pytest.mark.parametrize(("function", "v100", "p100"), [("even_shares", 0.4, 0.6), ("whole_shares", 1, 0)])
def test_shares_of_its_own_are_checked_and_called_a_heuristic(function, v100, p100):
    found = allocate(f"{NAME}{function}", PROBLEM)
    assert (found.status, found.gap) == ("heuristic", None)
    assert found.allocation["e"] == pytest.approx({"v100": v100, "p100": p100})
    assert_feasible(found, PROBLEM)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(gpu_types=("a",), capacity={"a": 4}, jobs=()),
        Problem(gpu_types=("a",), capacity={"a": 0}, jobs=(Job(name="x", throughput={"a": 1.0}),)),
        Problem(gpu_types=(), capacity={}, jobs=(Job(name="x", throughput={}),)),
    ],
    ids=["no job", "no GPU", "no type"],
)
def test_where_nothing_can_run_the_function_is_not_called(problem):
    """An answer that gives no job anything."""
    found = allocate(f"{NAME}raises", problem)
    assert found.objective == 0.0
    assert all(not any(row.values()) for row in found.allocation.values())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module_here:fair", "ModuleNotFoundError"),
        (f"{NAME}not_there", "has no attribute"),
        (f"{NAME}PROBLEM", "is of type Problem, not a function"),
        ("two:many:colons", "is not module:function"),
        ("../etc:passwd", "is not module:function"),
        (":", "is not module:function"),
    ],
)
def test_a_name_that_leads_to_no_function_is_refused(name, reason):
    with pytest.raises(ProblemError, match=reason):
        allocate(name, PROBLEM)


def test_looking_up_a_function_imports_nothing():
    """The operator's own process never runs a user's code."""
    sys.modules.pop("this", None)
    policy = find_policy("this:zen")
    assert "this" not in sys.modules
    assert policy.compares_speeds
    assert Reads.DEADLINES in policy.reads


def test_a_row_says_what_its_function_reads():
    """Its docstring's first line is its summary, else its name."""
    assert own_policy(problems.blank_docstring).summary == "blank_docstring"
    policy = own_policy(problems.cheapest, reads={Reads.PRICES}, compares_speeds=False)
    assert (policy.summary, policy.reads) == (
        "Least cost at half of a level for every job.",
        frozenset({Reads.PRICES}),
    )
    posed = instance(PROBLEM)
    answer = policy.solve(posed)
    assert policy.objective(posed, answer.x) == pytest.approx(answer.objective, rel=1e-3)


def test_the_objective_of_the_blind_baseline_is_the_real_one():
    """NaN where its shares break the constraints at the real speeds."""
    blind = allocate(f"{NAME}least_level", PROBLEM, agnostic=True)
    assert blind.objective == pytest.approx(
        min(level for name, level in blind.levels.items() if name != "too-large"), rel=1e-3
    )
    assert math.isnan(allocate(f"{NAME}cheapest", PROBLEM, agnostic=True).objective)
