"""The policies as programs in cvxpy: what each of them means, and what its faster methods are tested against.

Each is a user's function of a ``ClusterView``, so it can be run as one, on a few hundred jobs:
``ballast allocate --policy ballast_policies.allocation.specification:makespan``. Time and capacity, (5.2) and
(5.3), are given. cvxpy is imported with this module, which nothing of the product imports.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cvxpy as cp
import numpy as np

from ballast_policies.allocation.custom import ClusterView
from ballast_policies.elastic.completion_time import BASE, EFFICIENCY


def max_min_fairness(view: ClusterView) -> Any:
    """The least level, as high as possible."""
    return cp.Maximize(cp.min(view.level))


def water_filling(view: ClusterView) -> Any:
    """A sequence of programs: the least level of all, then that of the jobs that can have more, and so on."""
    return _filled(view, lambda rising: view.weights, [])


def hierarchical(view: ClusterView) -> Any:
    """The same, with a team's weight, here 1, divided in each program among those of its jobs that rise."""
    teams = np.array([team or f"job {m}" for m, team in enumerate(view.teams)])
    whole = np.array([1.0 if team else weight for team, weight in zip(view.teams, view.weights, strict=True)])

    def divided(rising: np.ndarray) -> Any:
        together = [view.weights[rising & (teams == team)].sum() for team in teams]
        return whole * view.weights / np.maximum(together, 1e-300)

    return _filled(view, divided, [])


def min_cost(view: ClusterView) -> Any:
    """Each job where its steps are cheapest, and the time there by water filling."""
    per_step = _usd_per_step(view)
    dear = per_step > np.min(per_step, axis=1, keepdims=True) * (1 + 1e-9)
    return _filled(view, lambda rising: view.weights, [view.shares[dear] == 0] if dear.any() else [])


def _filled(view: ClusterView, weights: Callable[[np.ndarray], np.ndarray], also: Sequence[Any]) -> Any:
    """Levels that rise together, by ``weights`` of the jobs that can still rise, until none can."""
    limits = [view.shares >= 0, cp.sum(view.shares, axis=1) <= 1, view.gpus @ view.shares <= view.capacity]
    limits += also
    volume = cp.multiply(view.weights, view.level)
    filled, rising = np.zeros(len(view.jobs)), np.full(len(view.jobs), True)
    while rising.any():
        more, t = rising * weights(rising), cp.Variable()
        rise = [*limits, volume >= filled * (1 - 1e-9) + more * t]
        filled = filled + more * cp.Problem(cp.Maximize(t), rise).solve(solver=cp.HIGHS)
        kept = [*limits, volume >= filled * (1 - 1e-9)]
        for m in np.flatnonzero(rising):
            most = cp.Problem(cp.Maximize(volume[m]), kept).solve(solver=cp.HIGHS)
            rising[m] = most > filled[m] * (1 + 1e-6)
    return cp.Maximize(cp.min(view.level)), [*also, volume >= filled * (1 - 1e-8)]


def _seconds(view: ClusterView) -> Any:
    """(n, k) to the end of each job; infinite where it cannot run."""
    rates = np.where(view.speeds > 0, view.speeds, np.nan)
    return np.nan_to_num(view.steps_remaining[:, None] / rates, nan=np.inf)


def _usd_per_step(view: ClusterView) -> Any:
    """(n, k) where a job runs on a type alone; infinite where it cannot run."""
    return _seconds(view) / view.steps_remaining[:, None] * view.gpus[:, None] * view.prices / 3600


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


def makespan_within_budget(view: ClusterView) -> Any:
    """The same, where the steps of a job and of all cost at most their budgets, or their least."""
    least = view.steps_remaining * _usd_per_step(view).min(axis=1)
    budgets, budget = np.maximum(view.budgets, least), max(view.budget, least.sum())
    alone = view.steps_remaining / view.speeds.max(axis=1)
    usd = alone.sum() * cp.sum(cp.multiply(view.gpus[:, None] * view.prices / 3600, view.shares), axis=1)
    # Of the seconds alone of all jobs, the makespan is 1 / rate; budgets that are infinite limit nothing.
    rate, parts = cp.Variable(), alone / alone.sum()
    kept = [cp.multiply(1 / view.speeds.max(axis=1), view.throughput) >= parts * rate]
    kept += [cp.multiply(1 / budgets, usd) <= rate, cp.sum(usd) / budget <= rate]
    return cp.Minimize(alone.sum() * cp.inv_pos(rate)), kept


def fifo(view: ClusterView) -> Any:
    """The earliest jobs first, each on its fastest type."""
    arrived = np.argsort(-view.elapsed, kind="stable")
    place = len(view.jobs) - np.argsort(arrived)
    return cp.Maximize(cp.sum(cp.multiply(view.gpus * place / view.speeds.max(axis=1), view.throughput)))


def shortest_job_first(view: ClusterView) -> Any:
    """The shortest job is done as soon as possible; ties, here left open, go to the others by length."""
    shortest = np.argmin(view.steps_remaining / view.speeds.max(axis=1))
    return cp.Minimize(view.steps_remaining[shortest] * cp.inv_pos(view.throughput[shortest]))


def allox(view: ClusterView) -> Any:
    """Jobs at places of the types' queues, of least mean completion time; those at the heads run.

    A gang of g GPUs counts as g times the work.
    """
    n, seconds = len(view.jobs), _seconds(view)
    queue, place = np.divmod(np.arange(len(view.capacity) * n), n)
    # From the end of a queue on c GPUs: the last c jobs delay themselves, the c before them one more, ...
    delayed = place // np.maximum(1, np.floor(view.capacity[queue])) + 1
    cost = view.gpus[:, None] * seconds[:, queue] * delayed
    at = cp.Variable(cost.shape, nonneg=True)
    places = [cp.sum(at, axis=1) == 1, cp.sum(at, axis=0) <= (view.capacity[queue] >= 1)]
    never = ~np.isfinite(cost)
    places += [at[never] == 0] if never.any() else []
    total = cp.sum(cp.multiply(np.where(never, 0.0, cost), at)) + view.elapsed.sum()
    return cp.Minimize(total / n), places


def completion_time(view: ClusterView) -> Any:
    """Whole jobs, on one type each, by what their progress is worth by rank of the times left (heSRPT)."""
    copies = np.floor(view.capacity) / view.gpus[:, None]
    unit = view.speeds.max(axis=1) ** (1 - EFFICIENCY) * (view.speeds * copies).sum(axis=1) ** EFFICIENCY
    longest = np.argsort(-view.steps_remaining / unit / view.weights, kind="stable")
    above, power = np.cumsum(view.weights[longest]), 1 / (1 - BASE.exponent)
    worth = (above**power - (above - view.weights[longest]) ** power) ** (1 / power)
    runs = cp.Variable(view.shares.shape, boolean=True)
    return cp.Maximize((worth / unit[longest]) @ view.throughput[longest]), [view.shares == runs]


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
    worth = 3600 * _usd_per_step(view).min(axis=1) / view.weights
    return cp.Maximize(cp.min(cp.multiply(worth, view.throughput)))


def fair_shares(view: ClusterView) -> Any:
    """First program of ``strategy-proof``; each job then gives up the part that it takes from the others."""
    relative = cp.multiply(1 / view.speeds.max(axis=1), view.throughput)
    return cp.Maximize(cp.sum(cp.multiply(view.weights, cp.log(relative))))


def isolated(view: ClusterView) -> Any:
    """Share of every type by each job's weight, without a program."""
    share = np.outer(view.weights / view.weights.sum() / view.gpus, view.capacity)
    return share / np.maximum(1, share.sum(axis=1, keepdims=True)) * (view.speeds > 0)


def proportional(view: ClusterView) -> Any:
    """The same mix of types for all, as much as fits: shares, and no program."""
    wanted = max(1, (view.gpus[:, None] * (view.speeds > 0)).sum(axis=0).max() / view.capacity.sum())
    return view.capacity / view.capacity.sum() / wanted * (view.speeds > 0)


SPECIFICATIONS: Mapping[str, Callable[[ClusterView], Any]] = {
    "max-min-fairness": max_min_fairness,
    "water-filling": water_filling,
    "hierarchical": hierarchical,
    "finish-time-fairness": finish_time_fairness,
    "makespan": makespan,
    "makespan-within-budget": makespan_within_budget,
    "fifo": fifo,
    "shortest-job-first": shortest_job_first,
    "allox": allox,
    "completion-time": completion_time,
    "max-throughput": max_throughput,
    "max-throughput-per-dollar": max_throughput_per_dollar,
    "min-cost": min_cost,
    "min-cost-slo": min_cost_slo,
    "max-min-fairness-per-dollar": max_min_fairness_per_dollar,
    "strategy-proof": fair_shares,
    "isolated": isolated,
    "proportional": proportional,
}
"""Name of a policy -> its program."""
