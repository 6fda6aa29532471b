"""Two gangs take turns on a pool, and all other jobs are indifferent between the pools without a price."""

import numpy as np
import pytest
from ballast_policies.allocation.instance import from_arrays
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers.boxstep.open_jobs import OpenJobs


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

    monkeypatch.setattr(OpenJobs, "break_ties", broken)
    instance = filled_by_two_gangs(3000, seed=seed)
    answer = solve("makespan", instance)
    assert answer.objective == pytest.approx(1e4)
    assert answer.gap <= 1e-8
    assert (instance.gpus_used(answer.x) <= instance.capacity * (1 + 1e-9)).all()
    assert (instance.time_used(answer.x) <= 1 + 1e-9).all()
