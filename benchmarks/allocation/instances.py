"""Clusters for the benchmarks of allocation: many jobs, no two alike, on ten GPU types."""

import dataclasses

import numpy as np
from ballast_policies.allocation.instance import Instance, from_arrays


def cluster(jobs: int, *, seed: int = 0, types: int = 10, contention: float = 10.0) -> Instance:
    """``jobs`` gangs of 1, 2, 4, 8 (70, 10, 15, 5 %) with weights 1 and 5 (80, 20 %), contending for GPUs.

    A job's speed on a type is a power of the type's speed (how well it uses fast GPUs) times noise of 35 %; a
    tenth of the types is of no use to it. GPUs are the gangs' sum over ``contention``, spread unevenly.
    """
    draw = np.random.default_rng(seed)
    speed, size = np.sort(draw.uniform(1, 8, types)), 10 ** draw.uniform(-1, 2, jobs)
    T = size[:, None] * speed ** draw.uniform(0.3, 1.2, (jobs, 1))
    T *= np.exp(0.35 * draw.standard_normal((jobs, types)))
    T[draw.random((jobs, types)) < 0.1] = 0.0
    gpus = draw.choice([1, 2, 4, 8], jobs, p=[0.7, 0.1, 0.15, 0.05])
    capacity = np.maximum(8, np.floor(draw.dirichlet(np.full(types, 5.0)) * gpus.sum() / contention))
    return dataclasses.replace(
        from_arrays(
            gpu_types=tuple(f"type-{j}" for j in range(types)),
            capacity=capacity,
            throughput=T,
            gpus=gpus,
        ),
        weights=draw.choice([1.0, 5.0], jobs, p=[0.8, 0.2]),
    )
