"""Max-min fairness is what the dissertation's section 5.4.1 says, solved exactly."""

import cvxpy as cp
import numpy as np
import pytest
from ballast_policies.allocation.greedy import greedy
from ballast_policies.allocation.problem import Job, ProblemError
from ballast_policies.allocation.registry import allocate
from hypothesis import given

from tests.policies.allocation.problems import problem, problems
from tests.support.examples import examples


def test_equation_5_4_1_the_dissertations_example_gives_8_11():
    """Throughputs [[40, 10], [12, 4], [100, 50]], one GPU of each type, equal-share normalisation."""
    answer = allocate("max-min-fairness", problem([[40, 10], [12, 4], [100, 50]], [1, 1]))
    assert answer.objective == pytest.approx(8 / 11, abs=1e-9)
    assert answer.levels == pytest.approx({"job-0": 8 / 11, "job-1": 8 / 11, "job-2": 8 / 11}, abs=1e-9)
    assert answer.gap <= 1e-9


def by_hand(p):
    """The same LP written independently, in cvxpy, straight from the text."""
    capacity = np.array([p.capacity[g] for g in p.gpu_types], dtype=float)
    T = np.array([[job.throughput[g] for g in p.gpu_types] for job in p.jobs])
    for m, job in enumerate(p.jobs):
        T[m, capacity < job.gpus] = 0
    if capacity.sum() == 0:
        return 0.0
    equal = T @ (capacity / capacity.sum())
    runs = equal > 0
    if not runs.any():
        return 0.0
    X = cp.Variable(T.shape, nonneg=True)
    gpus = np.array([job.gpus for job in p.jobs])
    weights = np.array([job.weight for job in p.jobs])
    scale = gpus[runs] / (weights[runs] * equal[runs])
    level = cp.multiply(scale, cp.sum(cp.multiply(T[runs], X[np.flatnonzero(runs), :]), axis=1))
    rules = (
        [cp.sum(X, axis=1) <= 1, gpus @ X <= capacity, X[T == 0] == 0]
        if (T == 0).any()
        else [
            cp.sum(X, axis=1) <= 1,
            gpus @ X <= capacity,
        ]
    )
    return float(cp.Problem(cp.Maximize(cp.min(level)), rules).solve(solver=cp.CLARABEL))


@pytest.mark.slow
@examples(60)
@given(p=problems())
def test_the_objective_equals_an_independent_formulation(p):
    """To 1e-6 relative on random instances, with gangs, weights, and types a job cannot use."""
    assert allocate("max-min-fairness", p).objective == pytest.approx(by_hand(p), rel=1e-6, abs=1e-7)


@examples(60)
@given(p=problems())
def test_the_certified_gap_is_closed_and_greedy_is_never_above_the_optimum(p):
    """The bound comes from weak duality, so a wrong optimum could not hide."""
    best = allocate("max-min-fairness", p)
    assert best.gap <= 1e-6
    assert greedy(p).objective <= best.objective * (1 + 1e-6) + 1e-9


def test_sharing_incentive_no_job_is_worse_off_than_with_its_share_of_every_type():
    """With as many GPUs as jobs over all types, each job reaches at least its isolated share's throughput."""
    random = np.random.default_rng(1)
    for _ in range(20):
        n, k = 6, 3
        T = random.uniform(1, 10, (n, k))
        p = problem(T, [2, 1, 1])
        answer = allocate("max-min-fairness", p)
        isolated = T @ (np.array([2, 1, 1]) / n)
        speeds = np.array([answer.throughput[f"job-{m}"] for m in range(n)])
        assert (speeds >= isolated * (1 - 1e-7)).all()


def test_heterogeneity_agnostic_gives_no_job_more_than_aware_at_the_minimum():
    """The agnostic baseline is a feasible answer to the same question, so its least level is no higher."""
    p = problem([[40, 10], [12, 4], [100, 50]], [1, 1])
    aware, agnostic = allocate("max-min-fairness", p), allocate("max-min-fairness", p, agnostic=True)
    assert min(agnostic.levels.values()) <= aware.objective + 1e-9


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"gpus": 0}, r"jobs\[a\].gpus"),
        ({"weight": 0.0}, r"jobs\[a\].weight"),
        ({"weight": float("nan")}, r"jobs\[a\].weight"),
        ({"throughput": {"v100": -1.0}}, r"jobs\[a\].throughput.v100"),
        ({"steps_remaining": -5.0}, r"jobs\[a\].steps_remaining"),
    ],
)
def test_an_impossible_job_is_refused_with_its_field(changes, want):
    """Field, value, reason."""
    with pytest.raises(ProblemError, match=want):
        Job(**({"name": "a", "throughput": {"v100": 1.0}} | changes))
