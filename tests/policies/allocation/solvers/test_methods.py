"""The table of methods: one for every size, and answers that list which of them answered instead of which."""

import dataclasses
import importlib.util
import itertools

import numpy as np
import pytest
from ballast_policies.allocation.fairness import water_levels
from ballast_policies.allocation.instance import from_arrays, instance
from ballast_policies.allocation.policies.cost import min_cost_slo
from ballast_policies.allocation.policies.cost.min_cost_slo import admissible_demands
from ballast_policies.allocation.problem import Pair
from ballast_policies.allocation.registry import allocate, solve
from ballast_policies.allocation.solvers import box_search, linear, methods
from ballast_policies.allocation.solvers.linear import SolverError
from ballast_policies.allocation.solvers.methods import METHODS, Size, Task, choose
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.allocation.families import FAMILIES
from tests.policies.allocation.problems import problem, problems, within_limits
from tests.policies.allocation.textbook import Book
from tests.support.examples import examples, first_daily


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


@pytest.mark.parametrize(
    ("jobs", "fails", "line"),
    [
        (
            100,
            "fill_by_prices",
            "a stage for each GPU type: a stage found no end; then a program for each level",
        ),
        (
            30,
            "fill_by_programs",
            "a program for each level: a stage found no end; then a stage for each GPU type",
        ),
    ],
)
def test_the_answer_lists_that_another_method_answered_and_why(jobs, fails, line, monkeypatch):
    """Linear programs decide where prices find no end, prices where these do; the objective is the same."""
    instance = FAMILIES["demand 2"].instance(jobs, types=2)
    expected = solve("water-filling", instance)
    assert expected.fallbacks == ()
    with monkeypatch.context() as patch:
        patch.setattr(water_levels, fails, no_end)
        found = solve("water-filling", instance)
    assert found.objective == pytest.approx(expected.objective, rel=1e-7)
    assert found.fallbacks == (line,)
    assert solve("water-filling", instance).fallbacks == ()


@pytest.mark.parametrize("error", [SolverError, linear.InfeasibleError])
def test_the_largest_least_level_stands_where_idle_gpus_cannot_be_handed_out(error, monkeypatch):
    """The program of the ties ends without a solution; the answer is as optimal as before it."""
    real, maximise = FAMILIES["demand 0.5"].instance(20, types=3), linear.maximise
    expected = solve("max-min-fairness", real)

    def without_ties(*args, **named):
        if "value" in named:
            raise error("the solver ended")
        return maximise(*args, **named)

    monkeypatch.setattr(linear, "maximise", without_ties)
    found = solve("max-min-fairness", real)
    assert found.objective == pytest.approx(expected.objective, rel=1e-7)
    assert found.gap <= 1e-6


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


@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    copies=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    policy=st.sampled_from(["max-min-fairness", "water-filling", "max-throughput", "makespan"]),
)
def test_many_jobs_of_few_kinds_reach_the_optimum_of_the_jobs_one_by_one(seed, copies, policy):
    """Whatever the numbers of each kind; one by one they differ by 1e-10, so that nothing merges."""
    draw = np.random.default_rng(seed)
    kind = np.repeat(np.arange(len(copies)), copies)
    p = problem(draw.uniform(1, 10, (len(copies), 2))[kind].tolist(), draw.integers(1, 4, 2).tolist())
    jobs = tuple(
        dataclasses.replace(job, throughput={g: rate * (1 + 1e-10 * m) for g, rate in job.throughput.items()})
        for m, job in enumerate(p.jobs)
    )
    whole, single = (allocate(policy, q) for q in (p, dataclasses.replace(p, jobs=jobs)))
    assert whole.objective == pytest.approx(single.objective, rel=1e-6)
    assert whole.gap <= 1e-6


def test_jobs_of_one_kind_are_served_alike():
    """Seven equal jobs on four GPUs: each the same speed."""
    speed = list(allocate("max-min-fairness", problem([[3.0, 5.0]] * 7, [3, 1])).throughput.values())
    assert speed == pytest.approx([speed[0]] * 7, rel=1e-9)


NAMES = ("type-0", "type-1", "type-2")


def sharing(seed, *, jobs=75, contention=2.0):
    """Jobs no two of which are alike; two are slowed down as far as their loads add up to over 1."""
    draw = np.random.default_rng(seed)
    size, load = 10 ** draw.uniform(-1, 2, jobs), draw.uniform(0.2, 1.0, (jobs, 3))
    T = size[:, None] * np.sort(draw.uniform(1, 5, 3)) * draw.uniform(0.5, 2.0, (jobs, 3))
    pairs = []
    for a, b in itertools.combinations(range(jobs), 2):
        slow = np.minimum(1.0, 1.0 / (load[a] + load[b])) * draw.uniform(0.85, 1.0, 3)
        rates = zip((T[a] * slow).tolist(), (T[b] * slow).tolist(), strict=True)
        pairs.append(Pair(jobs=(str(a), str(b)), throughput=dict(zip(NAMES, rates, strict=True))))
    return dataclasses.replace(
        from_arrays(
            gpu_types=NAMES,
            capacity=np.full(3, np.ceil(jobs / 3 / contention)),
            throughput=T,
            gpus=np.ones(jobs),
            pairs=tuple(pairs),
        ),
        weights=draw.choice([1.0, 5.0], jobs),
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["max-min-fairness", "max-throughput"])
@pytest.mark.parametrize("contention", [0.8, 4.0])
def test_the_optimum_is_that_of_all_pairs_at_once(policy, contention, monkeypatch):
    """Objective and certified gap; idle GPUs and contended ones."""
    problem = sharing(1, contention=contention)
    assert (problem.columns.second >= 0).sum() > methods.MANY_PAIRS
    found = solve(policy, problem)
    with monkeypatch.context() as patch:
        patch.setattr(methods, "MANY_PAIRS", 10**9)
        whole = solve(policy, problem)
    assert found.objective == pytest.approx(whole.objective, rel=1e-7)
    assert found.gap <= 1e-6
    within_limits(problem, found.x)


@pytest.mark.slow
def test_demands_that_only_pairs_meet_are_met():
    """What jobs alone cannot reach is not called infeasible before all pairs were asked."""
    problem = sharing(2, contention=4.0)
    slope = np.divide(problem.weights, problem.level_scale)
    most = linear.maximise(problem, slope=slope)
    base = slope * most.t * (1 - 1e-7)
    found = linear.maximise(problem, value=np.ones(len(problem.columns)), base=base)
    assert (problem.throughput(found.x) >= base * (1 - 1e-8)).all()
    with pytest.raises(linear.InfeasibleError):
        linear.maximise(problem, value=np.ones(len(problem.columns)), base=base * 1.01)


@pytest.mark.slow
@examples(80)
@given(p=problems(), parts=st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.7, 1.0]), min_size=7, max_size=7))
def test_small_lists_are_accepted_as_one_linear_program_after_another_accepts_them(p, parts):
    """Ties included: parts of full speed that fill GPUs exactly."""
    book, real = Book(p), instance(p)
    demand = book.full * np.array(parts[: book.n])
    order = np.flatnonzero(demand > 0)[::-1]
    want = np.zeros(book.n, dtype=bool)
    for m in order:
        want[m] = True
        want[m] = (
            book.best(np.zeros(book.width), at_least=np.where(want, demand, 0.0) * (1 - 1e-9)) is not None
        )
    if len(order):
        assert (admissible_demands(real, demand, order) == want).all()


def fits(real, demand, jobs):
    some = np.zeros(len(demand))
    some[jobs] = demand[jobs]
    try:
        linear.maximise(real, value=np.zeros(len(real.columns)), base=some * (1 - 1e-7))
    except linear.InfeasibleError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", first_daily(["demand 3", "like jobs", "heavy tails", "few usable types"], 2)
)
def test_hundreds_of_demands_of_which_most_do_not_fit(family):
    """What is accepted fits together; what is refused does not fit with those accepted before it."""
    real = FAMILIES[family].instance(400, types=4)
    order = np.random.default_rng(5).permutation(400)
    demand = real.fastest * np.random.default_rng(6).uniform(0.2, 1.0, 400)
    accepted = admissible_demands(real, demand, order)
    assert fits(real, demand, accepted)
    refused = np.flatnonzero(~accepted[order])
    assert 20 < len(refused) < 380
    for at in np.random.default_rng(7).choice(refused, 8, replace=False):
        before = order[:at][accepted[order[:at]]]
        assert not fits(real, demand * (1 + 1e-6), np.append(before, order[at]))


def test_no_prices_no_answer(monkeypatch):
    """Where prices are not found, the caller tries its own way."""
    monkeypatch.setattr(min_cost_slo, "least_utilization", lambda *arguments, **more: None)
    real = FAMILIES["demand 3"].instance(50)
    assert admissible_demands(real, real.fastest, np.arange(50)) is None
