"""Hundreds of elastic jobs: the search for prices, against the same program given to HiGHS as it is."""

import numpy as np
import pytest
from ballast_policies.allocation.own_share import own_share
from ballast_policies.allocation.problem import Configuration, Job, Problem
from ballast_policies.allocation.registry import allocate, solve
from ballast_policies.allocation.solvers import methods
from scipy.optimize import linprog

from tests.policies.allocation.families import ELASTIC as FAMILIES
from tests.policies.allocation.problems import within_limits
from tests.support.examples import first_daily

JOBS = 130


def by_one_program(policy, build, monkeypatch):
    """The objective, with every program given to HiGHS."""
    with monkeypatch.context() as patch:
        patch.setattr(methods, "LARGE_ELASTIC", 10**9)
        return solve(policy, build()).objective


@pytest.mark.slow
@pytest.mark.parametrize("family", first_daily(FAMILIES.values(), 5), ids=lambda family: family.name)
@pytest.mark.parametrize("policy", ["max-min-fairness", "makespan", "max-throughput"])
def test_prices_find_the_optimum_of_the_plain_program(policy, family, monkeypatch):
    """On every family of the benchmark, with a proven gap."""
    build = family.drawn(JOBS, seed=1)
    instance = build()
    answer = solve(policy, instance)
    assert answer.gap <= 1e-6
    assert answer.objective == pytest.approx(by_one_program(policy, build, monkeypatch), rel=1e-6)
    within_limits(instance, answer.x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demand 2", "demand 0.25", "beside gangs"])
def test_idle_gpus_are_filled_as_by_the_plain_program(name, monkeypatch):
    """The sum of the levels after max-min fairness."""
    build = FAMILIES[name].drawn(JOBS, seed=2)
    instance = build()
    sums = []
    for limit in (methods.LARGE_ELASTIC, 10**9):
        monkeypatch.setattr(methods, "LARGE_ELASTIC", limit)
        sums.append(float(instance.level_scale @ instance.throughput(solve("max-min-fairness", instance).x)))
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["like jobs", "heavy tails", "200 configurations", "beside gangs"])
def test_own_shares_are_those_of_a_linear_program_each(name):
    """The simplex method on arrays against HiGHS, job by job."""
    instance = FAMILIES[name].drawn(40, seed=3)()
    columns = instance.columns.take(instance.elastic[instance.columns.first])
    jobs = np.random.default_rng(4).uniform(10.0, 90.0, 40)
    x = own_share(columns, instance.capacity, jobs)
    for m in np.unique(columns.first):
        mine = np.flatnonzero(columns.first == m)
        one = columns.take(mine)
        column, kind, gpus = one.entries()
        use = np.zeros((len(instance.capacity) + 1, len(mine)))
        use[kind, column] = gpus
        use[-1] = 1.0
        limits = np.append(instance.capacity / jobs[m], 1.0)
        best = -linprog(-one.rate_first, A_ub=use, b_ub=limits, bounds=(0, None), method="highs").fun
        assert one.rate_first @ x[mine] == pytest.approx(best, rel=1e-9)
        assert (use @ x[mine] <= limits * (1 + 1e-9)).all()


def test_a_program_that_ends_nowhere_goes_to_highs(monkeypatch):
    """Where the pivots do not end, one program each."""
    instance = FAMILIES["demand 2"].drawn(5, seed=4)()
    direct = own_share(instance.columns, instance.capacity, np.full(5, 5))
    monkeypatch.setattr("ballast_policies.allocation.own_share.MAX_PIVOTS", 1)
    by_highs = own_share(instance.columns, instance.capacity, np.full(5, 5))
    assert instance.throughput(by_highs) == pytest.approx(instance.throughput(direct), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "otherwise"), [("makespan", "simplex"), ("water-filling", "a program")])
def test_one_job_with_very_many_configurations_is_no_table_of_its_width(policy, otherwise, monkeypatch):
    """A dense table would have its width for all jobs: plain programs then, and the answer says so."""
    build = FAMILIES["demand 2"].drawn(JOBS, seed=5)
    expected = solve(policy, build())
    monkeypatch.setattr("ballast_policies.allocation.solvers.dense_program.MOST_ENTRIES", 1)
    found = solve(policy, build())
    assert found.objective == pytest.approx(expected.objective, rel=1e-6)
    assert expected.fallbacks == () and any(f"then {otherwise}" in line for line in found.fallbacks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "powers", [(1.0, 1.0), (0.8, 0.8), (0.5, 0.9)], ids=["in proportion", "less", "alike"]
)
def test_configurations_that_tie_leave_no_ties_or_ones_that_the_search_settles(powers, monkeypatch):
    """The same GPUs given twice, and speeds in proportion to size, are one configuration.

    With types that are alike for all jobs, every price of theirs is right at once, and every job has several
    best configurations.
    """
    random, types, jobs = np.random.default_rng(6), ("a", "b", "c"), []
    alike = powers[0] < powers[1]
    for m in range(JOBS):
        power, shapes = float(random.uniform(*powers)), []
        liking = dict(zip(types, random.uniform(1.0, 1.0 if alike else 5.0, 3).tolist(), strict=True))
        for place in range(20):
            chosen = random.permutation(3)[: random.integers(1, 3)]
            gpus = {types[j]: int(random.choice([1, 2, 4])) for j in chosen}
            speed = sum(liking[t] * n for t, n in gpus.items()) ** power
            shapes.append(Configuration(name=str(place), gpus=gpus, throughput=speed))
        jobs.append(Job(name=str(m), configurations=tuple(shapes), weight=float(random.integers(1, 4))))
    problem = Problem(gpu_types=types, capacity=dict.fromkeys(types, 80), jobs=tuple(jobs))
    answer = allocate("max-min-fairness", problem)
    assert answer.gap <= 1e-6
    assert answer.fallbacks == ()
    monkeypatch.setattr(methods, "LARGE_ELASTIC", 10**9)
    assert answer.objective == pytest.approx(allocate("max-min-fairness", problem).objective, rel=1e-6)
