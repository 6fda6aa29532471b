"""Every exact policy reaches the optimum of an independent formulation, for gangs and elastic jobs."""

import dataclasses
import functools

import numpy as np
import pytest
from ballast_policies.allocation.registry import allocate
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.policies.allocation.configurations.instances import FAMILIES, problem_of
from tests.policies.allocation.problems import pair, problem
from tests.policies.allocation.textbook import (
    Book,
    filling_by_stages,
    least_total_completion_time,
    team_weights,
)
from tests.support.examples import examples, in_proportion

pytestmark = pytest.mark.slow

SEEDS = range(in_proportion(20))
"""With fourteen families: 280 instances for each policy each night, 84 by default."""
CLOSE = {"rel": 1e-6, "abs": 1e-9}


@functools.cache
def textbook(family, seed):
    """The same for every policy."""
    return Book(problem_of(family, seed))


def solved(policy, family, seed):
    """(problem as a textbook has it, answer), checked for feasibility and a proven gap."""
    book = textbook(family, seed)
    problem, answer = book.p, allocate(policy, book.p)
    x = book.shares(answer)
    A, b = book.limits()
    assert (x >= 0).all()
    assert (A @ x <= b * (1 + 1e-9) + 1e-9).all()
    speed = book.rows_of_speed() @ x
    assert speed == pytest.approx([answer.throughput[job.name] for job in problem.jobs], rel=1e-9, abs=1e-12)
    level = book.scale * speed / book.weights
    assert level == pytest.approx([answer.levels[job.name] for job in problem.jobs], rel=1e-8, abs=1e-12)
    if policy != "isolated":
        assert answer.gap is not None
        assert answer.gap <= 1e-6
        assert answer.status in ("optimal", "closed form")
    for job in problem.jobs:
        if job.configurations:
            assert set(answer.allocation[job.name]) == {each.name for each in job.configurations}
    return book, answer, x


def every(test):
    """The test on all families and seeds."""
    return pytest.mark.parametrize("family", FAMILIES)(test)


@every
def test_max_min_fairness_has_the_textbooks_least_level_and_leaves_nothing(family):
    """The least level, and no GPU is left that would add to the levels."""
    for seed in SEEDS:
        book, answer, x = solved("max-min-fairness", family, seed)
        if not book.runs.any():
            assert answer.objective == 0.0
            continue
        slope = np.divide(book.weights, book.scale, out=np.zeros(book.n), where=book.runs)
        least = book.max_feasible(np.zeros(book.n), slope)
        assert answer.objective == pytest.approx(least, **CLOSE)
        worth = book.scale[book.job] * book.rate
        assert worth @ x >= book.best(worth, at_least=slope * least * (1 - 1e-7)) * (1 - 1e-5)


@every
def test_makespan_is_the_textbooks(family):
    """In seconds."""
    for seed in SEEDS:
        book, answer, _ = solved("makespan", family, seed)
        if book.runs.any():
            best = 1.0 / book.max_feasible(np.zeros(book.n), np.where(book.runs, book.steps, 0.0))
            assert answer.objective == pytest.approx(best, **CLOSE)


@every
def test_finish_time_fairness_has_the_textbooks_least_rho(family):
    """The least rho, by halving an interval of it."""
    for seed in SEEDS:
        book, answer, _ = solved("finish-time-fairness", family, seed)
        if not book.runs.any():
            continue
        elapsed = np.array([job.elapsed for job in book.jobs])
        alone = np.array([book.isolated_speed(m) for m in range(book.n)])
        isolated = np.array([job.isolated_elapsed for job in book.jobs])
        isolated = isolated + np.divide(book.steps, alone, out=np.zeros(book.n), where=book.runs)
        low, high = 0.0, answer.objective * 2
        for _ in range(45):
            rho = 0.5 * (low + high)
            left = rho * isolated - elapsed
            need = np.where(
                book.runs, np.where(left > 0, book.steps / np.where(left > 0, left, 1), np.inf), 0
            )
            enough = np.minimum(need, book.full) * (1 - 1e-9)
            fits = (need <= book.full * (1 + 1e-12)).all() and book.best(
                np.zeros(book.width), enough
            ) is not None
            low, high = (low, rho) if fits else (rho, high)
        assert answer.objective == pytest.approx(high, rel=1e-5)


@every
@pytest.mark.parametrize("policy", ["max-throughput", "max-throughput-per-dollar", "fifo"])
def test_linear_objectives_are_the_textbooks(policy, family):
    """Linear objectives in their units."""
    for seed in SEEDS:
        book, answer, _ = solved(policy, family, seed)
        value = book.rate.copy()
        if policy == "max-throughput-per-dollar":
            value = book.rate / (book.use @ book.prices)
        if policy == "fifo":
            arrival = np.argsort([-job.elapsed for job in book.jobs], kind="stable")
            place = np.empty(book.n)
            place[arrival] = book.n - np.arange(book.n)
            value = (book.gpus * place)[book.job] * book.rate / book.full[book.job]
        assert answer.objective == pytest.approx(book.best(value), **CLOSE)


@every
def test_the_shortest_job_has_its_fastest_configuration(family):
    """The shortest job has its fastest configuration; the others are served in order of length."""
    for seed in SEEDS:
        book, answer, x = solved("shortest-job-first", family, seed)
        if not book.runs.any():
            continue
        length = np.where(book.runs, book.steps / np.where(book.runs, book.full, 1.0), np.inf)
        assert answer.objective == pytest.approx(length.min(), **CLOSE)
        order = sorted(range(book.n), key=lambda m: (length[m], -book.jobs[m].elapsed))
        place = np.empty(book.n)
        place[order] = book.n - np.arange(book.n)
        value = (book.gpus * place)[book.job] * book.rate / book.full[book.job]
        full = np.zeros(book.n)
        full[order[0]] = book.full[order[0]] * (1 - 1e-9)
        assert value @ x == pytest.approx(book.best(value, at_least=full), rel=1e-6)


@every
def test_min_cost_does_all_steps_at_each_jobs_least_cost(family):
    """All steps at each job's least cost a step, on nothing else, and the time there shared fairly."""
    for seed in SEEDS:
        book, answer, x = solved("min-cost", family, seed)
        if not book.runs.any():
            continue
        per_step = book.cost() / book.rate
        least = np.array([min(per_step[book.job == m], default=0.0) for m in range(book.n)])
        assert answer.objective == pytest.approx(book.steps @ least, **CLOSE)
        dear = per_step > least[book.job] * (1 + 1e-8)
        assert (x[dear] == 0).all()
        levels = filling_by_stages(book.only(~dear), flat_weights(book))
        assert book.scale * (book.rows_of_speed() @ x) == pytest.approx(levels, rel=1e-5, abs=1e-7)


@every
def test_min_cost_slo_keeps_the_textbooks_deadlines_at_the_least_cost(family):
    """The deadlines kept are those of the textbook, at the least cost of keeping them."""
    for seed in SEEDS:
        book, answer, x = solved("min-cost-slo", family, seed)
        until = np.array([np.inf if job.deadline is None else job.deadline for job in book.jobs])
        need = book.steps / until
        reach = (need > 0) & (need <= book.full * (1 + 1e-9))
        kept = np.zeros(book.n, dtype=bool)
        for m in sorted(np.flatnonzero(reach), key=lambda m: until[m]):
            kept[m] = True
            some = np.where(kept, np.minimum(need, book.full), 0.0) * (1 - 1e-9)
            kept[m] = book.best(np.zeros(book.width), at_least=some) is not None
        late = {job.name for m, job in enumerate(book.jobs) if np.isfinite(until[m]) and not kept[m]}
        assert set(answer.unmet_deadlines) == late
        speed = book.rows_of_speed() @ x
        assert (speed[kept] >= need[kept] * (1 - 1e-6)).all()
        if kept.any():
            value = -book.cost() * np.where(kept, until, 0.0)[book.job]
            least = -book.best(value, at_least=np.where(kept, np.minimum(need, book.full), 0.0) * (1 - 1e-9))
            assert -value @ x == pytest.approx(least, rel=1e-5)


def flat_weights(book):
    """Every job on its own, with its weight."""
    return lambda rising: np.array([book.weights[m] if m in rising else 0.0 for m in range(book.n)])


@every
@pytest.mark.parametrize("policy", ["water-filling", "hierarchical"])
def test_water_filling_has_the_textbooks_levels(policy, family):
    for seed in SEEDS:
        book, answer, x = solved(policy, family, seed)
        weights_of = flat_weights(book) if policy == "water-filling" else team_weights(book)
        levels = filling_by_stages(book, weights_of)
        assert book.scale * (book.rows_of_speed() @ x) == pytest.approx(levels, rel=1e-5, abs=1e-7)
        if policy == "water-filling" and book.runs.any():
            assert answer.objective == pytest.approx((levels / book.weights)[book.runs].min(), **CLOSE)


@every
def test_each_isolated_job_makes_the_best_of_its_part(family):
    """Each job makes the best of its own 1/n; the GPUs suffice for all."""
    for seed in SEEDS:
        book, answer, _ = solved("isolated", family, seed)
        speed = [book.isolated_speed(m) for m in range(book.n)]
        assert list(answer.throughput.values()) == pytest.approx(speed, rel=1e-7)


@every
def test_the_strategy_proof_mechanism_leaves_its_part_of_the_fair_speeds(family):
    """The proportionally fair speeds, and of them the part that the mechanism leaves to each job."""
    for seed in SEEDS[:3] if family == "many configurations" else SEEDS[:5]:
        book, _, x = solved("strategy-proof", family, seed)
        runs = np.flatnonzero(book.runs)
        if not len(runs):
            continue
        fair = book.nash(runs)
        kept = np.ones(book.n)
        for m in runs if len(runs) > 1 else ():
            others = runs[runs != m]
            without = book.nash(others)
            loss = book.weights[others] @ np.log(fair[others] / without[others])
            kept[m] = min(1.0, np.exp(loss / book.weights[m]))
        assert book.rows_of_speed() @ x == pytest.approx(fair * kept, rel=1e-4)


@examples(25)
@given(
    steps=st.lists(st.floats(10, 1e4), min_size=1, max_size=6),
    rates=st.lists(st.floats(0.1, 20.0), min_size=12, max_size=12),
    waited=st.lists(st.floats(0, 100), min_size=6, max_size=6),
)
def test_allox_is_the_least_average_completion_time_of_all_assignments(steps, rates, waited):
    """By enumeration: up to six jobs on two GPUs of one type and one of another."""
    n = len(steps)
    p = problem([rates[2 * m : 2 * m + 2] for m in range(n)], [2, 1], steps=steps, elapsed=waited[:n])
    want = (least_total_completion_time(Book(p)) + sum(waited[:n])) / n
    assert allocate("allox", p).objective == pytest.approx(want, rel=1e-9)


@examples(40)
@given(seed=st.integers(0, 2**32 - 1))
def test_space_sharing_reaches_the_linear_program_over_all_pairs(seed):
    """Max-min fairness with every pair as a column of its own, none left out."""
    draw = np.random.default_rng(seed)
    n, k = 4, 2
    T, capacity = draw.uniform(1, 10, (n, k)), draw.integers(1, 3, k)
    rates = {(a, b): draw.uniform(0.2, 1.0, (k, 2)) * T[[a, b]].T for a in range(n) for b in range(a + 1, n)}
    p = dataclasses.replace(
        problem(T.tolist(), capacity.tolist()),
        pairs=tuple(pair(a, b, *together.tolist()) for (a, b), together in rates.items()),
    )
    book = Book(p)
    ways = [({m: T[m, j]}, j) for m in range(n) for j in range(k)]
    ways += [({a: r[j, 0], b: r[j, 1]}, j) for (a, b), r in rates.items() for j in range(k)]
    A = np.zeros((n + k + n, len(ways) + 1))
    for column, (members, j) in enumerate(ways):
        A[n + j, column] = 1.0
        for m, rate in members.items():
            A[m, column] = 1.0
            A[n + k + m, column] = -rate * book.scale[m]
    A[n + k :, -1] = 1.0
    b = np.concatenate([np.ones(n), capacity, np.zeros(n)])
    want = -linprog(-np.eye(len(ways) + 1)[-1], A_ub=A, b_ub=b, method="highs").fun
    answer = allocate("max-min-fairness", p, space_sharing=True)
    assert answer.objective == pytest.approx(want, **CLOSE)
