"""Isolated shares (dissertation section 5.4.1): every job gets 1/n of every type, and keeps it.

    X_mj = capacity_j / (n gpus_m), scaled down to sum_j X_mj <= 1; 0 where job m cannot run on type j.

An elastic job makes the best of its 1/n, in any of its configurations (``own_share``).
The baseline of sharing incentive and of finish-time fairness; nothing is optimised.
Objective: the least level, as in max-min fairness.
"""

import dataclasses

import numpy as np

from ballast_policies.accounting import equal_share
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.own_share import own_share
from ballast_policies.allocation.policies.max_min_fairness import objective
from ballast_policies.allocation.policy import Answer

__all__ = ["isolated_shares", "objective", "solve"]


def isolated_shares(instance: Instance) -> np.ndarray:
    """X_isolated (n, k), before types that a job cannot use are taken out."""
    share = equal_share(
        instance.gpus.astype(float),
        jobs=max(1, len(instance.gpus)),
        total_gpus=float(instance.capacity.sum()),
    )
    shares: np.ndarray = instance.capacity[None, :] * share[:, None]
    return shares


def solve(instance: Instance) -> Answer:
    """The isolated shares."""
    answer = on_own_columns(instance, isolated_shares(instance))
    of_elastic = np.flatnonzero(instance.elastic[instance.columns.first])
    if not len(of_elastic):
        return answer
    x = answer.x.copy()
    columns = instance.columns.take(of_elastic)
    x[of_elastic] = own_share(columns, instance.capacity, len(instance.gpus))
    return dataclasses.replace(answer, x=instance.feasible(x))


def on_own_columns(instance: Instance, X: np.ndarray) -> Answer:
    """Shares X (n, k) as an answer, each job alone, only where it can run."""
    columns = instance.columns
    gang = (columns.second < 0) & ~instance.elastic[columns.first]
    x = np.where(gang, X[columns.first, columns.kind], 0.0)
    return Answer(x=instance.feasible(x), solver="closed form", status="closed form")
