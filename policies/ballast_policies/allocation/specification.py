"""The policies as programs in cvxpy: what each of them means, and what its faster methods are tested against.

Each is a user's function of a ``ClusterView``, so it can be run as one, on a few hundred jobs:
``ballast allocate --policy ballast_policies.allocation.specification:makespan``. Time and capacity, (5.2) and
(5.3), are given. cvxpy is imported with this module, which nothing of the product imports.
"""

from collections.abc import Callable, Mapping
from typing import Any

import cvxpy as cp
import numpy as np

from ballast_policies.allocation.custom import ClusterView


def max_min_fairness(view: ClusterView) -> Any:
    """The least level, as high as possible."""
    return cp.Maximize(cp.min(view.level))


def water_filling(view: ClusterView) -> Any:
    """A sequence of programs: the least level of all, then that of the jobs that can have more, and so on."""
    limits = [view.shares >= 0, cp.sum(view.shares, axis=1) <= 1, view.gpus @ view.shares <= view.capacity]
    least, rising = np.zeros(len(view.jobs)), np.full(len(view.jobs), True)
    while rising.any():
        kept = [*limits, view.level >= least * (1 - 1e-9)]
        t = cp.Problem(cp.Maximize(cp.min(view.level[rising])), kept).solve(solver=cp.HIGHS)
        least[rising] = t
        kept = [*limits, view.level >= least * (1 - 1e-9)]
        for m in np.flatnonzero(rising):
            most = cp.Problem(cp.Maximize(view.level[m]), kept).solve(solver=cp.HIGHS)
            rising[m] = most > t * (1 + 1e-6)
    return cp.Maximize(cp.min(view.level)), [view.level >= least * (1 - 1e-8)]


def finish_time_fairness(view: ClusterView) -> Any:
    """The largest finish time, relative to that on an isolated share, as small as possible."""
    isolated = np.outer(view.weights / view.weights.sum() / view.gpus, view.capacity)
    speed = (view.speeds * isolated / np.maximum(1, isolated.sum(axis=1, keepdims=True))).sum(axis=1)
    alone = view.isolated_elapsed + view.steps_remaining / speed
    shared = view.elapsed + cp.multiply(view.steps_remaining, cp.inv_pos(view.throughput))
    return cp.Minimize(cp.max(shared / alone))


def makespan(view: ClusterView) -> Any:
    """The last job is done as soon as possible."""
    return cp.Minimize(cp.max(cp.multiply(view.steps_remaining, cp.inv_pos(view.throughput))))


def fifo(view: ClusterView) -> Any:
    """The earliest jobs first, each on its fastest type."""
    arrived = np.argsort(-view.elapsed, kind="stable")
    place = len(view.jobs) - np.argsort(arrived)
    return cp.Maximize(cp.sum(cp.multiply(view.gpus * place / view.speeds.max(axis=1), view.throughput)))


def shortest_job_first(view: ClusterView) -> Any:
    """The shortest job is done as soon as possible; ties, here left open, go to the others by length."""
    shortest = np.argmin(view.steps_remaining / view.speeds.max(axis=1))
    return cp.Minimize(view.steps_remaining[shortest] * cp.inv_pos(view.throughput[shortest]))


def max_throughput(view: ClusterView) -> Any:
    """The most steps per second."""
    return cp.Maximize(cp.sum(view.throughput))


def max_throughput_per_dollar(view: ClusterView) -> Any:
    """The most steps per second, each counted by the price of its GPUs."""
    per_dollar = view.speeds / (view.gpus[:, None] * view.prices)
    return cp.Maximize(cp.sum(cp.multiply(per_dollar, view.shares)))


def min_cost_slo(view: ClusterView) -> Any:
    """The least cost at which all deadlines are kept, where all can be."""
    due = np.isfinite(view.deadlines)
    usd = view.prices * view.gpus[due, None] * view.deadlines[due, None] / 3600
    kept = view.throughput[due] >= (view.steps_remaining / view.deadlines)[due]
    return cp.Minimize(cp.sum(cp.multiply(usd, view.shares[due]))), [kept]


def max_min_fairness_per_dollar(view: ClusterView) -> Any:
    """The least worth of what a job gets, its steps at their cheapest, as high as possible."""
    hourly = view.gpus[:, None] * view.prices
    rates = np.where(view.speeds > 0, view.speeds, np.nan)
    usd_per_step = np.nanmin(hourly / rates, axis=1)
    return cp.Maximize(cp.min(cp.multiply(usd_per_step / view.weights, view.throughput)))


def fair_shares(view: ClusterView) -> Any:
    """First program of ``strategy-proof``; each job then gives up the part that it takes from the others."""
    relative = cp.multiply(1 / view.speeds.max(axis=1), view.throughput)
    return cp.Maximize(cp.sum(cp.multiply(view.weights, cp.log(relative))))


def isolated(view: ClusterView) -> Any:
    """Of every type each job's part by weight: shares, and no program."""
    share = np.outer(view.weights / view.weights.sum() / view.gpus, view.capacity)
    return share / np.maximum(1, share.sum(axis=1, keepdims=True)) * (view.speeds > 0)


def proportional(view: ClusterView) -> Any:
    """The same mix of types for all, as much as fits: shares, and no program."""
    wanted = max(1, (view.gpus[:, None] * (view.speeds > 0)).sum(axis=0).max() / view.capacity.sum())
    return view.capacity / view.capacity.sum() / wanted * (view.speeds > 0)


SPECIFICATIONS: Mapping[str, Callable[[ClusterView], Any]] = {
    "max-min-fairness": max_min_fairness,
    "water-filling": water_filling,
    "finish-time-fairness": finish_time_fairness,
    "makespan": makespan,
    "fifo": fifo,
    "shortest-job-first": shortest_job_first,
    "max-throughput": max_throughput,
    "max-throughput-per-dollar": max_throughput_per_dollar,
    "min-cost-slo": min_cost_slo,
    "max-min-fairness-per-dollar": max_min_fairness_per_dollar,
    "strategy-proof": fair_shares,
    "isolated": isolated,
    "proportional": proportional,
}
"""By the name of the policy."""
