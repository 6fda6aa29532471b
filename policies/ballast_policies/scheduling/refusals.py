"""Refusals of GPUs and verdicts on conditions, with their reasons; jobs that a decision has to leave out."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar


class Obstacle(enum.StrEnum):
    """Cause that a decision gives a job no GPUs: the reason of its condition ``Admitted``."""

    CAPACITY = "WaitingForCapacity"
    """Other jobs hold the GPUs this round."""
    SPOT_LIMIT = "SpotLimit"
    """Limits of spot machines keep it off, and no others are free."""
    TENANT_LIMIT = "NamespaceLimit"
    """Its tenant's other jobs have the GPUs that their limit leaves, or have to give them back first."""
    TEAM_LIMIT = "TeamLimit"
    """Its team's other jobs have the GPUs that their limit leaves, or have to give them back first."""
    DRY_RUN = "DryRun"
    """Nothing that is decided is carried out."""
    EXCEEDS_CAPACITY = "ExceedsCapacity"
    """No pools have so many GPUs."""
    EXCEEDS_MEMORY = "ExceedsMemory"
    """No pools have them with the memory."""
    NO_MATCHING_GPU_TYPE = "NoMatchingGpuType"
    """No pool has a GPU type that it allows."""
    MISCONFIGURED = "Misconfigured"
    """No gang can be as it asks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Reason that a job gets no GPUs, or must hold none.

    Attributes:
        reason: of its condition Admitted, and of Failed.
        message: what is the case, with the field or the API server's words, and what to change.
        fails: it has failed for good once it holds nothing.
        may_pass: the job itself may be right; it is looked at again.
    """

    reason: str
    message: str
    fails: bool = False
    may_pass: bool = False


S = TypeVar("S")
T = TypeVar("T")


class JobFaults(Exception):  # noqa: N818
    """Errors of single jobs; ``by_job``: job, by its name or key -> its error."""

    def __init__(self, by_job: Mapping[Any, Exception]) -> None:
        named = {job if isinstance(job, str) else "/".join(job): error for job, error in by_job.items()}
        super().__init__("; ".join(f"{job}: {error}" for job, error in named.items()))
        self.by_job = by_job


def each_job(jobs: Iterable[S], work: Callable[[S], T], key: Callable[[S], Any]) -> list[T]:
    """The outcome of ``work`` on each of ``jobs``. Raises JobFaults: jobs for which it raises."""
    found, faults = [], dict[Any, Exception]()
    for job in jobs:
        try:
            found.append(work(job))
        except Exception as error:
            faults[key(job)] = error
    if faults:
        raise JobFaults(faults)
    return found


class Verdict(NamedTuple):
    """Verdict of a decision on one condition; ``value`` None: Unknown."""

    type: str
    value: bool | None
    reason: str
    message: str
