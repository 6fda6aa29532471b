"""A problem as arrays: what the policies compute with.

Letters as in the dissertation: T throughput, X shares.  n jobs, k GPU types.  A *column* is one way
to spend time: a job alone, or a pair of jobs, on one GPU type; x has one entry a column.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.problem import Problem, ProblemError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Ways to spend time, as arrays of one length.

    Attributes:
        first, second: rows of the jobs; ``second`` is -1 where the first runs alone.
        kind: index of the GPU type.
        rate_first, rate_second: steps/s of the two while they run so.
        gpus: GPUs taken while it runs.
        pair: index into ``problem.pairs``, -1 for a job alone.
    """

    first: np.ndarray
    second: np.ndarray
    kind: np.ndarray
    rate_first: np.ndarray
    rate_second: np.ndarray
    gpus: np.ndarray
    pair: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    def take(self, index: np.ndarray) -> "Columns":
        """The columns at ``index`` (positions or a mask)."""
        return Columns(**{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instance:
    """A problem as arrays.

    Attributes:
        problem: what it was made from.
        capacity: (k,) GPUs of each type.
        gpus, weights: (n,) of each job.
        T: (n, k) steps/s of each gang alone; 0 where it cannot run or has more GPUs than there are.
        equal: (n,) steps/s on the equal share X_equal = capacity / sum(capacity) (section 5.4.1).
        columns: all ways to spend time.
    """

    problem: Problem
    capacity: np.ndarray
    gpus: np.ndarray
    weights: np.ndarray
    T: np.ndarray
    equal: np.ndarray
    columns: Columns

    @property
    def runnable(self) -> np.ndarray:
        """(n,) whether the job can run anywhere, that is, has an equal share to be compared with."""
        return self.equal > 0

    @property
    def fastest(self) -> np.ndarray:
        """(n,) steps/s alone on the fastest type, for all of the time; 0 where it cannot run."""
        best: np.ndarray = self.T.max(axis=1, initial=0.0)
        return best

    @property
    def top(self) -> np.ndarray:
        """(n,) steps/s of the fastest way to run at all (a pair may, oddly, be faster than alone)."""
        best = self.fastest
        if (self.columns.second >= 0).any():
            np.maximum.at(best, self.columns.first, self.columns.rate_first)
            shared = self.columns.second >= 0
            np.maximum.at(best, self.columns.second[shared], self.columns.rate_second[shared])
        return best

    @property
    def level_scale(self) -> np.ndarray:
        """(n,) level of a job per step/s, without its weight: gpus / throughput(X_equal)."""
        return np.divide(self.gpus, self.equal, out=np.zeros_like(self.equal), where=self.equal > 0)

    def throughput(self, x: np.ndarray) -> np.ndarray:
        """(n,) effective steps/s of each job: sum over its columns of rate times share (section 5.3.1)."""
        columns, n = self.columns, len(self.gpus)
        total = _sums(columns.first, weights=columns.rate_first * x, n=n)
        shared = columns.second >= 0
        if shared.any():
            total += _sums(columns.second[shared], weights=(columns.rate_second * x)[shared], n=n)
        return total

    def levels(self, throughput: np.ndarray) -> np.ndarray:
        """(n,) gpus x throughput / (weight x throughput(X_equal)); 0 where the job cannot run."""
        values: np.ndarray = self.level_scale * throughput / self.weights
        return values

    def time_used(self, x: np.ndarray) -> np.ndarray:
        """(n,) fraction of its time that each job runs, alone or shared."""
        columns, n = self.columns, len(self.gpus)
        shared = columns.second >= 0
        used: np.ndarray = _sums(columns.first, weights=x, n=n)
        if shared.any():
            used += _sums(columns.second[shared], weights=x[shared], n=n)
        return used

    def gpus_used(self, x: np.ndarray) -> np.ndarray:
        """(k,) GPUs of each type in use on average."""
        used: np.ndarray = _sums(self.columns.kind, weights=self.columns.gpus * x, n=len(self.capacity))
        return used

    def feasible(self, x: np.ndarray) -> np.ndarray:
        """``x`` with what a solver's tolerance let it exceed scaled away, so that every limit holds."""
        x = np.maximum(x, 0.0)
        used = self.gpus_used(x)
        within = np.divide(self.capacity, used, out=np.ones_like(used), where=used > self.capacity)
        x = x * within[self.columns.kind]
        excess = np.maximum(1.0, self.time_used(x))
        shared = self.columns.second >= 0
        over = excess[self.columns.first]
        over[shared] = np.maximum(over[shared], excess[self.columns.second[shared]])
        return x / over

    def steps(self) -> np.ndarray:
        """(n,) steps still to do.

        Raises:
            ProblemError: a job does not say.
        """
        for job in self.problem.jobs:
            if job.steps_remaining is None:
                raise ProblemError(f"jobs[{job.name}].steps_remaining: missing, and this policy needs it")
        return np.array([job.steps_remaining for job in self.problem.jobs], dtype=float)

    def prices(self) -> np.ndarray:
        """(k,) USD per GPU hour of each type.

        Raises:
            ProblemError: a type has no price.
        """
        given = self.problem.prices
        for gpu_type in self.problem.gpu_types:
            if gpu_type not in given:
                raise ProblemError(f"prices.{gpu_type}: missing, and this policy needs it")
        return np.array([given[gpu_type] for gpu_type in self.problem.gpu_types], dtype=float)

    def arrival_order(self) -> np.ndarray:
        """(n,) rows of the jobs, first come first; equal arrivals in the order of the problem."""
        return np.argsort([-job.elapsed for job in self.problem.jobs], kind="stable")


def _sums(index: np.ndarray, *, weights: np.ndarray, n: int) -> np.ndarray:
    """(n,) sums of ``weights`` by ``index``; floats also where there is nothing to sum."""
    return np.bincount(index, weights=weights, minlength=n).astype(float, copy=False)


def instance(problem: Problem, *, space_sharing: bool = False) -> Instance:
    """Arrays of ``problem``; its pairs are left out unless ``space_sharing``."""
    jobs, types = problem.jobs, problem.gpu_types
    n, k = len(jobs), len(types)
    capacity = np.array([problem.capacity.get(gpu_type, 0) for gpu_type in types], dtype=float)
    gpus = np.fromiter((job.gpus for job in jobs), float, n)
    rates = (job.throughput.get(gpu_type, 0.0) for job in jobs for gpu_type in types)
    T = np.fromiter(rates, float, n * k).reshape(n, k)
    T[gpus[:, None] > capacity[None, :]] = 0.0
    total = capacity.sum()
    alone, kind = np.nonzero(T)
    nobody = np.full(len(alone), -1)
    columns = Columns(
        first=alone,
        second=nobody,
        kind=kind,
        rate_first=T[alone, kind],
        rate_second=np.zeros(len(alone)),
        gpus=gpus[alone],
        pair=nobody,
    )
    if space_sharing and problem.pairs:
        shared = _pair_columns(problem, T, gpus)
        columns = Columns(
            **{
                field.name: np.concatenate([getattr(columns, field.name), getattr(shared, field.name)])
                for field in dataclasses.fields(Columns)
            }
        )
    return Instance(
        problem=problem,
        capacity=capacity,
        gpus=gpus,
        weights=np.fromiter((job.weight for job in jobs), float, n),
        T=T,
        equal=T @ (capacity / total) if total > 0 else np.zeros(n),
        columns=columns,
    )


def _pair_columns(problem: Problem, T: np.ndarray, gpus: np.ndarray) -> Columns:
    """Pairs that can be of use: together they do more than taking turns on the same GPUs would.

    Where r1/T1 + r2/T2 <= 1, turns of lengths r1/T1 and r2/T2 give both jobs as much and use no more
    GPUs and no more of either job's time, so leaving such a pair out changes no optimum.
    """
    types, pairs = problem.gpu_types, problem.pairs
    row = {job.name: m for m, job in enumerate(problem.jobs)}
    nothing = (0.0, 0.0)
    rates = np.array(
        [pair.throughput.get(gpu_type, nothing) for pair in pairs for gpu_type in types], dtype=float
    ).reshape(len(pairs), len(types), 2)
    first = np.array([row[pair.jobs[0]] for pair in pairs])
    second = np.array([row[pair.jobs[1]] for pair in pairs])
    alone = np.stack([T[first], T[second]], axis=2)
    together = np.divide(rates, alone, out=np.zeros_like(rates), where=alone > 0).sum(axis=2)
    which, kind = np.nonzero((together > 1) & (rates > 0).all(axis=2) & (alone > 0).all(axis=2))
    return Columns(
        first=first[which],
        second=second[which],
        kind=kind,
        rate_first=rates[which, kind, 0],
        rate_second=rates[which, kind, 1],
        gpus=gpus[first[which]],
        pair=which,
    )
