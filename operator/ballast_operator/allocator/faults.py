"""Jobs whose decision raises: each is left out of the decision, so that all others are decided on.

An error that names its job (:class:`JobFaults`) leaves out that one. For an error of a decision as a whole
the jobs at fault are searched for: those without which the decision succeeds.
"""

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from ballast_policies.scheduling.refusals import JobFaults

from ballast_operator.kube.kinds import Key
from ballast_operator.metrics import Metrics
from ballast_operator.views.job import JobView

MOST_ATTEMPTS = 40
"""At a decision: two jobs at fault among 5,000 are found with 28."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultyJob:
    """A job that a decision leaves out; while its gang runs, it keeps its GPUs."""

    view: JobView
    error: Exception

    @property
    def message(self) -> str:
        """Message for people."""
        waits = self.view.status.allocation is None
        stays = "it waits" if waits else "it keeps its GPUs as they are"
        error = f"{type(self.error).__name__}: {self.error}"[:700]
        return (
            f"the allocator cannot consider the job, {stays}: {error}. "
            "To fix: report this message, with the operator's log"
        )


class Faults:
    """Finds the jobs at fault, decision after decision."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: dict[Key, str] = {}

    async def leave_out(
        self,
        attempt: Callable[[Mapping[Key, Exception]], Awaitable[T]],
        jobs: Sequence[Key],
        known: Mapping[Key, Exception] | None = None,
    ) -> T:
        """The outcome of ``attempt`` without the jobs for which it raises.

        ``attempt`` decides without the jobs that it is given, and changes nothing where it raises.
        ``known``: jobs that are known to be at fault.

        Raises:
            Exception: of the attempt with all jobs, where no job is at fault.
        """
        out, tries = dict(known or {}), 0
        best: T | None = None
        while True:
            try:
                return await attempt(out)
            except JobFaults as faults:
                if faults.by_job.keys() <= out.keys():
                    raise
                out |= faults.by_job
                continue
            except Exception as error:
                first = error
            # Those of the last decision come last: they are looked at first.
            suspects = [key for key in jobs if key not in out and key in self._told]
            order = [key for key in jobs if key not in out and key not in self._told] + suspects
            works, fails = -1, len(order)
            next_try = 0
            while fails - works > 1:
                without = out | dict.fromkeys(order[next_try:], first)
                tries += 1
                try:
                    best = await attempt(without)
                    works = next_try
                except Exception:
                    if next_try == 0:
                        raise first from None
                    fails = next_try
                if tries >= MOST_ATTEMPTS and best is not None:
                    return best
                unseen = len(order) - len(suspects)
                next_try = unseen if works < unseen < fails else (works + fails) // 2
            out[order[fails - 1]] = first

    def tell(self, faulty: Collection[FaultyJob]) -> None:
        """Count the jobs that a decision has left out, and log what is new."""
        for job in faulty:
            self._metrics.reconcile_errors.labels("Bug").inc()
            if self._told.get(job.view.key) != job.message:
                logger.error("job=%s/%s left out of decisions", *job.view.key, exc_info=job.error)
        self._told = {job.view.key: job.message for job in faulty}
