"""The table of methods: one for every size, and answers that list which of them answered instead of which."""

import importlib.util

import pytest
from ballast_policies.allocation.fairness import water_levels
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import box_search
from ballast_policies.allocation.solvers.linear import SolverError
from ballast_policies.allocation.solvers.methods import METHODS, Size, Task, choose

from tests.policies.allocation.families import FAMILIES


def no_end(*_):
    raise SolverError("a stage found no end")


@pytest.mark.parametrize("task", Task)
@pytest.mark.parametrize("rows", [1, 10**9])
@pytest.mark.parametrize("pairs", [0, 1, 10**9])
def test_every_size_has_a_method(task, rows, pairs):
    """Also the smallest and the largest."""
    assert choose(task, Size(rows=rows, columns=10 * rows, pairs=pairs, places=rows)).task is task


def test_a_method_that_finds_nothing_names_one_of_the_same_task():
    """Names are those of one row each, and modules are there."""
    named = {method.name: method for method in METHODS}
    assert len(named) == len(METHODS)
    for method in METHODS:
        assert method.otherwise is None or named[method.otherwise].task is method.task
        assert importlib.util.find_spec(f"ballast_policies.allocation.{method.code}")


def test_the_answer_lists_that_another_method_answered_and_why(monkeypatch):
    """Linear programs decide where prices find no end, and the answer has the same objective."""
    instance = FAMILIES["demand 2"].instance(100, types=2)
    expected = solve("water-filling", instance)
    assert expected.fallbacks == ()
    with monkeypatch.context() as patch:
        patch.setattr(water_levels, "fill_by_prices", no_end)
        found = solve("water-filling", instance)
    assert found.objective == pytest.approx(expected.objective, rel=1e-7)
    assert found.fallbacks == (
        "a stage for each GPU type: a stage found no end; then a program for each level",
    )
    assert solve("water-filling", instance).fallbacks == ()


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["MAX_ROUNDS", "MOST_JOBS"])
def test_a_search_that_does_not_close_is_listed(limit, monkeypatch):
    """Its rounds, or jobs, are over before the first; one program of all jobs has the same optimum."""
    instance = FAMILIES["demand 2"].instance(1500)
    expected = solve("max-throughput", instance)
    monkeypatch.setattr(box_search, limit, 0)
    found = solve("max-throughput", instance)
    assert found.objective == pytest.approx(expected.objective, rel=1e-7)
    assert expected.fallbacks == ()
    assert found.fallbacks == ("prices: the search did not close; then simplex",)
