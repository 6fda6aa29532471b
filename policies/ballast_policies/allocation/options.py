"""The configurations of elastic jobs as arrays, and their columns."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ballast_policies.allocation.columns import Columns
from ballast_policies.allocation.problem import Problem


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
