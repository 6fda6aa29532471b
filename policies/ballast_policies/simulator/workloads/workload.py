"""The jobs that a simulation runs: values, from a trace or generated."""

import dataclasses
from collections.abc import Iterable

from ballast_policies.throughput.table import JobType


class WorkloadError(ValueError):
    """A trace or a workload cannot be read; the text names the line, the value and the reason."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One job of a workload.

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
