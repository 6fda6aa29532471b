"""A solution's prices start the next one: as exact as from nothing, whatever they are."""

import dataclasses
import pickle

import numpy as np
import pytest
from ballast_policies.allocation.instance import from_arrays
from ballast_policies.allocation.problem import Job, Problem, WarmStart
from ballast_policies.allocation.registry import allocate, solve

from tests.policies.allocation.solvers.test_boxstep import cluster
from tests.support.examples import first_fast

pytestmark = pytest.mark.slow


def of_jobs(problem, rows):
    """The same cluster with the jobs ``rows`` only."""
    return from_arrays(
        gpu_types=problem.gpu_types,
        capacity=problem.capacity,
        throughput=problem.T[rows],
        gpus=problem.gpus[rows],
        weights=problem.weights[rows],
        steps_remaining=problem.steps_remaining[rows],
    )


@pytest.mark.parametrize("policy", ["max-min-fairness", "makespan", "finish-time-fairness"])
@pytest.mark.parametrize("change", first_fast(["arrival", "departure", "a hundred departures"]))
def test_after_a_change_the_old_prices_lead_to_the_same_optimum(policy, change):
    """Objective and certified gap are those of a solution from nothing."""
    everyone = cluster(8, jobs=1202, contention=6.0)
    before, after = np.arange(1201), np.arange(1202)
    if change != "arrival":
        after = np.delete(before, [17] if change == "departure" else np.arange(100))
    start = solve(policy, of_jobs(everyone, before)).start
    assert start is not None
    changed = of_jobs(everyone, after)
    warm, cold = solve(policy, changed, start=start), solve(policy, changed)
    assert warm.objective == pytest.approx(cold.objective, rel=1e-7)
    assert warm.gap <= 1e-6
    assert (changed.gpus_used(warm.x) <= changed.capacity * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    "start",
    [
        WarmStart(prices=(1.0, 100.0, 1e-3, 0.0, 1.0, 1.0), t=1e-3),
        WarmStart(prices=(0.0,) * 6, t=1e6),
        WarmStart(prices=(1.0,) * 5, t=0.1),
    ],
    ids=["wrong prices", "no prices", "of another cluster"],
)
def test_a_wrong_start_costs_time_not_exactness(start):
    """Also where the types are no longer as many."""
    problem = cluster(9, jobs=1100, contention=6.0)
    warm, cold = solve("max-min-fairness", problem, start=start), solve("max-min-fairness", problem)
    assert warm.objective == pytest.approx(cold.objective, rel=1e-7)
    assert warm.gap <= 1e-6


def test_an_allocation_that_went_through_a_pipe_starts_the_next():
    """The state is in the Allocation, and a pickle of it is as good."""
    arrays = cluster(10, jobs=1101, contention=6.0)
    jobs = tuple(
        Job(
            name=f"job-{m}",
            throughput=dict(zip(arrays.gpu_types, row, strict=True)),
            gpus=int(arrays.gpus[m]),
            weight=float(arrays.weights[m]),
        )
        for m, row in enumerate(arrays.T.tolist())
    )
    capacity = {name: int(gpus) for name, gpus in zip(arrays.gpu_types, arrays.capacity, strict=True)}
    before = Problem(gpu_types=arrays.gpu_types, capacity=capacity, jobs=jobs[:-1])
    warm = pickle.loads(pickle.dumps(allocate("max-min-fairness", before)))
    after = dataclasses.replace(before, jobs=jobs)
    found, cold = allocate("max-min-fairness", after, warm=warm), allocate("max-min-fairness", after)
    assert found.objective == pytest.approx(cold.objective, rel=1e-9)
    assert found.status == "optimal"
