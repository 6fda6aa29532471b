"""The families of instances that the benchmark measures, small: exact against the simplex method."""

import numpy as np
import pytest
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import box_search, boxstep, linear, methods
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.policies.allocation.families import FAMILIES
from tests.support.examples import examples, first_daily, first_fast

JOBS = 300


@pytest.fixture
def small_samples(monkeypatch):
    """Samples and LPs of the search so small that 300 jobs take all of its rounds."""
    monkeypatch.setattr(methods, "LARGE", 100)
    monkeypatch.setattr(boxstep, "FIRST_SAMPLE", 30)
    monkeypatch.setattr(boxstep, "LP_JOBS", 40)
    monkeypatch.setattr(boxstep, "COARSE_JOBS", 70)
    monkeypatch.setattr(box_search, "MOST_JOBS", 6000)


def by_simplex(policy, instance, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(methods, "LARGE", 10**9)
        return solve(policy, instance)


def within_limits(instance, x):
    assert (x >= 0).all()
    assert (instance.time_used(x) <= 1 + 1e-9).all()
    assert (instance.gpus_used(x) <= instance.capacity * (1 + 1e-9)).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["max-min-fairness", "makespan", "finish-time-fairness"])
@pytest.mark.parametrize("name", first_daily(FAMILIES, 8))
def test_every_family_has_the_optimum_of_the_simplex_method(name, policy, small_samples, monkeypatch):
    """Objective, certified gap and limits."""
    instance = FAMILIES[name].instance(JOBS, seed=3)
    found, whole = solve(policy, instance), by_simplex(policy, instance, monkeypatch)
    assert found.objective == pytest.approx(whole.objective, rel=1e-7)
    assert found.gap <= 1e-6
    within_limits(instance, found.x)


@pytest.mark.parametrize("name", first_fast(FAMILIES, 8))
def test_what_is_left_over_adds_as_much_as_by_the_simplex_method(name, small_samples, monkeypatch):
    """The sum of levels beside demands of nine tenths of the least level; ties are broken to 3e-7."""
    instance = FAMILIES[name].instance(JOBS, seed=4)
    scale, columns = instance.level_scale, instance.columns
    value = scale[columns.first] * columns.rate_first
    slope = np.divide(instance.weights, scale, out=np.zeros(JOBS), where=scale > 0)
    base = 0.9 * slope * linear.maximise(instance, slope=slope).t
    found = linear.maximise(instance, value=value, base=base)
    with monkeypatch.context() as patch:
        patch.setattr(methods, "LARGE", 10**9)
        whole = linear.maximise(instance, value=value, base=base)
    assert value @ found.x == pytest.approx(value @ whole.x, rel=1e-6)
    assert found.bound - value @ found.x <= 1e-6 * found.bound
    assert (instance.throughput(found.x) >= base * (1 - 1e-8)).all()
    within_limits(instance, found.x)


@pytest.mark.slow
@examples(25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=3, name="heavy tails, demand 10", types=3, policy="makespan")
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(list(FAMILIES)),
    types=st.integers(1, 6),
    policy=st.sampled_from(["max-min-fairness", "makespan"]),
)
def test_any_seed_of_any_family_is_certified(seed, name, types, policy, small_samples):
    """1 to 6 GPU types; the bound does not rest on any solver's word."""
    instance = FAMILIES[name].instance(200, types=types, seed=seed)
    answer = solve(policy, instance)
    assert answer.gap <= 1e-6
    within_limits(instance, answer.x)


@pytest.mark.parametrize("name", ["demand 2", "demand 1", "heavy tails", "like speeds, own steps"])
def test_no_idle_gpu_could_serve_a_job_that_is_not_at_full_speed(name, small_samples):
    """Work conservation: what is left over is handed out."""
    instance = FAMILIES[name].instance(JOBS, seed=5)
    x = solve("makespan", instance).x
    idle = instance.capacity - instance.gpus_used(x) > 1e-6 * instance.capacity + 1e-6
    spare = instance.time_used(x) < 1 - 1e-6
    columns = instance.columns
    assert not (idle[columns.kind] & spare[columns.first]).any()


@pytest.mark.parametrize("policy", ["max-min-fairness", "makespan"])
@pytest.mark.parametrize("name", ["demand 10", "demand 2", "like speeds, own steps", "few usable types"])
def test_small_lps_are_enough_for_thousands_of_jobs(name, policy):
    """The search proves its optimum and never falls back on one LP of all jobs."""
    answer = solve(policy, FAMILIES[name].instance(3000))
    assert answer.gap <= 1e-6
    assert answer.fallbacks == ()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["max-min-fairness", "finish-time-fairness"])
def test_prices_far_away_in_a_flat_direction_are_reached(policy, monkeypatch):
    """At demand 1 the bound hardly changes where prices move in proportion; no LP of all jobs is needed."""
    solved, lp_of = [], box_search.lp_of

    def counted(*args):
        solved.append(args)
        return lp_of(*args)

    monkeypatch.setattr(boxstep, "LP_JOBS", 80)
    monkeypatch.setattr(boxstep, "COARSE_JOBS", 800)
    monkeypatch.setattr(box_search, "lp_of", counted)
    answer = solve(policy, FAMILIES["demand 1"].instance(10_000))
    assert answer.gap <= 1e-6
    assert answer.fallbacks == ()
    assert 0 < len(solved) <= box_search.MAX_ROUNDS
