"""Costs of running, and the time that the same progress would have taken on isolated shares.

The operator books one job at a time, the simulator arrays of jobs: every function takes either.
"""

from typing import TypeVar

import numpy as np

Number = TypeVar("Number", float, np.ndarray)

SECONDS_PER_HOUR = 3600.0


def cost(gpu_seconds: Number, price_per_gpu_hour: Number) -> Number:
    """USD for ``gpu_seconds`` (GPUs x seconds) at ``price_per_gpu_hour`` (USD per GPU and hour)."""
    paid: Number = gpu_seconds * price_per_gpu_hour / SECONDS_PER_HOUR
    return paid


def price_part(*, shared: bool) -> float:
    """The part of its GPUs' price that a job pays: half while another job is on its GPU, too."""
    return 0.5 if shared else 1.0


def isolated_seconds(steps: Number, isolated_steps_per_second: Number) -> Number:
    """Seconds that ``steps`` would have taken at ``isolated_steps_per_second``, on the job's isolated share.

    The t_isolated of Themis (NSDI'20, section 2), which finish-time fairness divides by.
    """
    seconds: Number = steps / isolated_steps_per_second
    return seconds


LEAST_PART = 1e-15
"""Part of the largest weight that smaller ones count as: a part rounded to none would count as no time."""


def jobs_alike(weight: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Number of jobs of each ``weight`` (m,) that would fill a cluster that jobs of ``weights`` (n,) share.

    Sum of ``weights`` / ``weight``: exactly n where all are equal.
    """
    most = weights.max(initial=0.0)
    alike: np.ndarray = (weights / most).sum() / np.maximum(weight / most, LEAST_PART)
    return alike


def isolated_share(gpus: Number, *, jobs: Number, total_gpus: float) -> Number:
    """C such that a job's isolated share of GPU type j is X_mj = c capacity_j (dissertation section 5.4.1).

    A job owns 1/jobs of every type; a gang of ``gpus`` GPUs can use its part for
    capacity_j / (jobs gpus) of the time, scaled down where that adds up to more than all of the time.

    Args:
        gpus: size of the gang.
        jobs: how many jobs like it would share the cluster, at least 1 (:func:`jobs_alike`).
        total_gpus: GPUs of all types.
    """
    fraction = 1.0 / (jobs * gpus)
    share: Number = fraction / np.maximum(1.0, total_gpus * fraction)
    return share
