"""Policies of a user's own in the solver's process: an answer, or the reason and the greedy fallback."""

import os

import pytest
from ballast_operator.allocator.solver import Solver
from ballast_operator.api.conditions import PolicyReason
from ballast_operator.settings import SolverSettings
from ballast_policies.allocation.problem import Job, Problem

from tests.support.examples import first_daily
from tests.support.waiting import WAIT_SECONDS

pytestmark = pytest.mark.processes

PROBLEM = Problem(
    gpu_types=("a", "b"),
    capacity={"a": 1, "b": 1},
    jobs=(Job(name="one", throughput={"a": 4.0, "b": 1.0}), Job(name="two", throughput={"a": 1.0, "b": 1.0})),
)
MODULE = """
import os, sys, time
import cvxpy as cp

def fair(cluster):
    print("a line on standard output")
    sys.stdout.flush()
    os.write(1, b"and one past Python")
    return cp.Maximize(cp.min(cluster.level))

def raises(cluster):
    raise RuntimeError("not today")

def loops(cluster):
    while True:
        pass

def dies(cluster):
    os._exit(7)

class Odd(BaseException):
    pass

def odd(cluster):
    raise Odd("an error of no usual kind")

def infeasible(cluster):
    return cp.Maximize(cp.min(cluster.level)), [cluster.level >= 1e9]
"""


@pytest.fixture
def solver(tmp_path, monkeypatch):
    """A solver whose process finds the module ``mine``."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "hangs.py").write_text("while True: pass\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    # The import of cvxpy alone may take a busy machine longer than an operator would wait.
    return Solver(SolverSettings(limit_seconds=WAIT_SECONDS, start_seconds=WAIT_SECONDS))


async def test_an_own_policy_is_solved_in_the_process(solver):
    """What it prints does not come between the answers; the next question finds the same process.

    An error is told and the greedy allocation is used: the process lives on, whatever the function does.
    """
    errors = {
        "raises": "policy mine:raises: it raised RuntimeError: not today",
        "infeasible": "no shares keep all of its constraints",
        "missing": "cannot be imported: AttributeError",
    }
    async with solver:
        found = await solver.solve("mine:fair", PROBLEM)
        assert found.outcome is PolicyReason.OPTIMAL
        assert found.allocation.gap <= 1e-6
        process = solver._process.pid
        for function, said in errors.items():
            failed = await solver.solve(f"mine:{function}", PROBLEM)
            assert failed.outcome is PolicyReason.FALLBACK_AFTER_SOLVER_ERROR
            assert failed.health is PolicyReason.SOLVER_ANSWERS
            assert said in failed.message
            assert failed.allocation.status == "greedy"
        ours = await solver.solve("max-min-fairness", PROBLEM, options={"agnostic": False})
        assert ours.outcome is PolicyReason.OPTIMAL
        assert found.allocation.objective == pytest.approx(ours.allocation.objective)
        assert solver._process.pid == process


@pytest.mark.parametrize(("ends", "hangs"), first_daily([("dies", "mine:loops"), ("odd", "hangs:fair")]))
async def test_one_that_ends_the_process_or_never_returns_costs_one_answer(solver, ends, hangs):
    """At its limit where the function or its module's import hangs; the next question has another process."""
    async with solver:
        died = await solver.solve(f"mine:{ends}", PROBLEM)
        await solver.warm_up()
        late = await solver.solve(hangs, PROBLEM, limit_seconds=0.5)
        await solver.warm_up()
        again = await solver.solve("max-min-fairness", PROBLEM)
    assert died.outcome is PolicyReason.FALLBACK_AFTER_SOLVER_ERROR
    assert late.outcome is PolicyReason.FALLBACK_AFTER_TIMEOUT
    assert died.allocation.status == late.allocation.status == "greedy"
    assert again.outcome is PolicyReason.OPTIMAL
