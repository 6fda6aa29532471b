"""Gandiva: pairs of jobs by trial and error, equal time for all (Xiao et al., OSDI 2018).

Where all gangs fit, every job gets equal time on every type (as in ``isolated``). Where they do not,
jobs of equal gangs are paired at random; a pair that does less together than alone (sum over its two
jobs of shared / own throughput below 1, over the types as the cluster is made up) is dropped again; and
all units, pairs and jobs left alone, get equal time on every type, however fast each is there:

    X_uj = capacity_j / (U gpus_u), scaled down to sum_j X_uj <= 1,   u = 1 .. U.

On a type where a pair does not pay, its two jobs take turns. The pairing is drawn from a fixed seed and
the problem's order, so the same problem has the same answer; nothing is optimised.
Objective: the least level, as in max-min fairness.
"""

import random

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.max_min_fairness import objective
from ballast_policies.allocation.policy import Answer

__all__ = ["objective", "solve"]

SEED = 0


def solve(instance: Instance) -> Answer:
    """Equal time for randomly paired jobs."""
    runs = [int(m) for m in np.flatnonzero(instance.runnable)]
    partners: dict[int, int] = {}
    if instance.gpus[runs].sum() > instance.capacity.sum():
        partners = _pair_up(instance, runs)
    units = [m for m in runs if partners.get(m, m) >= m]
    columns, x = instance.columns, np.zeros(len(instance.columns))
    of_pair = {
        (int(a), int(b), int(j)): c
        for c, (a, b, j) in enumerate(zip(columns.first, columns.second, columns.kind, strict=True))
    }
    for m in units:
        share = instance.capacity / (len(units) * instance.gpus[m])
        share = share / max(1.0, share.sum())
        other = partners.get(m)
        for j, fraction in enumerate(share):
            if other is None:
                _add(x, of_pair, (m, -1, j), fraction)
                continue
            shared = of_pair.get((m, other, j), of_pair.get((other, m, j)))
            if shared is not None:
                x[shared] += fraction
            else:
                _add(x, of_pair, (m, -1, j), fraction / 2)
                _add(x, of_pair, (other, -1, j), fraction / 2)
    return Answer(x=instance.feasible(x), solver="random pairs", status="heuristic")


def _add(x: np.ndarray, place: dict[tuple[int, int, int], int], key: tuple[int, int, int], by: float) -> None:
    if key in place:
        x[place[key]] += by


def _pair_up(instance: Instance, runs: list[int]) -> dict[int, int]:
    """Partner of each job that has one: as many random draws as there are jobs."""
    draw = random.Random(SEED)
    gain = _gains(instance)
    free, partners = list(runs), {}
    for _ in range(len(runs)):
        if len(free) < 2:
            break
        a, b = sorted(draw.sample(free, 2))
        if instance.gpus[a] != instance.gpus[b]:
            continue
        free.remove(a)
        free.remove(b)
        if gain.get((a, b), 0.0) >= 1.0:
            partners[a], partners[b] = b, a
    return partners


def _gains(instance: Instance) -> dict[tuple[int, int], float]:
    """Sum of relative speeds of each pair, over the types as the cluster is made up."""
    row = {name: m for m, name in enumerate(instance.names)}
    part = instance.capacity / max(1.0, instance.capacity.sum())
    gains = {}
    for pair in instance.pairs:
        a, b = row[pair.jobs[0]], row[pair.jobs[1]]
        total = 0.0
        for j, gpu_type in enumerate(instance.gpu_types):
            first, second = pair.throughput.get(gpu_type, (0.0, 0.0))
            if instance.T[a, j] > 0 and instance.T[b, j] > 0:
                total += part[j] * (first / instance.T[a, j] + second / instance.T[b, j])
        gains[min(a, b), max(a, b)] = total
    return gains
