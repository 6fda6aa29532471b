"""The policies' problems written a second time, straight from the dissertation, for small instances.

Nothing here uses the product's columns, cuts or solvers: dense arrays, HiGHS for linear programs, cvxpy for
the fair shares, enumeration where that is enough.
"""

import itertools

import cvxpy as cp
import numpy as np

from tests.policies.allocation.linear_program import least


class Book:
    """A problem as a list of columns: the job of each, its GPUs (columns, k), its steps/s.

    A gang has a column for each GPU type that holds it, an elastic job one for each of its configurations.
    """

    def __init__(self, p):
        self.p, self.jobs = p, p.jobs
        self.capacity = np.array([p.capacity[g] for g in p.gpu_types], dtype=float)
        self.prices = np.array([p.prices[g] for g in p.gpu_types])
        self.weights = np.array([job.weight for job in p.jobs])
        self.steps = np.array([job.steps_remaining for job in p.jobs])
        self.n, self.k = len(p.jobs), len(p.gpu_types)
        columns = []
        for m, job in enumerate(p.jobs):
            columns += [
                (m, [each.gpus.get(g, 0) for g in p.gpu_types], each.throughput, each.name)
                for each in job.configurations
            ]
            for j, g in enumerate(p.gpu_types):
                rate = 0.0 if job.configurations else job.throughput.get(g, 0.0)
                columns.append((m, [job.gpus if i == j else 0 for i in range(self.k)], rate, g))
        columns = [c for c in columns if c[2] > 0 and (np.array(c[1]) <= self.capacity).all()]
        self.width = len(columns)
        self.job = np.array([c[0] for c in columns], dtype=int)
        self.use = np.array([c[1] for c in columns], dtype=float).reshape(self.width, self.k)
        self.rate = np.array([c[2] for c in columns], dtype=float)
        self.name = [c[3] for c in columns]
        self.full = np.array([max(self.rate[self.job == m], default=0.0) for m in range(self.n)])
        self.runs = self.full > 0
        self.elastic = np.array([bool(job.configurations) for job in p.jobs])
        self.gpus = np.array([self._size(m) for m in range(self.n)])
        total = self.capacity.sum()
        self.equal, counted = np.zeros(self.n), np.ones(self.n)
        for m in np.flatnonzero(self.runs):
            mine = self.job == m
            if self.elastic[m]:
                self.equal[m] = self.own_share(m, 1 / self.n)
                counted[m] = 1.0 if self.elastic.all() else total / self.n
            else:
                self.equal[m] = self.rate[mine] @ ((self.use[mine] > 0) @ self.capacity) / total
                counted[m] = self.gpus[m]
        self.scale = np.where(self.runs, counted / np.where(self.runs, self.equal, 1.0), 0.0)

    def _size(self, m):
        job, mine = self.jobs[m], self.job == m
        if not job.configurations or not self.runs[m]:
            return float(job.gpus)
        return self.use[mine & (self.rate == self.full[m])].sum(axis=1).min()

    def own_share(self, m, part):
        """The speed of job m on this part of every type, in its best configurations."""
        mine = self.job == m
        A = np.vstack([self.use[mine].T, np.ones(mine.sum())])
        b = np.append(self.capacity * part, 1.0)
        return -least(-self.rate[mine], A, b)[0]

    def limits(self, extra=0):
        """A, b of the time and capacity rows over the columns, with ``extra`` more of them."""
        time = np.array([self.job == m for m in range(self.n)], dtype=float).reshape(self.n, self.width)
        A = np.vstack([time, self.use.T])
        return np.hstack([A, np.zeros((len(A), extra))]), np.concatenate([np.ones(self.n), self.capacity])

    def rows_of_speed(self):
        """(n, columns): throughput of each job as rows over the columns."""
        rows = np.zeros((self.n, self.width))
        rows[self.job, np.arange(self.width)] = self.rate
        return rows

    def best(self, value, at_least=None):
        """max value . x over the feasible x, with speeds at least ``at_least`` (n,); None: infeasible."""
        if not self.width:
            return 0.0
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

    def cost(self):
        """USD a second of each column."""
        return self.use @ self.prices / 3600.0

    def shares(self, allocation):
        """x (columns,) of an answer, which may name nothing else with a share above 0."""
        x = np.zeros(self.width)
        for m, job in enumerate(self.jobs):
            for name, share in allocation.allocation[job.name].items():
                at = [c for c in np.flatnonzero(self.job == m) if self.name[c] == name]
                assert share == 0.0 or at, f"{job.name} runs as {name}"
                if at:
                    x[at[0]] = share
        return x

    def isolated_speed(self, m):
        """Steps/s of job m on its own part of every type, by its weight."""
        if not self.runs[m]:
            return 0.0
        if self.elastic[m]:
            return self.own_share(m, self.weights[m] / self.weights.sum())
        share = self.capacity * self.weights[m] / (self.weights.sum() * self.gpus[m])
        share = share / max(1.0, share.sum())
        mine = self.job == m
        return self.rate[mine] @ ((self.use[mine] > 0) @ share)

    def only(self, kept):
        """The same levels, with the columns ``kept`` alone."""
        other = object.__new__(Book)
        other.__dict__.update(self.__dict__)
        other.width = int(kept.sum())
        other.job, other.use, other.rate = self.job[kept], self.use[kept], self.rate[kept]
        other.full = np.array([max(other.rate[other.job == m], default=0.0) for m in range(self.n)])
        return other

    def nash(self, jobs):
        """(n,) speeds of ``jobs`` that maximise the weighted sum of their logarithms; 0 for the others."""
        mine = np.isin(self.job, jobs)
        relative = self.rate[mine] / self.full[self.job[mine]]
        to_job = np.array([self.job[mine] == m for m in jobs], dtype=float)
        x = cp.Variable(int(mine.sum()), nonneg=True)
        speed = (to_job * relative) @ x
        rules = [to_job @ x <= 1, self.use[mine].T @ x <= self.capacity]
        cp.Problem(cp.Maximize(self.weights[jobs] @ cp.log(speed)), rules).solve(solver=cp.CLARABEL)
        found = np.zeros(self.n)
        found[jobs] = speed.value * self.full[jobs]
        return found


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
    seconds = np.full((book.n, book.k), np.inf)
    seconds[book.job, book.use.argmax(axis=1)] = book.steps[book.job] / book.rate
    least = np.inf
    for choice in itertools.product(range(len(machines)), repeat=book.n):
        total = 0.0
        for machine, kind in enumerate(machines):
            mine = sorted(seconds[m, kind] for m in range(book.n) if choice[m] == machine)
            total += sum(length * (len(mine) - place) for place, length in enumerate(mine))
        least = min(least, total)
    return least
