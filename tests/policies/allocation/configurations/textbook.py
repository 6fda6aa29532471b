"""The policies' problems over configurations, written a second time: dense arrays, HiGHS, cvxpy."""

import cvxpy as cp
import numpy as np

from tests.policies.allocation.linear_program import least
from tests.policies.allocation.textbook import Book


class ElasticBook(Book):
    """A problem as a list of columns: the job of each, its GPUs (columns, k), its steps/s."""

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
                self.equal[m] = self.own_share(m)
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

    def own_share(self, m):
        """The speed of job m on its own 1/n of every type, in its best configurations."""
        mine = self.job == m
        A = np.vstack([self.use[mine].T, np.ones(mine.sum())])
        b = np.append(self.capacity / self.n, 1.0)
        return -least(-self.rate[mine], A, b)[0]

    def limits(self, extra=0):
        time = np.array([self.job == m for m in range(self.n)], dtype=float).reshape(self.n, self.width)
        A = np.vstack([time, self.use.T])
        return np.hstack([A, np.zeros((len(A), extra))]), np.concatenate([np.ones(self.n), self.capacity])

    def rows_of_speed(self):
        rows = np.zeros((self.n, self.width))
        rows[self.job, np.arange(self.width)] = self.rate
        return rows

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
        """Steps/s of job m on its own 1/n of every type."""
        if not self.runs[m]:
            return 0.0
        if self.elastic[m]:
            return self.own_share(m)
        share = self.capacity / (self.n * self.gpus[m])
        share = share / max(1.0, share.sum())
        mine = self.job == m
        return self.rate[mine] @ ((self.use[mine] > 0) @ share)

    def only(self, kept):
        """The same levels, with the columns ``kept`` alone."""
        other = object.__new__(ElasticBook)
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
