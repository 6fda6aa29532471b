"""Makespan within a budget and fairness per dollar: equal to what cvxpy finds, on random instances."""

import dataclasses
import itertools
import random

import cvxpy
import numpy as np
import pytest
from ballast_policies.allocation.problem import Configuration, Job, Problem, ProblemError
from ballast_policies.allocation.registry import allocate

from tests.support.examples import in_proportion

pytestmark = pytest.mark.slow

EXACT = 1e-5
SEEDS = range(in_proportion(50))


def random_problem(seed: int, *, elastic: bool = False) -> Problem:
    """Two to seven jobs over one to three types; budgets of some, of all together, of neither."""
    rng = random.Random(seed)
    types = ("k80", "p100", "v100")[: rng.randint(1, 3)]
    prices = {t: rng.uniform(0.1, 4.0) for t in types}
    jobs = []
    for number in range(rng.randint(2, 7)):
        speeds = {t: rng.choice([0.0, 0.01, 1.0, 100.0]) * rng.uniform(0.5, 5) for t in types}
        speeds[types[0]] = speeds[types[0]] or 0.3
        gpus = rng.choice([1, 1, 2, 4])
        job = Job(
            name=f"j{number}",
            throughput=speeds,
            gpus=gpus,
            weight=rng.choice([1.0, 3.0]),
            steps_remaining=rng.choice([1.0, 1e3, 1e6]) * rng.uniform(0.5, 2),
            budget=None,
        )
        if elastic and rng.random() < 0.7:
            ways = tuple(
                Configuration(name=f"{g}x{t}", gpus={t: g}, throughput=rate * g**0.8)
                for t, rate in speeds.items()
                if rate > 0
                for g in (1, 2, 4)
            )
            job = dataclasses.replace(job, throughput={}, gpus=1, configurations=ways)
        if rng.random() < 0.5:
            least = min(one_step for *_, one_step in ways_of(job, types, prices, dict.fromkeys(types, 8)))
            job = dataclasses.replace(job, budget=least * job.steps_remaining * rng.choice([0.1, 1.2, 3.0]))
        jobs.append(job)
    capacity = {t: rng.choice([4, 6, 8]) for t in types}
    budget = None
    if rng.random() < 0.6:
        budget = least_cost(jobs, types, prices, capacity) * rng.choice([0.5, 1.0, 1.1, 2.0])
    return Problem(gpu_types=types, capacity=capacity, jobs=tuple(jobs), prices=prices, budget=budget)


def ways_of(job, types, prices, capacity):
    """(GPUs by type, steps/s, USD a step) of each way in which the job can run."""
    ways = [({t: job.gpus}, job.throughput.get(t, 0.0)) for t in types if not job.configurations] + [
        (dict(each.gpus), each.throughput) for each in job.configurations
    ]
    found = []
    for gpus, rate in ways:
        if rate > 0 and all(count <= capacity[t] for t, count in gpus.items()):
            usd = sum(count * prices[t] for t, count in gpus.items()) / 3600
            found.append((gpus, rate, usd / rate))
    return found


def least_cost(jobs, types, prices, capacity) -> float:
    return sum(
        job.steps_remaining * min(one for *_, one in ways_of(job, types, prices, capacity)) for job in jobs
    )


def reference(p: Problem, *, fairness: bool) -> float:
    """The optimum by cvxpy: the makespan in seconds, or the least worth in USD an hour."""
    spent, speeds, time = {}, {}, {}
    used = dict.fromkeys(p.gpu_types, 0.0)
    rules = []
    end = cvxpy.Variable()  # of the makespan; with fairness, the level
    # In units of the longest job alone, so that the numbers are alike.
    alone = {
        job.name: job.steps_remaining
        / max(rate for _, rate, _ in ways_of(job, p.gpu_types, p.prices, p.capacity))
        for job in p.jobs
    }
    unit = sum(alone.values())
    for job in p.jobs:
        ways = ways_of(job, p.gpu_types, p.prices, p.capacity)
        y = cvxpy.Variable(len(ways), nonneg=True)
        part = 1.0 if fairness else alone[job.name] / unit
        speeds[job.name] = sum(y[i] * rate for i, (_, rate, _) in enumerate(ways))
        spent[job.name] = sum(y[i] * rate * one for i, (_, rate, one) in enumerate(ways)) * (
            1.0 if fairness else alone[job.name]
        )
        time[job.name] = part * cvxpy.sum(y)
        for i, (gpus, _, _) in enumerate(ways):
            for t, count in gpus.items():
                used[t] = used[t] + part * count * y[i]
        least = min(one for *_, one in ways)
        if fairness:
            rules.append(speeds[job.name] * least * 3600 / job.weight >= end)
        else:
            rate = max(rate for _, rate, _ in ways)
            rules.append(speeds[job.name] / rate >= 1)
            if job.budget is not None:
                limit = max(job.budget, least * job.steps_remaining * (1 + 1e-9))
                rules.append(spent[job.name] / limit <= 1)
    whole = 1.0 if fairness else end
    rules += [each <= whole for each in time.values()]
    rules += [used[t] <= p.capacity[t] * whole for t in p.gpu_types]
    if not fairness and p.budget is not None:
        least = least_cost(p.jobs, p.gpu_types, p.prices, p.capacity)
        limit = max(p.budget, least * (1 + 1e-9))
        rules.append(sum(spent.values()) / limit <= 1)
    goal = cvxpy.Maximize(end) if fairness else cvxpy.Minimize(end)
    program = cvxpy.Problem(goal, rules)
    program.solve(solver=cvxpy.HIGHS)
    assert program.status == "optimal"
    return float(end.value) * (1.0 if fairness else unit)


def cost(p: Problem, answer) -> dict[str, float]:
    """USD of the remaining steps of each job at its shares."""
    found = {}
    for job in p.jobs:
        gpus = {each.name: each.gpus for each in job.configurations}
        rate = sum(
            share * sum(count * p.prices[t] for t, count in gpus.get(way, {way: job.gpus}).items()) / 3600
            for way, share in answer.allocation[job.name].items()
        )
        found[job.name] = rate / answer.throughput[job.name] * job.steps_remaining
    return found


@pytest.mark.parametrize("elastic", [False, True], ids=["gangs", "elastic"])
def test_the_makespan_within_a_budget_is_the_least(elastic):
    """Every budget that can be kept is, and the gap is proven."""
    for seed in SEEDS:
        p = random_problem(seed, elastic=elastic)
        answer = allocate("makespan-within-budget", p)
        assert answer.objective == pytest.approx(reference(p, fairness=False), rel=EXACT), seed
        assert answer.gap <= EXACT
        spent = cost(p, answer)
        least = {
            job.name: job.steps_remaining
            * min(one for *_, one in ways_of(job, p.gpu_types, p.prices, p.capacity))
            for job in p.jobs
        }
        for job in p.jobs:
            if job.budget is not None:
                assert spent[job.name] <= max(job.budget, least[job.name]) * (1 + EXACT), seed
        if p.budget is not None:
            assert sum(spent.values()) <= max(p.budget, sum(least.values())) * (1 + EXACT), seed


def test_without_a_budget_the_makespan_is_that_of_makespan():
    """And a larger budget never makes it longer."""
    for seed in range(20):
        p = random_problem(seed)
        free = dataclasses.replace(
            p, budget=None, jobs=tuple(dataclasses.replace(job, budget=None) for job in p.jobs)
        )
        least = allocate("makespan", free).objective
        assert allocate("makespan-within-budget", free).objective == pytest.approx(least, rel=EXACT)
        cheapest = least_cost(p.jobs, p.gpu_types, p.prices, p.capacity)
        spans = [
            allocate("makespan-within-budget", dataclasses.replace(free, budget=cheapest * by)).objective
            for by in (1.0, 1.3, 2.0, 100.0)
        ]
        assert all(next_ <= span * (1 + EXACT) for span, next_ in itertools.pairwise(spans))


@pytest.mark.parametrize("elastic", [False, True], ids=["gangs", "elastic"])
def test_the_least_worth_in_dollars_is_the_largest(elastic):
    """With a proven gap."""
    for seed in SEEDS:
        p = random_problem(seed, elastic=elastic)
        answer = allocate("max-min-fairness-per-dollar", p)
        assert answer.objective == pytest.approx(reference(p, fairness=True), rel=EXACT), seed
        assert answer.gap <= EXACT


def test_a_budget_that_is_no_number_and_a_price_of_nothing_are_refused():
    """With the field."""
    with pytest.raises(ProblemError, match="budget: nan"):
        dataclasses.replace(random_problem(1), budget=float("nan"))
    p = random_problem(1)
    with pytest.raises(ProblemError, match=r"prices\."):
        allocate(
            "max-min-fairness-per-dollar", dataclasses.replace(p, prices=dict.fromkeys(p.gpu_types, 0.0))
        )
    # A budget of nothing counts as the least cost.
    nothing = allocate("makespan-within-budget", dataclasses.replace(p, budget=0.0))
    assert np.isfinite(nothing.objective)


def test_steps_that_cost_quadrillions_of_the_budget_are_not_done_there():
    """Numbers that no solver takes; the other configuration is as it would be alone."""
    cheap = Configuration(name="cheap", gpus={"t": 1}, throughput=1.0)
    dear = Configuration(name="dear", gpus={"t": 1}, throughput=2.0, usd_per_step=1e15)
    job = Job(name="a", configurations=(cheap, dear), steps_remaining=3600.0, budget=0.0)
    p = Problem(gpu_types=("t",), capacity={"t": 3}, prices={"t": 1e-6}, jobs=(job,))
    answer = allocate("makespan-within-budget", p)
    assert answer.allocation["a"] == pytest.approx({"cheap": 1.0, "dear": 0.0})
    assert answer.status == "optimal"
