"""Programs of many jobs are solved by prices; they must agree with the simplex method on the whole."""

import numpy as np
import pytest
from ballast_policies.allocation.instance import from_arrays
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import box_search, boxstep, linear, methods


def cluster(seed, *, jobs=1100, types=6, contention=4.0, unusable=0.1, noise=0.3, ties=False):
    """Jobs of gangs and weights with speeds of their own, on GPU types of unlike sizes."""
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
    return from_arrays(
        gpu_types=tuple(f"type-{j}" for j in range(types)),
        capacity=np.maximum(8, np.floor(parts * gpus.sum() / contention)),
        throughput=T,
        gpus=gpus,
        weights=draw.choice([1.0, 5.0], jobs),
        steps_remaining=size * 10 ** draw.uniform(3, 5, jobs),
    )


def simplex(monkeypatch, problem, **demands):
    """The whole program by HiGHS's simplex method."""
    with monkeypatch.context() as patch:
        patch.setattr(methods, "LARGE", 10**9)
        return linear.maximise(problem, **demands)


def slopes(problem):
    return np.divide(
        problem.weights,
        problem.level_scale,
        out=np.zeros(len(problem.gpus)),
        where=problem.runnable,
    )


SCENES = {
    "one type": {"types": 1},
    "many ties": {"ties": True},
    "speeds that hardly differ": {"noise": 0.001},
}
"""Beside the families of ``test_families``."""


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_raised_demands_are_those_of_the_simplex_method(scene, monkeypatch):
    """The level, and a bound of weak duality that proves it, to 1e-9."""
    problem = cluster(3, **SCENES[scene])
    found = linear.maximise(problem, slope=slopes(problem))
    assert found.t == pytest.approx(simplex(monkeypatch, problem, slope=slopes(problem)).t, rel=1e-8)
    assert found.bound - found.t <= 1e-8 * found.bound
    assert (problem.gpus_used(found.x) <= problem.capacity * (1 + 1e-12)).all()
    assert (problem.time_used(found.x) <= 1 + 1e-12).all()
    assert (found.x >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_worth_beside_demands_is_that_of_the_simplex_method(scene, monkeypatch):
    """What leftovers are handed out by: the most worth while every job keeps nine tenths of its level."""
    problem = cluster(4, **SCENES[scene])
    draw, columns = np.random.default_rng(0), problem.columns
    value = columns.gpus * columns.rate_first / problem.fastest[columns.first]
    value *= draw.uniform(0.5, 1.0, len(value))
    base = 0.9 * slopes(problem) * linear.maximise(problem, slope=slopes(problem)).t
    found = linear.maximise(problem, value=value, base=base)
    assert value @ found.x == pytest.approx(
        value @ simplex(monkeypatch, problem, value=value, base=base).x, rel=1e-8
    )
    assert found.bound - value @ found.x <= 1e-8 * found.bound
    assert (problem.throughput(found.x) >= base * (1 - 1e-8)).all()


@pytest.mark.parametrize("contention", [1.6, 3.0])
def test_a_level_that_one_job_limits_is_shown_by_prices_of_equal_load(contention, monkeypatch):
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
    assert found.t == pytest.approx(simplex(monkeypatch, problem, slope=slope).t, rel=1e-8)
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
def test_jobs_of_one_type_that_tie_have_the_optimum_and_each_its_demand(part, contention, monkeypatch):
    """A GPU of its only type is worth the same to every such job, so hundreds of them tie."""
    problem = cluster(7, jobs=2500, unusable=0.85, contention=contention)
    columns = problem.columns
    value = columns.gpus * columns.rate_first / problem.fastest[columns.first]
    base = part * slopes(problem) * linear.maximise(problem, slope=slopes(problem)).t
    # Without demands the program goes to a simpler method; one demand keeps it here.
    base[0] = max(base[0], 1e-6 * problem.fastest[0])
    found = linear.maximise(problem, value=value, base=base)
    best = simplex(monkeypatch, problem, value=value, base=base)
    assert value @ found.x == pytest.approx(value @ best.x, rel=TIES_BROKEN)
    assert found.bound - value @ found.x <= TIES_BROKEN * found.bound
    assert (problem.throughput(found.x) >= base * (1 - 1e-8)).all()
    assert (problem.gpus_used(found.x) <= problem.capacity * (1 + 1e-12)).all()


@pytest.mark.slow
def test_jobs_whose_worths_differ_stay_apart(monkeypatch):
    """What a GPU is worth to each is drawn at random: there is nothing to merge."""
    problem = cluster(8, jobs=2500, unusable=0.85)
    value = problem.columns.gpus * np.random.default_rng(0).uniform(0.5, 1.0, len(problem.columns))
    base = 0.5 * slopes(problem) * linear.maximise(problem, slope=slopes(problem)).t
    found = linear.maximise(problem, value=value, base=base)
    assert value @ found.x == pytest.approx(
        value @ simplex(monkeypatch, problem, value=value, base=base).x, rel=1e-8
    )


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
def test_a_gap_that_rounding_does_not_allow_ends_the_search_at_the_next_larger(monkeypatch, programs):
    """Not all 150 rounds of the same program: a few, and the answer is proven to 3e-7."""
    problem = cluster(3, contention=20.0)
    found = linear.maximise(problem, slope=slopes(problem))
    assert len(programs) <= FEW_PROGRAMS
    assert found.bound - found.t <= box_search.LAST_TOLERANCE * found.bound
    assert found.t == pytest.approx(simplex(monkeypatch, problem, slope=slopes(problem)).t, rel=1e-6)


def filled_by_two_gangs(jobs, types=6, seed=0):
    """The first two need all of type 0 for 5,000 s each; the others a third of these 10,000 s elsewhere."""
    draw = np.random.default_rng(seed)
    T = np.exp(draw.standard_normal((jobs, types)))
    gpus = draw.choice([1.0, 2.0, 4.0, 8.0], jobs)
    T[:2, 1:], gpus[:2] = 0.0, gpus.sum()
    steps = T[:, 1:].max(axis=1) * draw.uniform(0.1, 0.33, jobs) * 1e4
    steps[:2] = T[:2, 0] * 0.5e4
    return from_arrays(
        gpu_types=tuple(f"type-{j}" for j in range(types)),
        capacity=np.full(types, gpus[0]),
        throughput=T,
        gpus=gpus,
        steps_remaining=steps,
    )


@pytest.mark.parametrize("seed", range(3))
def test_jobs_that_tie_between_free_types_are_decided_at_once(seed, monkeypatch):
    """Small prices of the free types decide, and change the bound by less than the gap."""

    def broken(*_):
        raise AssertionError("ties broken at random")

    monkeypatch.setattr(box_search.BoxSearch, "_with_ties_broken", broken)
    instance = filled_by_two_gangs(3000, seed=seed)
    answer = solve("makespan", instance)
    assert answer.objective == pytest.approx(1e4)
    assert answer.gap <= 1e-8
    assert (instance.gpus_used(answer.x) <= instance.capacity * (1 + 1e-9)).all()
    assert (instance.time_used(answer.x) <= 1 + 1e-9).all()
