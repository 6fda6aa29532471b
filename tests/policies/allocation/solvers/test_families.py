"""Programs of many jobs are solved by prices: exact against the simplex method, on families of instances."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation.instance import from_arrays, instance
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import box_search, boxstep, linear, methods
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.policies.allocation.families import FAMILIES
from tests.policies.allocation.problems import problems, random_problem, within_limits
from tests.policies.allocation.textbook import Book
from tests.support.examples import examples, first_daily, first_fast

JOBS = 300


def cluster(seed, *, jobs=1100, types=6, contention=4.0, unusable=0.1, noise=0.3, ties=False):
    """Jobs of gangs and weights with speeds of their own, on GPU types of different sizes."""
    draw = np.random.default_rng(seed)
    size = 10 ** draw.uniform(-1, 2, jobs)
    speed = np.sort(draw.uniform(1, 8, types))
    T = (
        size[:, None]
        * speed ** draw.uniform(0.3, 1.2, (jobs, 1))
        * np.exp(noise * draw.normal(size=(jobs, types)))
    )
    if ties:
        T = np.ceil(T)
    T[draw.random((jobs, types)) < unusable] = 0.0
    gpus = draw.choice([1, 2, 4, 8], jobs, p=[0.7, 0.1, 0.15, 0.05])
    parts = draw.dirichlet(np.full(types, 5.0))
    return dataclasses.replace(
        from_arrays(
            gpu_types=tuple(f"type-{j}" for j in range(types)),
            capacity=np.maximum(8, np.floor(parts * gpus.sum() / contention)),
            throughput=T,
            gpus=gpus,
        ),
        weights=draw.choice([1.0, 5.0], jobs),
        steps_remaining=size * 10 ** draw.uniform(3, 5, jobs),
    )


SCENES = {
    "one type": {"types": 1},
    "many ties": {"ties": True},
    "speeds that hardly differ": {"noise": 0.001},
}
INSTANCES = [*SCENES, *FAMILIES]


def drawn(name, seed):
    """An instance of a scene, or of a family of the benchmark."""
    if name in SCENES:
        return cluster(seed, jobs=JOBS, **SCENES[name])
    return FAMILIES[name].instance(JOBS, seed=seed)


@pytest.fixture
def small_samples(monkeypatch):
    """Samples and LPs of the search so small that 300 jobs take all of its rounds."""
    monkeypatch.setattr(methods, "LARGE", 100)
    monkeypatch.setattr(boxstep, "FIRST_SAMPLE", 30)
    monkeypatch.setattr(boxstep, "LP_JOBS", 40)
    monkeypatch.setattr(boxstep, "COARSE_JOBS", 70)
    monkeypatch.setattr(box_search, "MOST_JOBS", 6000)


@pytest.fixture
def simplex(monkeypatch):
    """``simplex(method, ...)``: its answer with every program given to HiGHS's simplex method."""

    def answered(method, *arguments, **named):
        with monkeypatch.context() as patch:
            patch.setattr(methods, "LARGE", 10**9)
            return method(*arguments, **named)

    return answered


def slopes(problem):
    return np.divide(
        problem.weights,
        problem.level_scale,
        out=np.zeros(len(problem.gpus)),
        where=problem.runnable,
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["max-min-fairness", "makespan", "finish-time-fairness"])
@pytest.mark.parametrize("name", first_daily(INSTANCES, 11))
def test_every_family_has_the_optimum_of_the_simplex_method(name, policy, small_samples, simplex):
    """Objective, certified gap and limits."""
    problem = drawn(name, 3)
    found, whole = solve(policy, problem), simplex(solve, policy, problem)
    assert found.objective == pytest.approx(whole.objective, rel=1e-7)
    assert found.gap <= 1e-6
    within_limits(problem, found.x)


@pytest.mark.parametrize("name", first_fast(INSTANCES, 11))
def test_what_is_left_over_adds_as_much_as_by_the_simplex_method(name, small_samples, simplex):
    """The sum of levels beside demands of nine tenths of the least level; ties are broken to 3e-7."""
    problem = drawn(name, 4)
    columns, slope = problem.columns, slopes(problem)
    value = problem.level_scale[columns.first] * columns.rate_first
    base = 0.9 * slope * linear.maximise(problem, slope=slope).t
    found = linear.maximise(problem, value=value, base=base)
    whole = simplex(linear.maximise, problem, value=value, base=base)
    assert value @ found.x == pytest.approx(value @ whole.x, rel=1e-6)
    assert found.bound - value @ found.x <= 1e-6 * found.bound
    assert (problem.throughput(found.x) >= base * (1 - 1e-8)).all()
    within_limits(problem, found.x)


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
    problem = FAMILIES[name].instance(200, types=types, seed=seed)
    answer = solve(policy, problem)
    assert answer.gap <= 1e-6
    within_limits(problem, answer.x)


@pytest.mark.parametrize("name", ["demand 2", "demand 1", "heavy tails", "like speeds, own steps"])
def test_no_idle_gpu_could_serve_a_job_that_is_not_at_full_speed(name, small_samples):
    """Work conservation: what is left over is handed out."""
    problem = FAMILIES[name].instance(JOBS, seed=5)
    x = solve("makespan", problem).x
    idle = problem.capacity - problem.gpus_used(x) > 1e-6 * problem.capacity + 1e-6
    spare = problem.time_used(x) < 1 - 1e-6
    columns = problem.columns
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


@pytest.mark.parametrize("name", first_fast(["demand 10", "demand 0.5", "few usable types", "one huge gang"]))
@pytest.mark.parametrize(
    "policy", ["max-throughput", "max-throughput-per-dollar", "fifo", "shortest-job-first"]
)
def test_worth_is_proven_the_most_with_a_gap_of_nothing(policy, name):
    """The bound is computed from the instance by weak duality, so a gap of nothing is a proof."""
    assert solve(policy, FAMILIES[name].instance(1500, types=6)).gap <= 1e-9


def test_prices_of_types_without_gpus_still_prove_the_optimum():
    """A type that has lost all its GPUs while jobs are held for it."""
    p = random_problem(3, 1200, 4)
    some = instance(p)
    closed = dataclasses.replace(some, capacity=np.where(np.arange(4) == 2, 0.0, some.capacity))
    answer = solve("max-throughput", closed)
    assert answer.gap <= 1e-9
    assert closed.gpus_used(answer.x)[2] == 0


@pytest.mark.parametrize("contention", [1.6, 3.0])
def test_a_level_that_one_job_limits_is_shown_by_prices_of_equal_load(contention, simplex, monkeypatch):
    """With very many jobs a sample finds such prices."""
    problem = cluster(9, contention=contention)
    slope, balanced = slopes(problem), []
    slope[0] *= 30.0

    def watched(*of, found=boxstep.balanced_prices):
        balanced.append(found(*of))
        return balanced[-1]

    monkeypatch.setattr(boxstep, "COARSE_JOBS", 200)
    monkeypatch.setattr(boxstep, "balanced_prices", watched)
    found = linear.maximise(problem, slope=slope)
    assert found.t == pytest.approx(simplex(linear.maximise, problem, slope=slope).t, rel=1e-8)
    assert found.bound - found.t <= 1e-8 * found.bound
    assert any(each is not None for each in balanced)


@pytest.mark.slow
def test_demands_that_no_job_can_meet_are_refused():
    """As by the simplex method: an error, not a wrong answer."""
    problem = cluster(5)
    with pytest.raises(linear.InfeasibleError):
        linear.maximise(
            problem,
            value=np.ones(len(problem.columns)),
            base=2.0 * slopes(problem) * linear.maximise(problem, slope=slopes(problem)).t,
        )


TIES_BROKEN = box_search.LAST_TOLERANCE
"""The gap that the search allows itself where jobs tie."""


@pytest.mark.parametrize("part", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("contention", [0.8, 4.0])
def test_jobs_of_one_type_that_tie_have_the_optimum_and_each_its_demand(part, contention, simplex):
    """A GPU of its only type is worth the same to every such job, so hundreds of them tie."""
    problem = cluster(7, jobs=2500, unusable=0.85, contention=contention)
    columns = problem.columns
    value = columns.gpus * columns.rate_first / problem.fastest[columns.first]
    base = part * slopes(problem) * linear.maximise(problem, slope=slopes(problem)).t
    found = linear.maximise(problem, value=value, base=base)
    best = simplex(linear.maximise, problem, value=value, base=base)
    assert value @ found.x == pytest.approx(value @ best.x, rel=TIES_BROKEN)
    assert found.bound - value @ found.x <= TIES_BROKEN * found.bound
    assert (problem.throughput(found.x) >= base * (1 - 1e-8)).all()
    within_limits(problem, found.x)


FEW_PROGRAMS = 25
"""Small programs of the searches together, of 150 rounds each at most."""


@pytest.fixture
def programs(monkeypatch):
    """The number of small programs, where none reaches the smallest gap."""
    solved = []
    lp_of = box_search.lp_of

    def counted(*arguments):
        solved.append(1)
        return lp_of(*arguments)

    monkeypatch.setattr(box_search, "GAP_TOLERANCE", -1.0)
    monkeypatch.setattr(box_search, "lp_of", counted)
    return solved


@pytest.mark.slow
def test_a_gap_that_rounding_does_not_allow_ends_the_search_at_the_next_larger(programs, simplex):
    """Not all 150 rounds of the same program: a few, and the answer is proven to 3e-7."""
    problem = cluster(3, contention=20.0)
    found = linear.maximise(problem, slope=slopes(problem))
    assert len(programs) <= FEW_PROGRAMS
    assert found.bound - found.t <= box_search.LAST_TOLERANCE * found.bound
    assert found.t == pytest.approx(simplex(linear.maximise, problem, slope=slopes(problem)).t, rel=1e-6)


def filled_by_two_gangs(jobs, types=6, seed=0):
    """The first two need all of type 0 for 5,000 s each; the others a third of these 10,000 s elsewhere."""
    draw = np.random.default_rng(seed)
    T = np.exp(draw.standard_normal((jobs, types)))
    gpus = draw.choice([1.0, 2.0, 4.0, 8.0], jobs)
    T[:2, 1:], gpus[:2] = 0.0, gpus.sum()
    steps = T[:, 1:].max(axis=1) * draw.uniform(0.1, 0.33, jobs) * 1e4
    steps[:2] = T[:2, 0] * 0.5e4
    return dataclasses.replace(
        from_arrays(
            gpu_types=tuple(f"type-{j}" for j in range(types)),
            capacity=np.full(types, gpus[0]),
            throughput=T,
            gpus=gpus,
        ),
        steps_remaining=steps,
    )


@pytest.mark.parametrize("seed", range(3))
def test_jobs_that_tie_between_free_types_are_decided_at_once(seed, monkeypatch):
    """Small prices of the free types decide, and change the bound by less than the gap."""

    def broken(*_):
        raise AssertionError("ties broken at random")

    monkeypatch.setattr(box_search.BoxSearch, "_with_ties_broken", broken)
    problem = filled_by_two_gangs(3000, seed=seed)
    answer = solve("makespan", problem)
    assert answer.objective == pytest.approx(1e4)
    assert answer.gap <= 1e-8
    within_limits(problem, answer.x)
