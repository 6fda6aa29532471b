"""Programs that maximise worth reach the optimum on every family of instances."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import methods
from hypothesis import given

from tests.policies.allocation.problems import problems, random_problem
from tests.policies.allocation.textbook import Book
from tests.support.examples import examples, first_fast

WORTH = ("max-throughput", "max-throughput-per-dollar", "fifo", "shortest-job-first")
FAMILIES = {
    "ten times more jobs than GPUs": {"contention": 10.0},
    "twice as many": {"contention": 2.0},
    "as many": {"contention": 1.0},
    "twice as many GPUs as jobs": {"contention": 0.5},
    "few types that a job can use": {"zero": 0.7},
    "gangs of very different size": {"gangs": (1, 2, 64)},
}


@pytest.mark.slow
@examples(60, deadline=None)
@given(p=problems())
def test_small_programs_reach_the_optimum_of_scipy_by_prices(p):
    """Also with types without GPUs and jobs that run nowhere, which large programs rarely have."""
    book = Book(p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "LARGE", 1)
        answer = solve("max-throughput", instance(p))
    assert answer.objective == pytest.approx(book.best(book.rate), rel=1e-8)
    assert answer.gap <= 1e-9


@pytest.mark.parametrize("family", first_fast(FAMILIES, 2))
@pytest.mark.parametrize("policy", WORTH)
def test_large_instances_are_solved_with_a_closed_gap(policy, family):
    """The bound is computed from the instance by weak duality, so a gap of nothing is a proof."""
    answer = solve(policy, instance(random_problem(7, 1500, 6, **FAMILIES[family])))
    assert answer.gap <= 1e-9


def test_prices_of_types_without_gpus_still_prove_the_optimum():
    """A type that has lost all its GPUs while jobs are held for it."""
    p = random_problem(3, 1200, 4)
    some = instance(p)
    closed = dataclasses.replace(some, capacity=np.where(np.arange(4) == 2, 0.0, some.capacity))
    answer = solve("max-throughput", closed)
    assert answer.gap <= 1e-9
    assert closed.gpus_used(answer.x)[2] == 0
