"""The jobs that a simulation runs: of a trace, or drawn from Gavel's distributions, and the load they are.

A trace is in Gavel's format: one job a line, ten tab-separated columns: job type, command, working directory,
name of the steps argument, needs a data directory (0/1), steps, GPUs, weight, deadline factor (negative:
none), arrival in seconds. Lines are in order of arrival.

Jobs are drawn in Gavel's order, so that the same seed is the same workload. Sources of the distributions:
Gavel (dissertation section 5.7.1), after the trace of Microsoft's Philly cluster. One generator a stream:
jobs seed + 2, arrivals seed + 3, deadlines seed + 6.

Of the load: let a GPU second of type k cost p_k, and all GPUs together 1 a second. No schedule serves a job
for less than it costs on its cheapest type, so what the arriving jobs cost there a second, sum over jobs of
min_k p_k x (GPU seconds on k), is at most the part of the cluster that they need, whatever the prices (weak
duality). Equal prices give demand on the fastest types over all GPUs; the best prices make the bound exact,
where GPU time can be divided at will.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path

import numpy as np

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import FILE
from ballast_policies.throughput.table import JobType, ThroughputTable


class WorkloadError(ValueError):
    """A trace or a workload cannot be read; the text names the line, the value and the reason."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """Job of a workload.

    Attributes:
        type: what it trains, on how many GPUs.
        steps: steps to do in all.
        arrival: seconds since the simulation's begin.
        weight: share relative to other jobs.
        deadline_factor: deadline as a multiple of its duration alone on the reference GPU type; None:
            no deadline.
    """

    type: JobType
    steps: float
    arrival: float
    weight: float = 1.0
    deadline_factor: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Jobs in order of arrival.

    Attributes:
        name: for reports.
        jobs: an iterable that can be iterated several times; may be endless.
        endless: whether it is.
    """

    name: str
    jobs: Iterable[TraceJob]
    endless: bool = False


COLUMNS = 10
BUILT_IN_TRACES = ("max_min_fairness", "minimize_makespan", "small_test")
"""Traces of Gavel's physical cluster that come with Ballast."""


def read_trace(path: Path) -> Workload:
    """The workload in the file ``path``, or a built-in one where ``path`` is its bare name.

    Raises:
        WorkloadError: the file does not exist, or a line is wrong.
    """
    if not path.exists() and str(path) in BUILT_IN_TRACES:
        folder = resources.files("ballast_policies.throughput") / "data" / "gavel" / "traces"
        return parse_trace((folder / f"{path}.trace").read_text(), name=f"{path}.trace")
    try:
        text = FILE.read(path)
    except OSError as error:
        raise WorkloadError(
            f"trace {path} cannot be read: {error.strerror}. To fix: name a file, or one of the built-in "
            f"traces {', '.join(BUILT_IN_TRACES)}"
        ) from error
    except ContractError as error:
        raise WorkloadError(f"trace {path}: {error}") from error
    return parse_trace(text, name=path.name)


def parse_trace(text: str, *, name: str) -> Workload:
    """The workload written in ``text``; ``name`` appears in messages."""
    jobs: list[TraceJob] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        job = _parse_line(line, where=f"{name}, line {number}")
        if jobs and job.arrival < jobs[-1].arrival:
            raise WorkloadError(
                f"{name}, line {number}: arrives at {job.arrival:g} s, before the line above "
                f"({jobs[-1].arrival:g} s). To fix: sort the lines by arrival"
            )
        jobs.append(job)
    if not jobs:
        raise WorkloadError(f"{name}: there is no job in it")
    return Workload(name=name, jobs=tuple(jobs))


def _parse_line(line: str, *, where: str) -> TraceJob:
    columns = line.split("\t")
    if len(columns) != COLUMNS:
        raise WorkloadError(
            f"{where}: {len(columns)} columns; a job has {COLUMNS}, separated by tabs: type, command, "
            "directory, steps argument, needs data, steps, GPUs, weight, deadline factor, arrival"
        )
    steps = _number(columns[5], f"{where}: steps", above=0.0)
    gpus = _number(columns[6], f"{where}: GPUs", above=0.0)
    if gpus != int(gpus):
        raise WorkloadError(f"{where}: GPUs: {columns[6]} is not a whole number")
    factor = _number(columns[8], f"{where}: deadline factor")
    arrival = _number(columns[9], f"{where}: arrival")
    if arrival < 0:
        raise WorkloadError(f"{where}: arrival: {columns[9]} is before the begin of the simulation")
    return TraceJob(
        type=JobType(name=columns[0], gpus=int(gpus)),
        steps=steps,
        arrival=arrival,
        weight=_number(columns[7], f"{where}: weight", above=0.0),
        deadline_factor=factor if factor > 0 else None,
    )


def _number(text: str, what: str, *, above: float | None = None) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise WorkloadError(f"{what}: {text!r} is not a number") from error
    if not math.isfinite(value) or (above is not None and value <= above):
        raise WorkloadError(
            f"{what}: {text} must be a finite number{'' if above is None else f' above {above:g}'}"
        )
    return value


_ITERATIONS = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Average load of arriving jobs.

    Attributes:
        fastest_gpus: GPUs that would be busy, if each job always ran on its fastest type.
        least: fraction of the cluster that they keep busy at least, without pairs of jobs on one GPU; above
            1 the queue grows without limit.
    """

    fastest_gpus: float
    least: float


def load_of(
    jobs: Iterable[TraceJob], gpus: Mapping[str, int], table: ThroughputTable, *, jobs_per_hour: float
) -> Load:
    """The load of jobs like these on GPU types with ``gpus`` GPUs; jobs that fit nowhere do not count.

    Raises:
        ThroughputError: the table does not know a job's type or a GPU type.
    """
    steps: dict[JobType, float] = {}
    count = 0
    for job in jobs:
        steps[job.type] = steps.get(job.type, 0.0) + job.steps
        count += 1
    types = [name for name, number in gpus.items() if number > 0]
    capacity = np.array([gpus[name] for name in types], dtype=float)
    needed = np.full((len(steps), len(types)), np.inf)
    for row, (job_type, total) in enumerate(steps.items()):
        for column, name in enumerate(types):
            rate = table.alone(job_type, name)
            if rate > 0 and job_type.gpus <= capacity[column]:
                needed[row, column] = job_type.gpus * total / rate
    needed = needed[np.isfinite(needed).any(axis=1)]
    if not len(needed):
        return Load(fastest_gpus=0.0, least=0.0)
    # GPU seconds of the mean job, times jobs a second.
    needed *= jobs_per_hour / 3600.0 / count
    return Load(fastest_gpus=float(needed.min(axis=1).sum()), least=_best_bound(needed / capacity, capacity))


def _best_bound(part: np.ndarray, capacity: np.ndarray) -> float:
    """Largest bound found over prices, by multiplicative steps upwards.

    Args:
        part: (M, K) part of all GPUs of type k that jobs of kind m keep busy there.
        capacity: (K,) GPUs.
    """
    rows = np.arange(len(part))
    price = capacity / capacity.sum()
    best = 0.0
    for iteration in range(_ITERATIONS):
        cheapest = (part * price).argmin(axis=1)
        busy = np.bincount(cheapest, weights=part[rows, cheapest], minlength=len(capacity))
        best = max(best, float(price @ busy))
        price = price * np.exp(busy / busy.max() / np.sqrt(iteration + 1))
        price /= price.sum()
    return best


DEADLINE_FACTORS = ((0.33, 1.2), (0.67, 2.0), (1.0, 10.0))
"""(cumulative probability, deadline as a multiple of the duration alone on the reference GPU)."""

MOST_JOBS = 1_000_000
"""Drawn at once, or arriving in an hour on average."""

_FAMILIES: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "ResNet-18": tuple((f"ResNet-18 (batch size {size})", True) for size in (16, 32, 64, 128, 256)),
    "ResNet-50": tuple((f"ResNet-50 (batch size {size})", True) for size in (16, 32, 64, 128)),
    "Transformer": tuple((f"Transformer (batch size {size})", True) for size in (16, 32, 64, 128, 256)),
    "LM": tuple((f"LM (batch size {size})", True) for size in (5, 10, 20, 40, 80)),
    "Recommendation": tuple(
        (f"Recommendation (batch size {size})", False) for size in (512, 1024, 2048, 4096, 8192)
    ),
    "A3C": (("A3C", False),),
    "CycleGAN": (("CycleGAN", False),),
}

JobTable = tuple[tuple[str, bool], ...]
"""Job types in the order from which they are drawn, and whether they run on several GPUs."""


def in_order(*families: str) -> JobTable:
    """The types of Gavel's families, one family after the other."""
    return tuple(kind for family in families for kind in _FAMILIES[family])


DISTRIBUTED = in_order("ResNet-18", "ResNet-50", "Transformer", "LM", "Recommendation", "A3C", "CycleGAN")
"""Gavel's 26 job types in the order of its last published code."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A sequence of jobs that can be drawn again.

    Attributes:
        table: gives the steps that last as long as the drawn duration on a V100.
        seed: of all streams.
        jobs_per_hour: mean rate of arrivals, with exponential gaps; 0: all arrive at 0.
        count: number of jobs; None: endless, at a rate above 0.
        several_gpus: 30 % of the jobs are gangs of 2, 4 or 8; else all run on one GPU.
        weights: 20 % of the jobs have weight 5.
        deadlines: jobs have one of :data:`DEADLINE_FACTORS`.
        job_table: the types, in the order from which they are drawn.
    """

    table: ThroughputTable
    seed: int
    jobs_per_hour: float = 0.0
    count: int | None = None
    several_gpus: bool = True
    weights: bool = False
    deadlines: bool = False
    job_table: JobTable = DISTRIBUTED

    def __iter__(self) -> Iterator[TraceJob]:
        """The jobs in order of arrival."""
        jobs, arrivals, deadlines = (random.Random(self.seed + stream) for stream in (2, 3, 6))
        arrival = 0.0
        for _ in itertools.count() if self.count is None else range(self.count):
            yield self._draw(jobs, deadlines, arrival)
            if self.jobs_per_hour > 0:
                # The order of the operations keeps the last bit equal to Gavel's.
                arrival = -math.log(1.0 - arrivals.random()) / (1.0 / (3600.0 / self.jobs_per_hour)) + arrival

    def workload(self) -> Workload:
        """The jobs under a name that says how they are drawn.

        Raises:
            WorkloadError: the count or the rate is not positive, or too large.
        """
        rate, count = self.jobs_per_hour, self.count
        if not 0 <= rate <= MOST_JOBS or (count is None and rate == 0):
            raise WorkloadError(f"jobs_per_hour: {rate:g} must be above 0 and at most {MOST_JOBS}")
        if count is not None and not 1 <= count <= MOST_JOBS:
            raise WorkloadError(f"count: {count} jobs must be at least 1 and at most {MOST_JOBS}")
        form, size = "static", f"{self.count} jobs"
        if self.jobs_per_hour > 0:
            form, size = "continuous", f"{self.jobs_per_hour:g} jobs/h"
        kind = "multiple" if self.several_gpus else "single"
        name = f"{form}-{kind}, {size}, seed {self.seed}"
        return Workload(name=name, jobs=self, endless=self.count is None)

    def _draw(self, jobs: random.Random, deadlines: random.Random, arrival: float) -> TraceJob:
        gpus = _draw_gpus(jobs)  # drawn for single-GPU workloads too, so that both share their durations
        duration = _draw_duration(jobs)
        gpus = gpus if self.several_gpus else 1
        name, distributed = jobs.choice(self.job_table)
        while gpus > 1 and not distributed:
            name, distributed = jobs.choice(self.job_table)
        job_type = JobType(name=name, gpus=gpus)
        steps = duration * self.table.alone(job_type, "v100")
        weight = 5.0 if self.weights and jobs.uniform(0, 1) <= 0.2 else 1.0
        factor = None
        if self.deadlines:
            drawn = deadlines.uniform(0, 1)
            factor = next((f for below, f in DEADLINE_FACTORS if drawn < below), DEADLINE_FACTORS[-1][1])
        return TraceJob(type=job_type, steps=steps, arrival=arrival, weight=weight, deadline_factor=factor)


def _draw_gpus(jobs: random.Random) -> int:
    drawn = jobs.uniform(0, 1)
    if drawn < 0.7:
        return 1
    if drawn < 0.8:
        return 2
    return 4 if drawn < 0.95 else 8


def _draw_duration(jobs: random.Random) -> float:
    """Seconds alone on a V100: 80 % between half an hour and 17 hours, 20 % up to a week."""
    if jobs.random() >= 0.8:
        return float(60 * 10 ** jobs.uniform(3, 4))
    return float(60 * 10 ** jobs.uniform(1.5, 3))
