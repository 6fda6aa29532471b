"""Optima of independent formulations, where a policy's specification does not say all of its promise."""

import dataclasses

import cvxpy as cp
import numpy as np
import pytest
from ballast_policies.allocation.problem import Entity
from ballast_policies.allocation.registry import allocate
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.policies.allocation.problems import pair, problem, problems
from tests.policies.allocation.textbook import (
    Book,
    filling_by_stages,
    least_total_completion_time,
    team_weights,
)
from tests.support.examples import examples

EXACT = {"rel": 1e-6, "abs": 1e-9}


@st.composite
def where_all_run(draw, *, max_jobs):
    """Random problems, less the jobs that fit nowhere."""
    p = draw(problems(max_jobs=max_jobs))
    kept = tuple(job for job, runs in zip(p.jobs, Book(p).runs, strict=True) if runs)
    assume(kept)
    return dataclasses.replace(p, jobs=kept)


def levels_of(answer, p):
    """Levels without weights, as the filling procedure counts them."""
    return np.array([answer.levels[job.name] * job.weight for job in p.jobs])


@pytest.mark.slow
@examples(40)
@given(
    p=problems(max_jobs=6),
    teams=st.lists(st.sampled_from(["a", "b", None]), min_size=6, max_size=6),
    policies=st.tuples(st.sampled_from(["fairness", "fifo"]), st.sampled_from(["fairness", "fifo"])),
    weight=st.floats(0.3, 4.0),
)
def test_section_5_4_3_hierarchical_reaches_the_levels_of_the_staged_procedure(p, teams, policies, weight):
    """Two teams, fair or first come first served inside, and jobs that stand beside them."""
    p = dataclasses.replace(
        p,
        entities={
            "a": Entity(weight=1.0, policy=policies[0]),
            "b": Entity(weight=weight, policy=policies[1]),
        },
        jobs=tuple(dataclasses.replace(job, entity=team) for job, team in zip(p.jobs, teams, strict=False)),
    )
    # The stages written out freeze who could rise by less than 1e-7, which the later stages add to.
    book = Book(p)
    want = filling_by_stages(book, team_weights(book))
    assert levels_of(allocate("hierarchical", p), p) == pytest.approx(want, rel=5e-6, abs=1e-7)


@examples(15)
@given(p=where_all_run(max_jobs=4))
def test_strategy_proof_shares_are_those_of_the_partial_allocation_mechanism(p):
    """Nash welfare by cvxpy with everybody and without each; each keeps what it leaves to the others."""
    book = Book(p)

    def nash(rows):
        weight = np.zeros(book.n)
        weight[rows] = book.weights[rows]
        chosen = [int(m) for m in rows]
        _, speed = book.convex(lambda speed: -cp.sum(cp.multiply(weight[chosen], cp.log(speed[chosen]))))
        return speed

    answer = allocate("strategy-proof", p)
    rows = np.arange(book.n)
    best = nash(rows)
    for m in rows:
        others = rows[rows != m]
        kept = 1.0
        if len(others):
            ratio = best[others] / nash(others)[others]
            kept = min(1.0, float(np.prod(ratio ** (book.weights[others] / book.weights[m]))))
        have = answer.throughput[p.jobs[m].name]
        assert have == pytest.approx(kept * best[m], rel=1e-5)


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
    assert answer.objective == pytest.approx(want, **EXACT)
