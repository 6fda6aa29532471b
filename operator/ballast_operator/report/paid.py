"""Payments of jobs that are deleted by now, from what was written and the jobs that exist."""

import dataclasses
from typing import Any

from ballast_policies.accounting import cost

ROUNDING = 1e-6
"""Of sums of prices."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A sum of what jobs have paid, as a status has it.

    Attributes:
        total: what they had paid when it was written, deleted ones included.
        others: the part of deleted jobs; None: an earlier version wrote it.
        since: what they have paid since, at the rates that the status has.
    """

    total: float = 0.0
    others: float | None = None
    since: float = 0.0

    def paid_by_others(self, jobs: float) -> float:
        """What others than the jobs that exist, which have paid ``jobs``, have paid.

        As it was written, unless the jobs and this are less than they were together: then a job was deleted
        since, and the rates count on.
        """
        if self.others is not None and jobs + self.others >= self.total - ROUNDING:
            return self.others
        return self.total + self.since - jobs


def written_for_gpus(entry: dict[str, Any], seconds: float) -> Written:
    """What jobs have paid for the GPUs of a pool; ``entry`` of ``status.bill``, written ``seconds`` ago."""
    gpus = min(entry.get("gpus") or 0, entry.get("gpusHeld") or 0)
    return Written(
        total=entry.get("heldCost") or 0.0,
        others=entry.get("deletedJobsCost"),
        since=cost(gpus * seconds, entry.get("pricePerGpuHour") or 0.0),
    )


def written_for_data(entry: dict[str, Any]) -> Written:
    """What jobs have paid for data that was read in a pool; ``entry`` of ``status.bill``."""
    return Written(total=entry.get("dataCost") or 0.0, others=entry.get("deletedJobsDataCost"))
