"""From a matrix of time fractions to an Allocation value."""

import time

import numpy as np

from ballast_policies.allocation.problem import Allocation, Problem


def throughput_matrix(problem: Problem) -> np.ndarray:
    """T[m, j]: steps/s of job m's gang on GPU type j; 0 where it cannot run or the gang does not fit."""
    T = np.array(
        [[job.throughput.get(gpu_type, 0.0) for gpu_type in problem.gpu_types] for job in problem.jobs],
        dtype=float,
    ).reshape(len(problem.jobs), len(problem.gpu_types))
    capacity = capacity_vector(problem)
    gangs = np.array([job.gpus for job in problem.jobs], dtype=float)
    T[gangs[:, None] > capacity[None, :]] = 0.0
    return T


def capacity_vector(problem: Problem) -> np.ndarray:
    """GPUs of each type, in the order of ``problem.gpu_types``."""
    return np.array([problem.capacity.get(gpu_type, 0) for gpu_type in problem.gpu_types], dtype=float)


def equal_share_throughput(problem: Problem, T: np.ndarray) -> np.ndarray:
    """Steps/s of each job with the equal share X_equal = capacity / sum(capacity) (dissertation 5.4.1)."""
    capacity = capacity_vector(problem)
    total = capacity.sum()
    share: np.ndarray = T @ (capacity / total) if total > 0 else np.zeros(len(problem.jobs))
    return share


def normalised_rates(problem: Problem, T: np.ndarray) -> np.ndarray:
    """A[m, j] = gpus_m T[m, j] / (weight_m throughput_m(X_equal)): the level that full time on j is worth."""
    share = equal_share_throughput(problem, T)
    gangs = np.array([job.gpus for job in problem.jobs], dtype=float)
    weights = np.array([job.weight for job in problem.jobs], dtype=float)
    scale = np.divide(gangs, weights * share, out=np.zeros_like(share), where=share > 0)
    rates: np.ndarray = T * scale[:, None]
    return rates


def as_allocation(
    problem: Problem,
    X: np.ndarray,
    *,
    policy: str,
    objective: float,
    status: str,
    gap: float | None,
    solver: str,
    started: float,
) -> Allocation:
    """Wrap the fractions X[m, j]; ``started`` is the ``time.perf_counter`` of the solve's begin."""
    T = throughput_matrix(problem)
    X = np.clip(X, 0.0, 1.0)
    speed = (T * X).sum(axis=1)
    levels = (normalised_rates(problem, T) * X).sum(axis=1)
    return Allocation(
        policy=policy,
        objective=objective,
        allocation={
            job.name: {g: float(x) for g, x in zip(problem.gpu_types, row, strict=True)}
            for job, row in zip(problem.jobs, X, strict=True)
        },
        pair_allocation={},
        throughput={job.name: float(v) for job, v in zip(problem.jobs, speed, strict=True)},
        levels={job.name: float(v) for job, v in zip(problem.jobs, levels, strict=True)},
        status=status,
        gap=gap,
        solve_seconds=time.perf_counter() - started,
        solver=solver,
    )
