"""Workloads drawn from Gavel's distributions, in Gavel's order: the same seed is the same workload.

Sources of the distributions: Gavel (dissertation section 5.7.1), after the trace of Microsoft's
Philly cluster.  One generator a stream: jobs seed + 2, arrivals seed + 3, deadlines seed + 6.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping

from ballast_policies.simulator.workloads.workload import TraceJob, Workload, WorkloadError
from ballast_policies.throughput.table import JobType, ThroughputTable

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
        table: gives the steps that last as long as the drawn duration on the reference GPU type.
        seed: of all streams.
        mean_gap_seconds: mean time between arrivals, exponentially distributed; 0: all arrive at 0.
        several_gpus: 30 % of the jobs are gangs of 2, 4 or 8; else all run on one GPU.
        weights: 20 % of the jobs have weight 5.
        deadlines: jobs have one of :data:`DEADLINE_FACTORS`.
        count: number of jobs; None: endless.
        reference_type: GPU type on which a duration is meant.
        job_table: the types, in the order from which they are drawn.
    """

    table: ThroughputTable
    seed: int
    mean_gap_seconds: float
    several_gpus: bool
    weights: bool = False
    deadlines: bool = False
    count: int | None = None
    reference_type: str = "v100"
    job_table: JobTable = DISTRIBUTED

    def __iter__(self) -> Iterator[TraceJob]:
        """The jobs in order of arrival."""
        jobs, arrivals, deadlines = (random.Random(self.seed + stream) for stream in (2, 3, 6))
        arrival = 0.0
        for _ in itertools.count() if self.count is None else range(self.count):
            yield self._draw(jobs, deadlines, arrival)
            if self.mean_gap_seconds > 0:
                # The order of the operations keeps the last bit equal to Gavel's.
                arrival = -math.log(1.0 - arrivals.random()) / (1.0 / self.mean_gap_seconds) + arrival

    def _draw(self, jobs: random.Random, deadlines: random.Random, arrival: float) -> TraceJob:
        gpus = _draw_gpus(jobs)  # drawn for single-GPU workloads too, so that both share their durations
        duration = _draw_duration(jobs)
        gpus = gpus if self.several_gpus else 1
        name, distributed = jobs.choice(self.job_table)
        while gpus > 1 and not distributed:
            name, distributed = jobs.choice(self.job_table)
        job_type = JobType(name=name, gpus=gpus)
        steps = duration * self.table.alone(job_type, self.reference_type)
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
    """Seconds alone on the reference GPU: 80 % between half an hour and 17 hours, 20 % up to a week."""
    if jobs.random() >= 0.8:
        return float(60 * 10 ** jobs.uniform(3, 4))
    return float(60 * 10 ** jobs.uniform(1.5, 3))


def continuous(
    table: ThroughputTable,
    *,
    jobs_per_hour: float,
    seed: int,
    several_gpus: bool,
    weights: bool = False,
    deadlines: bool = False,
    job_table: JobTable = DISTRIBUTED,
) -> Workload:
    """An endless workload: ``jobs_per_hour`` arrive on average.

    Raises:
        WorkloadError: the rate is not positive, or too large.
    """
    if not 0 < jobs_per_hour <= MOST_JOBS:
        raise WorkloadError(f"jobs_per_hour: {jobs_per_hour:g} must be above 0 and at most {MOST_JOBS}")
    source = Generated(
        table=table,
        seed=seed,
        mean_gap_seconds=3600.0 / jobs_per_hour,
        several_gpus=several_gpus,
        weights=weights,
        deadlines=deadlines,
        job_table=job_table,
    )
    kind = "multiple" if several_gpus else "single"
    return Workload(
        name=f"continuous-{kind}, {jobs_per_hour:g} jobs/h, seed {seed}", jobs=source, endless=True
    )


def static(
    table: ThroughputTable,
    *,
    count: int,
    seed: int,
    several_gpus: bool = True,
    weights: bool = False,
    deadlines: bool = False,
    job_table: JobTable = DISTRIBUTED,
) -> Workload:
    """``count`` jobs that all arrive at 0.

    Raises:
        WorkloadError: the count is not positive, or too large.
    """
    if not 1 <= count <= MOST_JOBS:
        raise WorkloadError(f"count: {count} jobs must be at least 1 and at most {MOST_JOBS}")
    source = Generated(
        table=table,
        seed=seed,
        mean_gap_seconds=0.0,
        several_gpus=several_gpus,
        weights=weights,
        deadlines=deadlines,
        count=count,
        job_table=job_table,
    )
    kind = "multiple" if several_gpus else "single"
    return Workload(name=f"static-{kind}, {count} jobs, seed {seed}", jobs=source)
