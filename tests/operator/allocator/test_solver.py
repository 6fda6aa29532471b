"""The solver's process: an answer in time, or the greedy fallback, whatever happens to it."""

import sys

import pytest
from ballast_operator.allocator.solver import Solver
from ballast_operator.api.conditions import PolicyReason
from ballast_operator.settings import SolverSettings
from ballast_policies.allocation.problem import Job, Problem

PROBLEM = Problem(
    gpu_types=("a", "b"),
    capacity={"a": 1, "b": 1},
    jobs=(Job(name="one", throughput={"a": 4.0, "b": 1.0}), Job(name="two", throughput={"a": 1.0, "b": 1.0})),
)
READY = """import sys, time, pickle, struct
body = pickle.dumps("ready")
sys.stdout.buffer.write(struct.pack(">Q", len(body)) + body)
sys.stdout.buffer.flush()
"""


async def test_the_process_solves_and_is_used_again():
    """The same process answers twice; the allocation is the policy's."""
    async with Solver(SolverSettings()) as solver:
        first = await solver.solve("max-min-fairness", PROBLEM)
        process = solver._process.pid
        second = await solver.solve("max-min-fairness", PROBLEM)
        assert solver._process.pid == process
    assert first.outcome is PolicyReason.OPTIMAL
    assert first.allocation.allocation["one"]["a"] == pytest.approx(1.0)
    assert second.allocation.allocation == first.allocation.allocation


async def test_a_solver_that_is_late_is_killed_and_the_greedy_allocation_is_used():
    """The condition's reason says which; the next solve starts a fresh process."""
    command = (sys.executable, "-c", READY + "time.sleep(3600)")
    async with Solver(SolverSettings(), command=command) as solver:
        late = await solver.solve("max-min-fairness", PROBLEM, limit_seconds=0.2)
        assert solver._process is None
    assert late.outcome is PolicyReason.FALLBACK_AFTER_TIMEOUT
    assert late.allocation.status == "greedy"
    assert "limit 0.2 s" in late.message


async def test_a_solver_whose_process_dies_is_replaced_by_the_fallback():
    """An out-of-memory kill of the solver costs optimality, not the round."""
    command = (sys.executable, "-c", READY + "sys.exit(3)")
    async with Solver(SolverSettings(), command=command) as solver:
        died = await solver.solve("max-min-fairness", PROBLEM)
    assert died.outcome is PolicyReason.FALLBACK_AFTER_SOLVER_ERROR
    assert "exit code 3" in died.message


async def test_an_unknown_policy_is_a_solver_error_with_its_name():
    """The process lives on; the message says what it refused."""
    async with Solver(SolverSettings()) as solver:
        refused = await solver.solve("max-max-unfairness", PROBLEM)
        good = await solver.solve("max-min-fairness", PROBLEM)
    assert refused.outcome is PolicyReason.FALLBACK_AFTER_SOLVER_ERROR
    assert "max-max-unfairness" in refused.message
    assert good.outcome is PolicyReason.OPTIMAL
