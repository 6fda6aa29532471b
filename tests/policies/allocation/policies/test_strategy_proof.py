"""The partial allocation mechanism beyond the number of jobs for which each program without one is solved."""

import numpy as np
import pytest
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.policies import strategy_proof
from ballast_policies.allocation.registry import allocate, solve
from ballast_policies.allocation.solvers import methods
from ballast_policies.allocation.solvers.nash import gap_per_weight, nash_shares, nash_shares_by_prices

from tests.policies.allocation.configurations.instances import problem_of
from tests.policies.allocation.families import FAMILIES
from tests.policies.allocation.problems import random_problem, within_limits


@pytest.mark.parametrize("contention", [0.5, 1.0, 3.0, 10.0])
def test_fair_shares_by_prices_are_those_of_the_cone_program(contention):
    """The proven gap is small, and so is the distance to Clarabel's geometric mean."""
    p = instance(random_problem(4, 150, 4, contention=contention))
    found, exact = nash_shares_by_prices(p), nash_shares(p)
    assert gap_per_weight(p, found) <= 5e-3
    runs = p.runnable
    lost = p.weights[runs] @ np.log(p.throughput(exact.x)[runs] / p.throughput(found.x)[runs])
    assert lost / p.weights[runs].sum() <= gap_per_weight(p, found) + 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("contention", [0.5, 3.0])
def test_no_job_keeps_more_than_with_every_program_solved(monkeypatch, contention):
    """What a job pays by prices is at least what it pays by the programs without it, and not far from it."""
    p = instance(random_problem(6, 40, 3, gangs=(1,), contention=contention))
    exact = p.throughput(solve("strategy-proof", p).x)
    monkeypatch.setattr(methods, "EXACT_PARTS", 0)
    bounded = p.throughput(solve("strategy-proof", p).x)
    runs = p.runnable
    ratio = bounded[runs] / exact[runs]
    assert (ratio <= 1 + 1e-2).all()
    assert ratio.min() >= np.exp(-1) and np.median(ratio) >= 0.8


@pytest.mark.slow
def test_thousands_of_jobs_are_answered_with_a_stated_gap():
    """Within the limits, and never less than 1/e of the fair share."""
    p = instance(random_problem(1, 2600, 5))
    fair, answer = nash_shares_by_prices(p), solve("strategy-proof", p)
    within_limits(p, answer.x)
    assert (p.throughput(answer.x) >= np.exp(-1) * p.throughput(fair.x) * (1 - 1e-9)).all()
    assert 0 < answer.gap <= 1 - np.exp(-1)


@pytest.mark.slow
def test_like_jobs_keep_what_the_programs_without_one_of_them_leave(monkeypatch):
    """A program for each kind of job, however many there are of it, is the same as one for each job."""
    like = FAMILIES["like jobs"].instance(60, types=3)
    by_kind = solve("strategy-proof", like)
    every = np.arange(60)
    monkeypatch.setattr(strategy_proof, "equal_rows", lambda features: (every, every))
    monkeypatch.setattr(methods, "EXACT_PARTS", 10**9)
    one_by_one = solve("strategy-proof", like)
    assert like.throughput(by_kind.x) == pytest.approx(like.throughput(one_by_one.x), rel=1e-5)


@pytest.mark.slow
def test_thousands_of_jobs_of_a_few_kinds_are_exact():
    """The gap is that of the fair shares, as with few jobs."""
    answer = solve("strategy-proof", FAMILIES["like jobs"].instance(5000))
    assert answer.gap <= 1e-6
    assert answer.solver == "Clarabel"


@pytest.mark.parametrize("seed", [5020, 5030, 6046])
def test_fair_shares_where_the_cone_program_gets_stuck(seed):
    """Steps that are long at first are shortened until Clarabel ends with an optimum."""
    answer = allocate("strategy-proof", problem_of("many configurations", seed))
    assert answer.status == "optimal"
    assert answer.gap is not None and answer.gap <= 1e-6
