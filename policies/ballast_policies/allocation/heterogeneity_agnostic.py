"""The heterogeneity-agnostic baselines: instances and shares of a scheduler that ignores GPU types.

It takes each type for as fast as the job's fastest one (so no type need have a special name). Then
only a job's total time matters to it, and which types make it up is a tie in all of its objectives.
The tie is resolved without knowledge of the types, too: time is spread over them as the cluster is made
up, as far as capacities and the types a job cannot use allow.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.instance import Instance

FITTING_ROUNDS = 200


def agnostic_view(real: Instance) -> Instance:
    """The instance as the heterogeneity-agnostic scheduler sees it; columns stay in place.

    Pairs keep the slowdown by sharing of each of the two on that type, relative to running alone.
    """
    fastest, columns = real.fastest, real.columns
    T = np.where(real.T > 0, fastest[:, None], 0.0)
    total = real.capacity.sum()

    def agnostic(rate: np.ndarray, job: np.ndarray) -> np.ndarray:
        alone = real.T[job, columns.kind]
        relative: np.ndarray = np.divide(rate, alone, out=np.zeros_like(rate), where=alone > 0) * fastest[job]
        return relative

    return dataclasses.replace(
        real,
        T=T,
        equal=T @ (real.capacity / total) if total > 0 else np.zeros(len(T)),
        columns=dataclasses.replace(
            columns,
            rate_first=agnostic(columns.rate_first, columns.first),
            rate_second=agnostic(columns.rate_second, columns.second),
        ),
    )


def spread_over_types(instance: Instance, x: np.ndarray) -> np.ndarray:
    """``x`` with each job's time alone spread over its types in proportion to their GPUs, where that fits.

    Iterative proportional fitting to each job's time and each type's limit; the violation that remains
    after the last round is removed by mixing with ``x``, which is feasible. Each job's total time
    alone and all pairs are unchanged.
    """
    columns, capacity = instance.columns, instance.capacity
    alone = columns.second < 0
    time = np.zeros(len(instance.gpus))
    np.add.at(time, columns.first[alone], x[alone])
    shared = np.where(alone, 0.0, x)
    limit = np.maximum(capacity - instance.gpus_used(shared), 0.0)
    X = np.where(instance.T > 0, capacity, 0.0)
    total = X.sum(axis=1, keepdims=True)
    X = np.divide(X, total, out=np.zeros_like(X), where=total > 0) * time[:, None]
    for _ in range(FITTING_ROUNDS):
        used = instance.gpus @ X
        if (used <= limit * (1 + 1e-12)).all():
            break
        X = X * np.minimum(1.0, np.divide(limit, used, out=np.ones_like(used), where=used > 0))
        kept = X.sum(axis=1)
        X = X * np.divide(time, kept, out=np.zeros_like(time), where=kept > 0)[:, None]
    even = np.where(alone, X[columns.first, columns.kind], 0.0) + shared
    return mix(instance, even, x)


def mix(instance: Instance, wanted: np.ndarray, feasible: np.ndarray) -> np.ndarray:
    """As much of ``wanted`` as the capacities allow, the rest from ``feasible``."""
    over, held = instance.gpus_used(wanted), instance.gpus_used(feasible)
    excess = over - instance.capacity
    tight = excess > 0
    part = ((instance.capacity - held)[tight] / (over - held)[tight]).min() if tight.any() else 1.0
    part = float(np.clip(part, 0.0, 1.0))
    return instance.feasible(part * wanted + (1 - part) * feasible)
