"""Makespan within a budget and fairness per dollar: equal to one linear program each, on random instances."""

import dataclasses
import itertools

import numpy as np
import pytest
from ballast_policies.allocation.problem import Configuration, Job, Problem, ProblemError
from ballast_policies.allocation.registry import allocate

from tests.policies.allocation.configurations.instances import FAMILIES, problem_of
from tests.policies.allocation.linear_program import least
from tests.policies.allocation.problems import problem
from tests.policies.allocation.textbook import Book
from tests.support.examples import first_daily, in_proportion

pytestmark = pytest.mark.slow

EXACT = 1e-5
SEEDS = range(in_proportion(10))


def with_budgets(family: str, seed: int) -> Book:
    """The jobs that can run; half of them have budgets, and all together, of which some cannot be kept."""
    random, posed = np.random.default_rng(seed), problem_of(family, seed)
    book = Book(posed)
    jobs = [job for job, runs in zip(posed.jobs, book.runs, strict=True) if runs]
    budgets = np.where(random.random(len(jobs)) < 0.5, random.choice([0.1, 1.2, 3.0], len(jobs)), np.nan)
    cheapest = least_costs(book)[book.runs]
    whole = cheapest.sum() * random.choice([0.5, 1.0, 1.1, 2.0]) if random.random() < 0.6 else None
    jobs = [
        job if np.isnan(times) else dataclasses.replace(job, budget=float(times * cost))
        for job, times, cost in zip(jobs, budgets, cheapest, strict=True)
    ]
    return Book(dataclasses.replace(posed, jobs=tuple(jobs), budget=whole))


def least_costs(book: Book) -> np.ndarray:
    """(n,) USD of each job's steps where they are cheapest."""
    per_step = book.cost() / book.rate
    return book.steps * np.array([min(per_step[book.job == m], default=0.0) for m in range(book.n)])


def limits_of(book: Book) -> np.ndarray:
    """(n + 1,) USD that each job, and all together, may cost: at least what they must."""
    budgets = np.array([np.inf if job.budget is None else job.budget for job in book.jobs])
    whole = np.inf if book.p.budget is None else book.p.budget
    cheapest = least_costs(book)
    return np.maximum(np.append(budgets, whole), np.append(cheapest, cheapest.sum()) * (1 + 1e-9))


def least_makespan(book: Book) -> float:
    """Seconds in which all steps can be done at costs within the limits."""
    # Columns: seconds on each column, then the makespan, all in the seconds that the jobs take alone.
    unit = float((book.steps / book.full).sum())
    A, b = book.limits(extra=1)
    A[:, -1] = -b
    done = book.rows_of_speed() * unit / book.steps[:, None]
    spent = np.array([book.job == m for m in range(book.n)] + [np.full(book.width, True)]) * book.cost()
    limits = limits_of(book)
    kept = np.isfinite(limits)
    rows = np.vstack([-done, (spent * unit / limits[:, None])[kept]])
    A = np.vstack([A, np.hstack([rows, np.zeros((len(rows), 1))])])
    b = np.concatenate([np.zeros(len(b)), -np.ones(book.n), np.ones(kept.sum())])
    found = least(np.append(np.zeros(book.width), 1.0), A, b, upper=np.inf)
    assert found is not None
    return float(found[0]) * unit


@pytest.mark.parametrize("family", first_daily(FAMILIES, 6))
def test_the_makespan_within_a_budget_is_the_least(family):
    """Every budget that can be kept is, and the gap is proven."""
    for seed in SEEDS:
        book = with_budgets(family, seed)
        if not book.n:
            continue
        answer = allocate("makespan-within-budget", book.p)
        assert answer.objective == pytest.approx(least_makespan(book), rel=EXACT), seed
        assert answer.gap <= EXACT
        x, speed = book.shares(answer), np.array([answer.throughput[job.name] for job in book.jobs])
        spent = np.bincount(book.job, weights=book.cost() * x, minlength=book.n) / speed * book.steps
        assert (np.append(spent, spent.sum()) <= limits_of(book) * (1 + EXACT)).all(), seed


@pytest.mark.parametrize("family", FAMILIES)
def test_the_least_worth_in_dollars_is_the_largest(family):
    """What a step costs where it is cheapest is its worth; with a proven gap."""
    for seed in SEEDS:
        book = with_budgets(family, seed)
        if not book.n:
            continue
        answer = allocate("max-min-fairness-per-dollar", book.p)
        worth = least_costs(book) / book.steps * 3600.0
        most = book.max_feasible(np.zeros(book.n), book.weights / worth)
        assert answer.objective == pytest.approx(most, rel=EXACT), seed
        assert answer.gap <= EXACT


@pytest.mark.parametrize("family", ["contended", "gangs alone"])
def test_without_a_budget_the_makespan_is_that_of_makespan(family):
    """And a larger budget never makes it longer."""
    for seed in SEEDS:
        book = with_budgets(family, seed)
        jobs = tuple(dataclasses.replace(job, budget=None) for job in book.jobs)
        free = dataclasses.replace(book.p, budget=None, jobs=jobs)
        shortest = allocate("makespan", free).objective
        assert allocate("makespan-within-budget", free).objective == pytest.approx(shortest, rel=EXACT)
        spans = [
            allocate(
                "makespan-within-budget", dataclasses.replace(free, budget=least_costs(book).sum() * by)
            ).objective
            for by in (1.0, 1.3, 2.0, 100.0)
        ]
        assert all(next_ <= span * (1 + EXACT) for span, next_ in itertools.pairwise(spans))


def test_a_job_that_ends_sooner_has_the_gpus_that_idle():
    """The makespan asks for a hundredth of the second GPU only."""
    p = problem([[1.0], [1.0]], [2], steps=[100.0, 1.0])
    speeds = allocate("makespan-within-budget", p).throughput
    assert speeds == pytest.approx({"job-0": 1.0, "job-1": 1.0})


def test_a_budget_that_is_no_number_and_a_price_of_nothing_are_refused():
    p = problem_of("gangs alone", 1)
    with pytest.raises(ProblemError, match="budget: nan"):
        dataclasses.replace(p, budget=float("nan"))
    with pytest.raises(ProblemError, match=r"prices\."):
        allocate(
            "max-min-fairness-per-dollar", dataclasses.replace(p, prices=dict.fromkeys(p.gpu_types, 0.0))
        )
    # A budget of nothing counts as the least cost.
    nothing = allocate("makespan-within-budget", dataclasses.replace(p, budget=0.0))
    assert np.isfinite(nothing.objective)


@pytest.mark.parametrize("speed", [2.0, 1e12])
def test_steps_that_cost_quadrillions_of_the_budget_are_not_done_there(speed):
    """Numbers that no solver takes; the other configuration is as it would be alone."""
    cheap = Configuration(name="cheap", gpus={"t": 1}, throughput=1.0)
    dear = Configuration(name="dear", gpus={"t": 1}, throughput=speed, usd_per_step=1e15)
    job = Job(name="a", configurations=(cheap, dear), steps_remaining=3600.0, budget=0.0)
    p = Problem(gpu_types=("t",), capacity={"t": 3}, prices={"t": 1e-6}, jobs=(job,))
    answer = allocate("makespan-within-budget", p)
    assert answer.allocation["a"] == pytest.approx({"cheap": 1.0, "dear": 0.0})
    assert answer.status == "optimal"
