"""The policies' problems written a second time, straight from the dissertation, for small instances.

Nothing here uses the product's columns, cuts or solvers: dense arrays, HiGHS for linear programs,
cvxpy for convex ones, enumeration where that is enough.
"""

import itertools

import cvxpy as cp
import numpy as np

from tests.policies.allocation.linear_program import least


class Book:
    """A problem as dense arrays: T (n, k), capacity (k,), gpus, weights, steps (n,)."""

    def __init__(self, p):
        self.p, self.jobs = p, p.jobs
        self.capacity = np.array([p.capacity[g] for g in p.gpu_types], dtype=float)
        self.gpus = np.array([job.gpus for job in p.jobs], dtype=float)
        self.weights = np.array([job.weight for job in p.jobs])
        self.T = np.array([[job.throughput.get(g, 0.0) for g in p.gpu_types] for job in p.jobs])
        self.T[self.gpus[:, None] > self.capacity[None, :]] = 0.0
        self.steps = np.array([job.steps_remaining for job in p.jobs], dtype=float)
        self.prices = np.array([p.prices[g] for g in p.gpu_types])
        self.n, self.k = self.T.shape
        self.width = self.n * self.k
        self.full = self.T.max(axis=1)
        total = self.capacity.sum()
        self.equal = self.T @ (self.capacity / total) if total else np.zeros(self.n)
        self.runs = self.equal > 0
        self.scale = np.where(self.runs, self.gpus / np.where(self.runs, self.equal, 1.0), 0.0)

    def limits(self, extra=0):
        """A, b of the time and capacity rows over x flattened (n k), with ``extra`` more columns."""
        time = np.kron(np.eye(self.n), np.ones(self.k))
        capacity = np.kron(self.gpus, np.eye(self.k))
        A = np.vstack([time, capacity])
        return np.hstack([A, np.zeros((len(A), extra))]), np.concatenate([np.ones(self.n), self.capacity])

    def rows_of_speed(self):
        """(n, n k): throughput of each job as rows over x flattened."""
        rows = np.zeros((self.n, self.width))
        for m in range(self.n):
            rows[m, m * self.k : (m + 1) * self.k] = self.T[m]
        return rows

    def best(self, value, at_least=None):
        """max value . x over the feasible x, with speeds at least ``at_least`` (n,); None: infeasible."""
        A, b = self.limits()
        if at_least is not None:
            A, b = np.vstack([A, -self.rows_of_speed()]), np.concatenate([b, -at_least])
        solution = least(-value, A, b)
        return -solution[0] if solution is not None else None

    def max_feasible(self, base, slope):
        """max t with speed_m >= base_m + slope_m t."""
        # In units in which speeds and t are about 1: the solver's tolerance is absolute.
        A, b = self.limits(extra=1)
        full = np.where(self.full > 0, self.full, 1.0)
        unit = (slope / full).max() or 1.0
        demand = np.hstack([-self.rows_of_speed(), slope[:, None] / unit]) / full[:, None]
        solution = least(
            np.concatenate([np.zeros(self.width), [-1.0]]),
            np.vstack([A, demand]),
            np.concatenate([b, -base / full]),
            upper=np.concatenate([np.ones(self.width), [np.inf]]),
        )
        assert solution is not None
        return solution[1][-1] / unit

    def convex(self, loss):
        """min loss(speeds relative to the fastest) by cvxpy, over the jobs that can run."""
        X = cp.Variable((self.n, self.k), nonneg=True)
        relative = self.T / np.where(self.full > 0, self.full, 1.0)[:, None]
        speed = cp.sum(cp.multiply(relative, X), axis=1)
        rules = [cp.sum(X, axis=1) <= 1, self.gpus @ X <= self.capacity]
        value = cp.Problem(cp.Minimize(loss(speed)), rules).solve(solver=cp.CLARABEL)
        return float(value), np.asarray(speed.value) * self.full


def filling_by_stages(book, weights_of):
    """Levels (n,) of the dissertation's procedure: raise, find who cannot rise alone, freeze, repeat.

    ``weights_of``: set of rows that may still rise -> (n,) weights w^job, 0 for the others.
    """
    levels, rising = np.zeros(book.n), set(np.flatnonzero(book.runs).tolist())
    slack = 1 - 1e-10
    while rising:
        weights = weights_of(rising)
        speed = np.divide(levels, book.scale, out=np.zeros(book.n), where=book.scale > 0)
        slope = np.divide(weights, book.scale, out=np.zeros(book.n), where=book.scale > 0)
        levels = levels + weights * book.max_feasible(speed * slack, slope)
        speed = np.divide(levels, book.scale, out=np.zeros(book.n), where=book.scale > 0)
        still = set()
        for m in rising:
            most = book.best(book.rows_of_speed()[m], at_least=speed * slack)
            if most is not None and most > speed[m] * (1 + 1e-7) + 1e-9 * book.full[m]:
                still.add(m)
        assert still < rising
        rising = still
    return levels


def team_weights(book):
    """``weights_of`` for one level of entities: shared among the rising members, or the first's (fifo)."""

    def weights_of(rising):
        weights = np.zeros(book.n)
        order = sorted(rising, key=lambda m: (-book.jobs[m].elapsed, m))
        for m in order:
            if book.jobs[m].entity is None:
                weights[m] = book.weights[m]
        for name, entity in book.p.entities.items():
            members = [m for m in order if book.jobs[m].entity == name]
            if members and entity.policy == "fifo":
                weights[members[0]] = entity.weight
            elif members:
                total = sum(book.weights[m] for m in members)
                for m in members:
                    weights[m] = entity.weight * book.weights[m] / total
        return weights

    return weights_of


def least_total_completion_time(book):
    """Least sum of completion times of single-GPU jobs on unrelated GPUs, by enumeration."""
    machines = [j for j in range(book.k) for _ in range(int(book.capacity[j]))]
    seconds = np.where(book.T > 0, book.steps[:, None] / np.where(book.T > 0, book.T, 1.0), np.inf)
    least = np.inf
    for choice in itertools.product(range(len(machines)), repeat=book.n):
        total = 0.0
        for machine, kind in enumerate(machines):
            mine = sorted(seconds[m, kind] for m in range(book.n) if choice[m] == machine)
            total += sum(length * (len(mine) - place) for place, length in enumerate(mine))
        least = min(least, total)
    return least
