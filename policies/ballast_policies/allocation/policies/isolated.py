"""Isolated shares (dissertation section 5.4.1): every job gets its part of every type, and keeps it.

    X_mj = (w_m / sum(w)) capacity_j / gpus_m, scaled down to sum_j X_mj <= 1; 0 where it cannot run.

With equal weights a part is 1/n. An elastic job makes the best of its own (``own_share``).
The baseline of sharing incentive and of finish-time fairness; nothing is optimised.
Objective: the least level, as in max-min fairness.
"""

import dataclasses

import numpy as np

from ballast_policies.accounting import isolated_share, jobs_alike
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.own_share import own_share
from ballast_policies.allocation.policies.max_min_fairness import objective
from ballast_policies.allocation.policy import Answer

__all__ = ["isolated_shares", "isolated_speeds", "objective", "solve"]


def isolated_shares(instance: Instance) -> np.ndarray:
    """X_isolated (n, k), before types that a job cannot use are taken out."""
    share = isolated_share(
        instance.gpus.astype(float), jobs=_alike(instance), total_gpus=float(instance.capacity.sum())
    )
    shares: np.ndarray = instance.capacity[None, :] * share[:, None]
    return shares


def isolated_speeds(instance: Instance) -> np.ndarray:
    """(n,) steps/s of each job on its isolated share."""
    speeds: np.ndarray = (instance.T * isolated_shares(instance)).sum(axis=1)
    if not instance.elastic.any():
        return speeds
    if (instance.weights == instance.weights[0]).all():
        return np.where(instance.elastic, instance.equal, speeds)
    x, columns = _of_elastic(instance), instance.columns
    return speeds + np.bincount(columns.first, weights=columns.rate_first * x, minlength=len(speeds))


def solve(instance: Instance) -> Answer:
    """The isolated shares."""
    answer = on_own_columns(instance, isolated_shares(instance))
    if not instance.elastic.any():
        return answer
    return dataclasses.replace(answer, x=instance.feasible(answer.x + _of_elastic(instance)))


def on_own_columns(instance: Instance, X: np.ndarray) -> Answer:
    """Shares X (n, k) as an answer, each job alone, only where it can run."""
    columns = instance.columns
    gang = (columns.second < 0) & ~instance.elastic[columns.first]
    x = np.where(gang, X[columns.first, columns.kind], 0.0)
    return Answer(x=instance.feasible(x), solver="closed form", status="closed form")


def _alike(instance: Instance) -> np.ndarray:
    return jobs_alike(instance.weights, instance.weights)


def _of_elastic(instance: Instance) -> np.ndarray:
    """(columns,) what each elastic job makes of its part; 0 in columns of gangs."""
    x = np.zeros(len(instance.columns))
    which = np.flatnonzero(instance.elastic[instance.columns.first])
    x[which] = own_share(instance.columns.take(which), instance.capacity, _alike(instance))
    return x
