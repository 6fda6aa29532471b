"""Matching of all jobs to places in queues: exact where promised, and with a bound that holds everywhere."""

import numpy as np
import pytest
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import methods, queues
from scipy.optimize import linear_sum_assignment

from tests.policies.allocation.problems import random_problem
from tests.support.examples import first_daily


def lengths(seed, jobs, types, *, zero=0.1, like=None):
    draw = np.random.default_rng(seed)
    work = 10 ** draw.uniform(2, 5, (like or jobs, 1)) * draw.uniform(0.5, 2.0, (like or jobs, types))
    work[draw.random(work.shape) < zero] = np.inf
    work[:, 0] = np.where(np.isfinite(work).any(axis=1), work[:, 0], 1000.0)
    return work if like is None else work[draw.integers(0, like, jobs)]


def least_total(work, capacity):
    """The Hungarian method over every place that there is."""
    jobs = len(work)
    slots = [(j, i) for j, c in enumerate(capacity) for i in range(1, jobs + 1) for _ in range(int(c))]
    cost = np.array(
        [[i * work[m, j] if np.isfinite(work[m, j]) else 1e12 for j, i in slots] for m in range(jobs)]
    )
    rows, columns = linear_sum_assignment(cost)
    return cost[rows, columns].sum()


@pytest.mark.parametrize("most", [3.0, 1e12])
@pytest.mark.parametrize("seed", first_daily(range(6), 3))
def test_small_matchings_are_those_of_the_hungarian_method_and_proven(seed, most):
    """Prices of the places come from chains of moves, and prove the total; idle GPUs need no memory."""
    work, capacity = lengths(seed, 30, 3, zero=0.3), np.array([2.0, 1.0, most])
    found = queues.match(work, capacity)
    assert found.total == pytest.approx(least_total(work, np.minimum(capacity, 30)), rel=1e-9)
    assert found.bound == pytest.approx(found.total, rel=1e-9)


@pytest.mark.parametrize("gpus", [0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("like", [None, 30])
def test_large_matchings_are_proven_optimal(gpus, like):
    """From five jobs for each GPU to two GPUs for each job, distinct jobs and copies."""
    work = lengths(3, 3000, 4, like=like)
    capacity = np.floor(3000 * gpus * np.array([0.1, 0.2, 0.3, 0.4]))
    found = queues.match(work, capacity)
    assert found.total - found.bound <= 1e-9 * found.bound
    for j, most in enumerate(capacity):
        assert np.bincount(found.place[found.kind == j]).max() <= most


def test_where_no_program_closes_the_best_of_several_matchings_answers(monkeypatch):
    """As where places have too few jobs to choose from for prices of their own."""
    work, capacity = lengths(4, 1500, 3), np.array([4.0, 6.0, 5.0])
    with monkeypatch.context() as patch:
        patch.setattr(methods, "JOBS_PER_PLACE", 10**9)
        expected = queues.match(work, capacity)
    monkeypatch.setattr(queues, "MAX_ROUNDS", 0)
    monkeypatch.setattr(methods, "JOBS_PER_PLACE", 1)
    with methods.fallbacks_listed() as fallbacks:
        found = queues.match(work, capacity)
    assert len(fallbacks) == 1 and "then best of several matchings" in fallbacks[0]
    assert found.total <= expected.total * (1 + 1e-9)


@pytest.mark.slow
def test_the_large_method_agrees_with_the_hungarian_one(monkeypatch):
    """The same total where both can be used."""
    work, capacity = lengths(5, 600, 3), np.array([40.0, 60.0, 20.0])
    exact = queues.match(work, capacity)
    monkeypatch.setattr(methods, "HUNGARIAN", 0)
    assert queues.match(work, capacity).total == pytest.approx(exact.total, rel=1e-9)


def test_very_long_queues_are_matched_with_a_bound_that_holds(monkeypatch):
    """Two hundred jobs on four GPUs, by the method for thousands."""
    work, capacity = lengths(8, 200, 2), np.array([1.0, 3.0])
    exact = queues.match(work, capacity)
    monkeypatch.setattr(methods, "HUNGARIAN", 0)
    found = queues.match(work, capacity)
    assert found.bound <= exact.total * (1 + 1e-9)
    assert exact.total <= found.total * (1 + 1e-9)
    assert found.total <= 1.2 * exact.total


def alike(seed, jobs, types):
    """All as long as each other on the type that suits them best, an hour."""
    draw = np.random.default_rng(seed)
    work = 3600.0 * np.exp(np.abs(draw.normal(0.0, 0.8, (jobs, types))))
    work[draw.random(work.shape) < 0.1] = np.inf
    work[np.arange(jobs), draw.integers(0, types, jobs)] = 3600.0
    return work


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_on_long_queues_of_jobs_of_one_length_is_near_and_holds(monkeypatch, seed):
    """Any job may be anywhere in a queue, so that its best place is far from the present one."""
    work, capacity = alike(seed, 300, 3), np.array([2.0, 1.0, 3.0])
    exact = queues.match(work, capacity)
    monkeypatch.setattr(methods, "HUNGARIAN", 0)
    found = queues.match(work, capacity)
    assert found.bound <= exact.total * (1 + 1e-9)
    assert exact.total <= found.total * (1 + 1e-9)
    assert found.total <= 1.1 * found.bound


@pytest.mark.slow
@pytest.mark.parametrize("contention", [0.5, 2.0, 8.0])
def test_allox_closes_the_gap_on_families_of_single_gpus(contention):
    """The policy's own gap, over the mean with the time waited."""
    answer = solve("allox", instance(random_problem(2, 2000, 5, gangs=(1,), contention=contention)))
    assert answer.status == "optimal"
    assert answer.gap <= 1e-9
