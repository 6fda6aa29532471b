"""The solver's process: an answer in time, or the greedy fallback, whatever happens to it; own policies."""

import dataclasses
import json
import os
import signal
import sys
import time

import pytest
from ballast_operator.allocator.solver import Solver
from ballast_operator.api.conditions import PolicyReason
from ballast_operator.settings import SolverSettings
from ballast_operator.views.spec import read_spec_text
from ballast_policies.allocation.problem import Job, Problem

from tests.operator.loops.simulated.simulation import job
from tests.support.examples import first_daily
from tests.support.waiting import WAIT_SECONDS

PROBLEM = Problem(
    gpu_types=("a", "b"),
    capacity={"a": 1, "b": 1},
    jobs=(Job(name="one", throughput={"a": 4.0, "b": 1.0}), Job(name="two", throughput={"a": 1.0, "b": 1.0})),
)
PATIENT = SolverSettings(limit_seconds=WAIT_SECONDS, start_seconds=WAIT_SECONDS)
"""A machine with other work is no reason for the fallback."""

READY = """import sys, time, pickle, struct
body = pickle.dumps("ready")
sys.stdout.buffer.write(struct.pack(">Q", len(body)) + body)
sys.stdout.buffer.flush()
"""


@pytest.mark.processes
async def test_the_process_solves_and_is_used_again():
    """The same process answers twice; the allocation is the policy's."""
    async with Solver(PATIENT) as solver:
        first = await solver.solve("max-min-fairness", PROBLEM)
        process = solver._process.pid
        second = await solver.solve("max-min-fairness", PROBLEM)
        assert solver._process.pid == process
    assert first.outcome is PolicyReason.OPTIMAL
    assert first.allocation.allocation["one"]["a"] == pytest.approx(1.0)
    assert second.allocation.allocation == first.allocation.allocation


@pytest.mark.processes
async def test_a_process_that_was_warmed_up_answers_the_first_question():
    """No second one is started; one that cannot start is told of by the first question."""
    async with Solver(PATIENT) as solver:
        await solver.warm_up()
        process = solver._process.pid
        assert (await solver.solve("max-min-fairness", PROBLEM)).outcome is PolicyReason.OPTIMAL
        assert solver._process.pid == process
    async with Solver(PATIENT, command=(sys.executable, "-c", "raise SystemExit(4)")) as solver:
        await solver.warm_up()
        assert (await solver.solve("max-min-fairness", PROBLEM)).health is PolicyReason.SOLVER_DIED


@pytest.mark.processes
async def test_a_solver_that_never_becomes_ready_is_replaced_by_the_fallback():
    """A process that hangs over its imports has its own limit."""
    command = (sys.executable, "-c", "import time; time.sleep(3600)")
    async with Solver(dataclasses.replace(PATIENT, start_seconds=0.2), command=command) as solver:
        late = await solver.solve("max-min-fairness", PROBLEM)
        assert solver._process is None
    assert late.health is PolicyReason.SOLVER_TIMED_OUT


@pytest.mark.processes
async def test_a_process_that_was_killed_between_two_questions_is_not_waited_for():
    """The fallback answers at once; the next process is asked once it has started."""
    async with Solver(PATIENT) as solver:
        await solver.solve("max-min-fairness", PROBLEM)
        solver._process.kill()
        await solver._process.wait()
        meanwhile = await solver.solve("max-min-fairness", PROBLEM)
        await solver.warm_up()
        good = await solver.solve("max-min-fairness", PROBLEM)
    assert (meanwhile.health, meanwhile.allocation.status) == (PolicyReason.SOLVER_DIED, "greedy")
    assert good.outcome is PolicyReason.OPTIMAL


FIRST_ONLY = """import pathlib, runpy
met = pathlib.Path({met!r})
if met.exists():
    runpy.run_module("ballast_operator.allocator.solver_process", run_name="__main__")
    raise SystemExit
met.touch()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "limit", "health", "words"),
    [
        ("time.sleep(3600)", 0.5, PolicyReason.SOLVER_TIMED_OUT, "limit 0.5 s"),
        ("import os; os._exit(3)", WAIT_SECONDS, PolicyReason.SOLVER_DIED, "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", WAIT_SECONDS, PolicyReason.SOLVER_DIED, "exit code -9"),
    ],
    ids=["hang", "os._exit", "SIGKILL"],
)
async def test_after_a_hang_or_a_death_a_fresh_process_answers(tmp_path, end, limit, health, words):
    """One bad process costs one answer, and those until another has started: no question waits for that.

    An out-of-memory kill of the solver costs optimality, not the round.
    """
    met = str(tmp_path / "met")
    script = FIRST_ONLY.format(met=met) + READY + "sys.stdin.buffer.read(8); " + end
    async with Solver(PATIENT, command=(sys.executable, "-c", script)) as solver:
        bad = await solver.solve("max-min-fairness", PROBLEM, limit_seconds=limit)
        meanwhile = await solver.solve("max-min-fairness", PROBLEM)
        await solver.warm_up()
        good = await solver.solve("max-min-fairness", PROBLEM)
    late = health is PolicyReason.SOLVER_TIMED_OUT
    of_late, of_dead = PolicyReason.FALLBACK_AFTER_TIMEOUT, PolicyReason.FALLBACK_AFTER_SOLVER_ERROR
    assert (bad.health, bad.allocation.status) == (health, "greedy")
    assert bad.outcome is (of_late if late else of_dead) and words in bad.message
    assert (meanwhile.health, meanwhile.allocation.status) == (health, "greedy")
    assert "is being started again" in meanwhile.message and words in meanwhile.message
    assert (good.health, good.outcome) == (PolicyReason.SOLVER_ANSWERS, PolicyReason.OPTIMAL)


@pytest.mark.processes
async def test_a_solver_that_is_stopped_in_its_tracks_counts_as_hung():
    """SIGSTOP: the process lives and says nothing."""
    async with Solver(PATIENT) as solver:
        await solver.solve("max-min-fairness", PROBLEM)
        solver._process.send_signal(signal.SIGSTOP)
        late = await solver.solve("max-min-fairness", PROBLEM, limit_seconds=0.2)
        await solver.warm_up()
        good = await solver.solve("max-min-fairness", PROBLEM)
    assert late.health is PolicyReason.SOLVER_TIMED_OUT
    assert good.health is PolicyReason.SOLVER_ANSWERS


@pytest.mark.processes
async def test_an_unknown_policy_is_a_solver_error_with_its_name():
    """The process lives on; the message says what it refused."""
    async with Solver(PATIENT) as solver:
        refused = await solver.solve("max-max-unfairness", PROBLEM)
        good = await solver.solve("max-min-fairness", PROBLEM)
    assert refused.outcome is PolicyReason.FALLBACK_AFTER_SOLVER_ERROR
    assert refused.health is PolicyReason.SOLVER_ANSWERS
    assert "max-max-unfairness" in refused.message
    assert good.outcome is PolicyReason.OPTIMAL


@pytest.mark.processes
async def test_a_function_is_called_there_and_a_late_or_dead_process_is_replaced():
    """A spec with a planner, nested deeper than a parser can follow, an end of the process, and the limit."""
    given = {**job("one")["spec"], "planner": {"profiles": "\U0010ffff"}}
    async with Solver(PATIENT) as solver:
        assert await solver.answer(read_spec_text, ("one", json.dumps(given))) == read_spec_text(
            ("one", json.dumps(given))
        )
        with pytest.raises(ValueError, match="RecursionError"):
            await solver.answer(read_spec_text, ("one", "[" * 100_000))
        with pytest.raises(ConnectionError, match="exit code 7"):
            await solver.answer(os._exit, 7)
        assert (await solver.answer(len, "four"), await solver.answer(len, "")) == (4, 0)
    async with Solver(SolverSettings(limit_seconds=0.01, start_seconds=WAIT_SECONDS)) as solver:
        with pytest.raises(TimeoutError):
            await solver.answer(time.sleep, WAIT_SECONDS)
        assert solver._process is None


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        (("/nowhere/python",), WAIT_SECONDS),
        ((sys.executable, "-c", ""), WAIT_SECONDS),
        ((sys.executable, "-c", "input()"), 0.2),
    ],
    ids=["missing", "ends", "silent"],
)
async def test_a_process_that_does_not_start_is_not_taken_for_a_question_that_takes_too_long(command, limit):
    settings = SolverSettings(limit_seconds=WAIT_SECONDS, start_seconds=limit)
    async with Solver(settings, command=command) as solver:
        with pytest.raises(OSError, match="no process starts") as raised:
            await solver.answer(len, "four")
    assert not isinstance(raised.value, (TimeoutError, ConnectionError))


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
def solver_of_mine(tmp_path, monkeypatch):
    """A solver whose process finds the module ``mine``."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "hangs.py").write_text("while True: pass\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return Solver(PATIENT)


@pytest.mark.processes
async def test_an_own_policy_is_solved_in_the_process(solver_of_mine):
    """What it prints does not come between the answers; the next question finds the same process.

    An error is told and the greedy allocation is used: the process lives on, whatever the function does.
    """
    errors = {
        "raises": "policy mine:raises: it raised RuntimeError: not today",
        "infeasible": "no shares keep all of its constraints",
        "missing": "cannot be imported: AttributeError",
    }
    async with solver_of_mine as solver:
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


@pytest.mark.processes
@pytest.mark.parametrize(("ends", "hangs"), first_daily([("dies", "mine:loops"), ("odd", "hangs:fair")]))
async def test_one_that_ends_the_process_or_never_returns_costs_one_answer(solver_of_mine, ends, hangs):
    """At its limit where the function or its module's import hangs; the next question has another process."""
    async with solver_of_mine as solver:
        died = await solver.solve(f"mine:{ends}", PROBLEM)
        await solver.warm_up()
        late = await solver.solve(hangs, PROBLEM, limit_seconds=0.5)
        await solver.warm_up()
        again = await solver.solve("max-min-fairness", PROBLEM)
    assert died.outcome is PolicyReason.FALLBACK_AFTER_SOLVER_ERROR
    assert late.outcome is PolicyReason.FALLBACK_AFTER_TIMEOUT
    assert died.allocation.status == late.allocation.status == "greedy"
    assert again.outcome is PolicyReason.OPTIMAL
