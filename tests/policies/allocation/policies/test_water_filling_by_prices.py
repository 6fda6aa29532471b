"""Water filling in the prices of GPU types: the same levels as one linear program for each level."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation.fairness import water_levels, water_prices
from ballast_policies.allocation.fairness.teams import FillStage, flat, tree
from ballast_policies.allocation.fairness.water_levels import fill, fill_by_programs
from ballast_policies.allocation.instance import from_arrays
from ballast_policies.allocation.instance import instance as posed
from ballast_policies.allocation.problem import Entity
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import methods
from ballast_policies.allocation.solvers.least_utilization import least_utilization
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.allocation.configurations.instances import FAMILIES as SMALL
from tests.policies.allocation.configurations.instances import problem_of
from tests.policies.allocation.families import ELASTIC, FAMILIES
from tests.policies.allocation.problems import within_limits
from tests.support.examples import examples, first_daily, first_fast

ROOTS = {"water-filling": flat, "hierarchical": tree}


def drawn(seed):
    """Up to 30 jobs, 5 types, nested teams; speeds that are lognormal, small whole numbers or equal."""
    draw = np.random.default_rng(seed)
    n, k, teams = draw.integers(1, 30), draw.integers(1, 6), draw.integers(1, 4)
    T = np.exp(draw.standard_normal((n, k)))
    kind = draw.random()
    if kind < 0.2:
        T = draw.integers(0, 5, (n, k)).astype(float)
    elif kind < 0.3:
        T = np.repeat(T[:, :1], k, axis=1)
    T = T * (draw.random((n, k)) < draw.choice([0.3, 0.7, 1.0]))
    gpus = draw.choice([1.0, 2.0, 4.0], n)
    demand = draw.choice([0.3, 0.7, 1.0, 1.5, 3.0, 8.0])
    return dataclasses.replace(
        from_arrays(
            gpu_types=tuple(f"type-{j}" for j in range(k)),
            capacity=np.floor(draw.dirichlet(np.ones(k)) * gpus.sum() / demand),
            throughput=T,
            gpus=gpus,
        ),
        weights=draw.choice([1.0, 2.5, 5.0], n),
        elapsed=draw.uniform(0, 10, n),
        entity_of=[None if e < 0 else f"team-{e}" for e in draw.integers(-1, teams, n)],
        entities={
            f"team-{e}": Entity(
                weight=float(draw.integers(1, 4)),
                policy=str(draw.choice(["fairness", "fifo"])),
                parent=None if e == 0 or draw.random() < 0.6 else f"team-{draw.integers(0, e)}",
            )
            for e in range(teams)
        },
    )


def assert_levels_of_programs(instance, root):
    """Every limit holds; programs answer where equal speeds leave a choice."""
    expected = fill_by_programs(instance, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "STAGES", 0)
        found = fill(instance, root)
    x = found.answer.x
    within_limits(instance, x)
    levels = instance.level_scale * instance.throughput(x)
    close = {"rel": 1e-6, "abs": 1e-6 * max(1.0, levels.max(initial=0.0))}
    assert levels == pytest.approx(found.levels, **close)
    if (expected.answer.gap or 0.0) <= 1e-6:
        assert found.levels == pytest.approx(expected.levels, **close)
    else:  # hundreds of stages that each stop a little early; never better
        assert (found.levels >= expected.levels - 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ROOTS)
@examples(30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_levels_are_those_of_one_program_for_each_level(policy, seed):
    """Of gangs in nested teams."""
    instance = drawn(seed)
    assert_levels_of_programs(instance, ROOTS[policy](instance))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ROOTS)
@pytest.mark.parametrize("family", first_daily(SMALL, 4))
def test_levels_of_elastic_jobs_are_those_of_one_program_for_each_level(policy, family):
    """Small random problems, also beside gangs."""
    for seed in range(100, 110):
        real = posed(problem_of(family, seed))
        assert_levels_of_programs(real, ROOTS[policy](real))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ROOTS)
@pytest.mark.parametrize("name", first_daily(FAMILIES, 6))
def test_every_family_is_certified_within_its_limits(name, policy, monkeypatch):
    """3,000 jobs; a stage for each GPU type at most, and never a program of all jobs."""

    def by_programs(*_):
        raise AssertionError("one linear program for each level")

    monkeypatch.setattr(water_levels, "fill_by_programs", by_programs)
    instance = FAMILIES[name].instance(3000, seed=1)
    filled = fill(instance, ROOTS[policy](instance))
    assert filled.answer.gap <= 1e-6
    assert filled.stages <= len(instance.capacity) + 1
    within_limits(instance, filled.answer.x)


@pytest.mark.slow
def test_the_least_level_is_that_of_max_min_fairness():
    """Water filling begins where max-min fairness ends."""
    instance = FAMILIES["plain, demand 10"].instance(2000)
    filled, least = solve("water-filling", instance), solve("max-min-fairness", instance)
    assert filled.objective == pytest.approx(least.objective, rel=1e-7)
    assert filled.shadow_prices == pytest.approx(least.shadow_prices, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demand 2", "heavy tails"])
def test_a_stage_whose_first_guess_is_0_is_found_as_soon_as_any(name, monkeypatch):
    """The next trial after 0 is the bound, not a multiple of 0, which would be tried again and again."""
    instance = FAMILIES[name].instance(2000, seed=1)
    expected = fill(instance, flat(instance))
    adjusted, trials = water_prices.adjusted_prices, []

    def counted(*args, **named):
        trials.append(args)
        return least_utilization(*args, **named)

    monkeypatch.setattr(water_prices, "adjusted_prices", lambda *args: (0.0, adjusted(*args)[1]))
    monkeypatch.setattr(water_prices, "least_utilization", counted)
    found = fill(instance, flat(instance))
    assert found.levels == pytest.approx(expected.levels, rel=1e-6)
    assert len(trials) < water_prices.ROUGH_TRIALS * found.stages


def test_equal_speeds_that_leave_a_choice_are_left_to_linear_programs():
    """Two jobs share type 0 in any proportion, and type 1 is worth more to what comes next."""
    n = 100
    T = np.zeros((n, 3))
    T[:, 0], T[: n // 2, 1], T[n // 2 :, 2], T[:10, 2] = 2.0, 1.0, 1.0, 1.0
    instance = from_arrays(
        gpu_types=("a", "b", "c"), capacity=np.array([10, 40, 40]), throughput=T, gpus=np.ones(n)
    )
    root = flat(instance)
    assert fill(instance, root).levels == pytest.approx(fill_by_programs(instance, root).levels, rel=1e-6)


def test_levels_of_some_jobs_along_a_stage_are_those_of_all():
    """A team of teams, fifo inside fairness: each level is a function of one number."""
    instance = drawn(7)
    root = tree(instance)
    n = len(instance.gpus)
    filling = FillStage(root, np.zeros(n), np.linspace(0.1, 2.0, n))
    some = np.arange(0, n, 2)
    for s in np.linspace(0, filling.end, 7):
        assert filling.levels(s, some) == pytest.approx(filling.levels(s)[some])
    assert filling.levels(filling.end) == pytest.approx(np.linspace(0.1, 2.0, n))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", first_fast(["demand 5", "demand 0.25", "noisy", "beside gangs", "two types"], 2)
)
def test_hundreds_of_elastic_jobs_are_certified_without_a_program_of_all(name, monkeypatch):
    """Also where GPUs idle, which took one linear program a level."""

    def by_programs(*_):
        raise AssertionError("one linear program for each level")

    monkeypatch.setattr(water_levels, "fill_by_programs", by_programs)
    real = ELASTIC[name].drawn(200)()
    answer = solve("water-filling", real)
    assert answer.gap <= 1e-6
    least = solve("max-min-fairness", real).objective
    assert answer.objective == pytest.approx(least, rel=1e-6)
    within_limits(real, answer.x)
    # No job that is not at full speed has a configuration on GPUs that are idle.
    idle = real.capacity - real.gpus_used(answer.x) > 1e-6 * real.capacity
    slow = real.throughput(answer.x) < real.fastest * (1 - 1e-6)
    column, kind, _ = real.columns.entries()
    full = np.zeros(len(real.columns), dtype=bool)
    np.logical_or.at(full, column, ~idle[kind])
    waits = slow & (real.time_used(answer.x) < 1 - 1e-6)
    assert not (~full & waits[real.columns.first]).any()
