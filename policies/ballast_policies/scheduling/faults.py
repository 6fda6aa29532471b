"""Jobs for which a part of a decision raises: they are named, so that all others can be decided on."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

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
