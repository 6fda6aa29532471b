"""With very many pairs, columns come in as they are wanted; it must agree with the whole program."""

import itertools

import numpy as np
import pytest
from ballast_policies.allocation.instance import from_arrays
from ballast_policies.allocation.problem import Pair
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import linear, methods

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
    return from_arrays(
        gpu_types=NAMES,
        capacity=np.full(3, np.ceil(jobs / 3 / contention)),
        throughput=T,
        gpus=np.ones(jobs),
        weights=draw.choice([1.0, 5.0], jobs),
        pairs=tuple(pairs),
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
    assert (problem.time_used(found.x) <= 1 + 1e-9).all()
    assert (problem.gpus_used(found.x) <= problem.capacity * (1 + 1e-9)).all()


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
