"""Gavel's fairness and makespan policies as its solvers answer them.

Where the middle of the optimal shares is asked for (``interior``), jobs of one type and weight are one
group of the LP: by symmetry the middle gives them equal shares.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from ballast_policies.allocation.columns import Columns
from ballast_policies.allocation.problem import Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.simulator.ledger import Ledger

from ballast_lab.gavel.linear import alone, solve

TIGHT = 1e-6
"""Part by which less than the optimum is asked for, so that there is an inside."""

SEARCH = (100.0, 1e6, 1.05)
"""Gavel's bisection of the makespan: from, to (s), and the ratio at which it stops."""


def least_attained_service(ledger: Ledger, rows: np.ndarray, *, agnostic: bool, interior: bool) -> np.ndarray:
    """Max-min fairness: (n, k) shares; ``agnostic``: as if all types that a job can use were alike."""
    rates, gpus, weights = ledger.rate[rows], ledger.gpus[rows], ledger.weight[rows]
    if agnostic:
        rates = np.where(rates > 0, 1.0, 0.0)
    group_of, one = np.arange(len(rows)), np.arange(len(rows))
    if interior:
        key = np.column_stack([rates, gpus, weights])
        _, one, group_of = np.unique(key, axis=0, return_index=True, return_inverse=True)
        group_of = group_of.ravel()
    size = np.bincount(group_of)
    slope = weights[one] * (rates[one] @ (ledger.capacity / ledger.capacity.sum())) / gpus[one]
    ways = alone(rates[one], gpus[one], by_name(ledger))
    base = np.zeros(len(one))
    x = solve(ways, size=size, capacity=ledger.capacity, base=base, slope=slope, interior=interior)
    shares = np.zeros_like(rates[one])
    shares[ways.first, ways.kind] = x
    each: np.ndarray = (shares / size[:, None])[group_of]
    return each


def by_name(ledger: Ledger) -> np.ndarray:
    """(k,) columns in the order of the types' names, which is Gavel's order."""
    return np.argsort(ledger.gpu_types)


def giving(ledger: Ledger, rows: np.ndarray, demand: np.ndarray, *, rates: np.ndarray) -> np.ndarray:
    """(n, k) shares in the middle of those that give every job its ``demand`` (n,) in steps/s."""
    ways = alone(rates, ledger.gpus[rows], by_name(ledger))
    base = demand * (1 - TIGHT)
    x = solve(ways, size=np.ones(len(rows)), capacity=ledger.capacity, base=base, interior=True)
    shares = np.zeros_like(rates)
    shares[ways.first, ways.kind] = x
    return shares


def finish_time(ledger: Ledger, rows: np.ndarray, problem: Problem, *, agnostic: bool) -> np.ndarray:
    """Finish-time fairness: (n, k) shares in the middle of those with the least largest rho.

    As in Gavel, the time on the isolated share is what has passed since arrival plus what the steps left
    would take there, 1/n of the cluster whatever the weights.  Its agnostic version takes every throughput
    for 1 step/s, and so does this.
    """
    jobs = [
        dataclasses.replace(
            job,
            weight=1.0,
            isolated_elapsed=job.elapsed,
            throughput={
                gpu_type: (1.0 if rate > 0 else 0.0) if agnostic else rate
                for gpu_type, rate in job.throughput.items()
            },
        )
        for job in problem.jobs
    ]
    rho = allocate("finish-time-fairness", dataclasses.replace(problem, jobs=tuple(jobs))).objective
    passed = np.array([job.elapsed for job in jobs])
    rates = np.where(ledger.rate[rows] > 0, 1.0, 0.0) if agnostic else ledger.rate[rows]
    isolated = rates @ ledger.capacity / (len(rows) * ledger.gpus[rows])
    isolated /= np.maximum(1.0, ledger.capacity.sum() / (len(rows) * ledger.gpus[rows]))
    left = ledger.left[rows]
    allowed = rho * (1 + TIGHT) * (passed + left / isolated) - passed
    return giving(ledger, rows, left / allowed, rates=rates)


def makespan(ledger: Ledger, rows: np.ndarray, *, least: float) -> np.ndarray:
    """(n, k) shares with which all are done in the time at which Gavel's bisection stops.

    ``least``: the optimum in s; what is longer is feasible.
    """
    low, high, ratio = SEARCH
    found, last = None, high
    while found is None:
        while ratio * low < high:
            middle = (low + high) / 2
            if middle >= least:
                found = high = middle
            else:
                low = middle
        low, high, last = last, last * 10, last * 10
    return giving(ledger, rows, ledger.left[rows] / found, rates=ledger.rate[rows])


def paired(
    ledger: Ledger,
    rows: np.ndarray,
    shared_rates: Callable[[int, int, int], tuple[float, float]],
    *,
    interior: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Max-min fairness with space sharing: job rows, partner rows (-1: alone), (entries, k) shares."""
    kinds = [(ledger.jobs[row].type, float(ledger.weight[row])) for row in rows.tolist()]
    names = sorted(set(kinds), key=str)
    group_of = np.array([names.index(kind) for kind in kinds])
    size = np.bincount(group_of)
    one = np.array([rows[np.flatnonzero(group_of == g)[0]] for g in range(len(names))])
    rates, gpus = ledger.rate[one], ledger.gpus[one]
    k = rates.shape[1]
    found = []
    for a in range(len(names)):
        for b in range(a, len(names)):
            if gpus[a] != gpus[b] or (a == b and size[a] < 2):
                continue
            for j in range(k):
                both = shared_rates(int(one[a]), int(one[b]), j)
                if min(both) > 0 and rates[a, j] > 0 and rates[b, j] > 0:
                    found.append((a, b, j, *both))
    single = alone(rates, gpus, by_name(ledger))
    pairs = np.array(found, dtype=float).reshape(-1, 5)
    first, second, kind = (pairs[:, i].astype(np.int64) for i in range(3))
    ways = single.with_others(
        Columns(
            first=first,
            second=second,
            place=kind,
            kind=kind,
            rate_first=pairs[:, 3],
            rate_second=pairs[:, 4],
            gpus=gpus[first],
            pair=np.arange(len(first)),
        )
    )
    equal = rates @ (ledger.capacity / ledger.capacity.sum())
    slope = ledger.weight[one] * equal / gpus
    base = np.zeros(len(names))
    x = solve(ways, size=size, capacity=ledger.capacity, base=base, slope=slope, interior=interior)
    own = np.zeros((len(names), k))
    of_pair: dict[tuple[int, int], np.ndarray] = {}
    for a, b, j, share in zip(
        ways.first.tolist(), ways.second.tolist(), ways.kind.tolist(), x.tolist(), strict=True
    ):
        if b < 0:
            own[a, j] = share / size[a]
        else:
            number = size[a] * (size[a] - 1) / 2 if a == b else size[a] * size[b]
            of_pair.setdefault((a, b), np.zeros(k))[j] = share / number
    job, partner, shares = [rows], [np.full(len(rows), -1)], [own[group_of]]
    for (a, b), share in of_pair.items():
        if share.max() <= TIGHT:
            continue
        members, others = rows[group_of == a], rows[group_of == b]
        m, o = (np.triu_indices(len(members), 1)) if a == b else np.indices((len(members), len(others)))
        left, right = members[np.ravel(m)], others[np.ravel(o)]
        job.append(np.minimum(left, right))
        partner.append(np.maximum(left, right))
        shares.append(np.tile(share, (len(left), 1)))
    return np.concatenate(job), np.concatenate(partner), np.concatenate(shares)
