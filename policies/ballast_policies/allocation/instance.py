"""The allocation problem as arrays, the input of the policies.

Letters as in the dissertation: T throughput, X shares.  n jobs, k GPU types; x has one entry for each
of the ``columns``. A job is a gang of one size, or elastic: it has configurations.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ballast_policies.allocation.columns import Columns, size_at_full_speed, sums, useful_pairs
from ballast_policies.allocation.own_share import own_share
from ballast_policies.allocation.problem import Entity, Pair, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """Configurations, one entry each, those of one job together and jobs in order of their rows.

    Attributes:
        job: (c,) rows of the jobs.
        place: (c,) number among those of the job, from 0.
        gpus: (c, k) GPUs of each type.
        throughput: (c,) steps/s; 0: it cannot run so.
        names: (n) names of the configurations of each job; empty for a gang of one size.
        usd_per_step: (c,) what a step costs besides the GPUs; None: nothing.
    """

    job: np.ndarray
    place: np.ndarray
    gpus: np.ndarray
    throughput: np.ndarray
    names: Sequence[Sequence[str]]
    usd_per_step: np.ndarray | None = None

    @property
    def elastic(self) -> np.ndarray:
        """(n,) whether a job has configurations."""
        return np.array([len(names) > 0 for names in self.names], dtype=bool)

    def columns(self, capacity: np.ndarray) -> Columns:
        """A column for each configuration that can run on ``capacity`` (k,) GPUs."""
        runs = (self.throughput > 0) & (self.gpus <= capacity).all(axis=1)
        gpus = self.gpus[runs]
        count = len(gpus)
        kind = (gpus > 0).argmax(axis=1) if count else np.zeros(0, dtype=np.intp)
        here = np.arange(count)
        first = gpus[here, kind]
        gpus[here, kind] = 0.0
        further, besides = None, None
        if self.usd_per_step is not None:
            besides = 3600.0 * (self.throughput * self.usd_per_step)[runs]
        if gpus.any():
            import scipy.sparse

            further = scipy.sparse.csr_array(gpus)
        return Columns(
            first=self.job[runs],
            second=np.full(count, -1),
            place=self.place[runs],
            kind=kind,
            rate_first=self.throughput[runs],
            rate_second=np.zeros(count),
            gpus=first,
            pair=np.full(count, -1),
            further=further,
            besides=besides,
        )


def options_of(problem: Problem) -> Options | None:
    """The configurations of the problem's jobs; None where no job has any.

    Configurations with a GPU of a type that the problem does not have are there, with throughput 0.
    """
    jobs = problem.jobs
    if not any(job.configurations for job in jobs):
        return None
    index = {gpu_type: j for j, gpu_type in enumerate(problem.gpu_types)}
    every = [each for job in jobs for each in job.configurations]
    counts = np.array([len(job.configurations) for job in jobs])
    entries = [
        (c, index.get(gpu_type, -1), count)
        for c, each in enumerate(every)
        for gpu_type, count in each.gpus.items()
        if count
    ]
    column, kind, count = np.array(entries, dtype=float).T
    gpus = np.zeros((len(every), len(index) + 1))
    gpus[column.astype(np.intp), kind.astype(np.intp)] = count
    throughput = np.array([each.throughput for each in every])
    throughput[gpus[:, -1] > 0] = 0.0
    return Options(
        job=np.repeat(np.arange(len(jobs)), counts),
        place=np.arange(len(every)) - np.repeat(np.cumsum(counts) - counts, counts),
        gpus=gpus[:, :-1],
        throughput=throughput,
        names=[tuple(each.name for each in job.configurations) for job in jobs],
        usd_per_step=np.array([each.usd_per_step for each in every])
        if any(each.usd_per_step for each in every)
        else None,
    )


def usd_per_step_of(problem: Problem) -> np.ndarray | None:
    """(n, k) what a step of each gang of one size costs besides the GPUs; None: nothing does."""
    if not any(job.usd_per_step for job in problem.jobs):
        return None
    rows = [[job.usd_per_step.get(t, 0.0) for t in problem.gpu_types] for job in problem.jobs]
    return np.array(rows, dtype=float).reshape(len(problem.jobs), len(problem.gpu_types))


DEFAULT_SECONDS = 3600.0
"""Length in seconds, on its fastest GPU type, of a job whose remaining steps are unknown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instance:
    """A problem as arrays.

    Attributes:
        gpu_types, names: (k), (n) names of the types and of the jobs.
        capacity: (k,) GPUs of each type.
        gpus, weights: (n,) of each job; of an elastic one the GPUs of its fastest configuration.
        T: (n, k) steps/s of each gang alone, stored by columns; 0 where it cannot run or has more GPUs than
            there are, and for elastic jobs.
        equal: (n,) steps/s on the equal share X_equal = capacity / sum(capacity) (section 5.4.1); of an
            elastic job on its own 1/n of every type (``own_share``).
        elastic: (n,) whether a job has configurations.
        level_at_equal: (n,) level of a job without its weight at the speed ``equal``: the gang's GPUs; 1 for
            elastic jobs, or capacity / n where there are gangs, too.
        configurations: (n) names of the configurations of each job, which ``columns.place`` indexes.
        columns: all ways to spend time.
        steps_remaining, deadlines: (n,) steps and seconds left; NaN where unknown or none.
        elapsed, isolated_elapsed: (n,) seconds, as in ``Job``.
        budgets, budget: (n,) USD for the rest of each job, NaN: no limit; and for all together.
        entity_of, entities: (n) the entity of each job, and those that are defined, by name.
        user_of: (n) the user of each job inside its entity.
        usd_per_hour: price of one GPU of each type that has one.
        pairs: the pairs that ``columns.pair`` indexes.
    """

    gpu_types: tuple[str, ...]
    names: Sequence[str]
    capacity: np.ndarray
    gpus: np.ndarray
    weights: np.ndarray
    T: np.ndarray
    equal: np.ndarray
    elastic: np.ndarray
    level_at_equal: np.ndarray
    configurations: Sequence[Sequence[str]]
    columns: Columns
    steps_remaining: np.ndarray
    elapsed: np.ndarray
    isolated_elapsed: np.ndarray
    deadlines: np.ndarray
    entity_of: Sequence[str | None]
    entities: Mapping[str, Entity]
    usd_per_hour: Mapping[str, float]
    budgets: np.ndarray
    pairs: tuple[Pair, ...] = ()
    budget: float = math.inf
    user_of: Sequence[str] = ()

    @property
    def runnable(self) -> np.ndarray:
        """(n,) whether the job can run anywhere, that is, has an equal share to be compared with."""
        return self.equal > 0

    @property
    def fastest(self) -> np.ndarray:
        """(n,) steps/s alone on the fastest type, for all of the time; 0 where it cannot run."""
        best: np.ndarray = self.T.max(axis=1, initial=0.0)
        if self.elastic.any():
            alone = self.columns.second < 0
            np.maximum.at(best, self.columns.first[alone], self.columns.rate_first[alone])
        return best

    @property
    def top(self) -> np.ndarray:
        """(n,) steps/s of the fastest way to run at all (a pair may be measured faster than alone)."""
        best = self.fastest
        if (self.columns.second >= 0).any():
            np.maximum.at(best, self.columns.first, self.columns.rate_first)
            shared = self.columns.second >= 0
            np.maximum.at(best, self.columns.second[shared], self.columns.rate_second[shared])
        return best

    @property
    def level_scale(self) -> np.ndarray:
        """(n,) level of a job per step/s, without its weight: gpus / throughput(X_equal) of a gang."""
        zeros = np.zeros_like(self.equal)
        factor: np.ndarray = np.divide(self.level_at_equal, self.equal, out=zeros, where=self.equal > 0)
        return factor

    def throughput(self, x: np.ndarray) -> np.ndarray:
        """(n,) effective steps/s of each job: sum over its columns of rate times share (section 5.3.1)."""
        return self._by_job(self.columns.rate_first * x, self.columns.rate_second * x)

    def levels(self, throughput: np.ndarray) -> np.ndarray:
        """(n,) level_scale x throughput / weight; 0 where the job cannot run."""
        values: np.ndarray = self.level_scale * throughput / self.weights
        return values

    def alone(self, x: np.ndarray) -> np.ndarray:
        """(n, k) share of its time that each gang runs alone on each type; 0 for elastic jobs."""
        X, alone = np.zeros_like(self.T), (self.columns.second < 0) & ~self.elastic[self.columns.first]
        X[self.columns.first[alone], self.columns.kind[alone]] = x[alone]
        return X

    def time_used(self, x: np.ndarray) -> np.ndarray:
        """(n,) fraction of its time that each job runs, alone or shared."""
        return self._by_job(x, x)

    def _by_job(self, of_first: np.ndarray, of_second: np.ndarray) -> np.ndarray:
        """(n,) sums of values (columns,) over each job's columns."""
        columns, n = self.columns, len(self.gpus)
        total = sums(columns.first, weights=of_first, n=n)
        shared = columns.second >= 0
        if shared.any():
            total += sums(columns.second[shared], weights=of_second[shared], n=n)
        return total

    def gpus_used(self, x: np.ndarray) -> np.ndarray:
        """(k,) GPUs of each type in use on average."""
        return self.columns.gpus_used(x, len(self.capacity))

    def feasible(self, x: np.ndarray) -> np.ndarray:
        """``x`` scaled so that every limit holds exactly, where a solver's tolerance let it be exceeded."""
        x = np.maximum(x, 0.0)
        used = self.gpus_used(x)
        within = np.divide(self.capacity, used, out=np.ones_like(used), where=used > self.capacity)
        least = within[self.columns.kind]
        if self.columns.further is not None:
            column, kind, _ = self.columns.entries()
            np.minimum.at(least, column, within[kind])
        x = x * least
        excess = np.maximum(1.0, self.time_used(x))
        shared = self.columns.second >= 0
        over = excess[self.columns.first]
        over[shared] = np.maximum(over[shared], excess[self.columns.second[shared]])
        shares: np.ndarray = x / over
        return shares

    def steps(self) -> np.ndarray:
        """(n,) steps left; where unknown, those of an hour alone on the job's fastest type."""
        hour = DEFAULT_SECONDS * self.fastest
        steps: np.ndarray = np.where(np.isnan(self.steps_remaining), hour, self.steps_remaining)
        return steps

    def prices(self) -> np.ndarray:
        """(k,) USD per GPU hour of each type; of a type without a price the mean of the others, or 1."""
        given = [self.usd_per_hour[t] for t in self.gpu_types if t in self.usd_per_hour]
        mean = sum(given) / len(given) if given else 1.0
        return np.array([self.usd_per_hour.get(t, mean) for t in self.gpu_types], dtype=float)

    def arrival_order(self) -> np.ndarray:
        """(n,) rows of the jobs in order of arrival; equal arrivals in the order of the problem."""
        return np.argsort(-self.elapsed, kind="stable")


def instance(problem: Problem, *, space_sharing: bool = False) -> Instance:
    """Arrays of ``problem``; its pairs are left out unless ``space_sharing``."""
    jobs, types, n, k = problem.jobs, problem.gpu_types, len(problem.jobs), len(problem.gpu_types)
    rates = (job.throughput.get(gpu_type, 0.0) for job in jobs for gpu_type in types)

    def of_each(field: str) -> np.ndarray:
        """Values as floats, NaN for None."""
        return np.array([getattr(job, field) for job in jobs], dtype=float)

    return dataclasses.replace(
        from_arrays(
            gpu_types=types,
            capacity=np.array([problem.capacity.get(gpu_type, 0) for gpu_type in types], dtype=float),
            throughput=np.fromiter(rates, float, n * k).reshape(n, k),
            gpus=of_each("gpus"),
            names=[job.name for job in jobs],
            pairs=problem.pairs if space_sharing else (),
            options=options_of(problem),
            usd_per_step=usd_per_step_of(problem),
        ),
        weights=of_each("weight"),
        steps_remaining=of_each("steps_remaining"),
        elapsed=of_each("elapsed"),
        isolated_elapsed=of_each("isolated_elapsed"),
        deadlines=of_each("deadline"),
        budgets=of_each("budget"),
        budget=math.inf if problem.budget is None else problem.budget,
        entity_of=[job.entity for job in jobs],
        user_of=[job.user for job in jobs],
        entities=problem.entities,
        usd_per_hour=problem.prices,
    )


def from_arrays(
    *,
    gpu_types: tuple[str, ...],
    capacity: np.ndarray,
    throughput: np.ndarray,
    gpus: np.ndarray,
    names: Sequence[str] | None = None,
    pairs: tuple[Pair, ...] = (),
    options: Options | None = None,
    usd_per_step: np.ndarray | None = None,
) -> Instance:
    """An instance without a ``Job`` for each job: for callers that keep thousands of jobs in arrays.

    Weights are 1, and nothing else is known of jobs or prices: ``dataclasses.replace`` says what is.

    Args:
        gpu_types: names of the k types.
        capacity: (k,) GPUs of each.
        throughput: (n, k) steps/s of each gang; 0: it cannot run there.
        gpus: (n,) gang sizes.
        names: of the jobs; their numbers if left out.
        pairs: pairs that may share GPUs.
        options: configurations of the elastic jobs, whose ``throughput`` is 0.
        usd_per_step: (n, k) what a step of each gang costs besides the GPUs; nothing if left out.

    The values are not checked; values from outside become a ``Problem`` first, which checks them.
    """
    n = len(gpus)
    capacity, gpus = np.asarray(capacity, dtype=float), np.asarray(gpus, dtype=float)
    T = np.where(gpus[:, None] > capacity[None, :], 0.0, throughput)
    total = capacity.sum()
    names = [str(m) for m in range(n)] if names is None else names
    alone, kind = np.nonzero(T)
    rate, T = T[alone, kind], np.asfortranarray(T)
    no_partner = np.full(len(alone), -1)
    columns = Columns(
        first=alone,
        second=no_partner,
        place=kind,
        kind=kind,
        rate_first=rate,
        rate_second=np.zeros(len(alone)),
        gpus=gpus[alone],
        pair=no_partner,
        besides=None if usd_per_step is None else 3600.0 * (T * usd_per_step)[alone, kind],
    )
    equal = T @ (capacity / total) if total > 0 else np.zeros(n)
    elastic, level_at_equal = np.zeros(n, dtype=bool), gpus
    labels: Sequence[Sequence[str]] = [()] * n
    if options is not None:
        elastic, labels = options.elastic, options.names
        of_elastic = options.columns(capacity)
        speed = of_elastic.rate_first * own_share(of_elastic, capacity, np.full(n, n))
        equal = equal + np.bincount(of_elastic.first, weights=speed, minlength=n)
        gpus = np.where(elastic, size_at_full_speed(of_elastic, n), gpus)
        level_at_equal = np.where(elastic, 1.0 if elastic.all() else total / n, gpus)
        columns = columns.with_others(of_elastic)
        columns = columns.take(np.argsort(columns.first, kind="stable"))
    if pairs:
        columns = columns.with_others(useful_pairs(gpu_types, names, pairs, T, gpus, usd_per_step))
    return Instance(
        gpu_types=gpu_types,
        names=names,
        capacity=capacity,
        gpus=gpus,
        weights=np.ones(n),
        T=T,
        equal=equal,
        elastic=elastic,
        level_at_equal=level_at_equal,
        configurations=labels,
        columns=columns,
        steps_remaining=np.full(n, np.nan),
        elapsed=np.zeros(n),
        isolated_elapsed=np.zeros(n),
        deadlines=np.full(n, np.nan),
        budgets=np.full(n, np.nan),
        entity_of=[None] * n,
        entities={},
        usd_per_hour={},
        pairs=pairs,
    )
