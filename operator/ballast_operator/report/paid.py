"""Payments of jobs that are deleted by now, and of teams, from what was written and the jobs that exist."""

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

from ballast_policies.accounting import SECONDS_PER_HOUR, cost

from ballast_operator.api.base import Time
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus, PoolBill
from ballast_operator.api.costs import TeamCost

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

    def paid_by_others(self, jobs: float, then: float) -> float:
        """Cost that others have paid than the jobs that exist, which have paid ``jobs``.

        As it was written, unless the jobs had paid less ``then``, when it was, than they were said to: one
        was deleted since, and of the rates those count on that are not the jobs'. ``then`` may be too high.
        """
        if self.others is None:
            return self.total + self.since - jobs
        deleted = self.total - self.others - then
        if deleted <= ROUNDING:
            return self.others
        return self.others + deleted + max(0.0, self.since - (jobs - then))


def written_for_gpus(entry: PoolBill, seconds: float) -> Written:
    """Cost that jobs have paid for the GPUs of a pool; ``entry``: of the bill, ``seconds`` old."""
    held = min(entry.gpus, entry.gpus_held) * seconds
    since = cost(held, entry.price_per_gpu_hour)
    return Written(total=entry.held_cost, others=entry.deleted_jobs_cost, since=since)


def written_for_data(entry: PoolBill) -> Written:
    """Cost that jobs have paid for data read in a pool."""
    return Written(total=entry.data_cost, others=entry.deleted_jobs_data_cost)


def team_costs(status: Mapping[str, Any] | None, now: Time) -> tuple[TeamCost, ...]:
    """The costs of the status of a ClusterPolicy, brought up to ``now``; none where it cannot be read."""
    before = ClusterPolicyStatus.written(status, "teams", "billAt")
    if before is None:
        return ()
    return tuple(_brought_up_to(entry, before.bill_at, now) for entry in before.teams)


def _brought_up_to(entry: TeamCost, at: Time | None, now: Time) -> TeamCost:
    month = month_of(now)
    seconds = 0.0 if at is None else max(0.0, (now - at).total_seconds())
    in_month = min(seconds, (now - first_of_month(now)).total_seconds())
    earlier = entry.month_cost if entry.month == month else 0.0
    per_second = entry.cost_per_hour / SECONDS_PER_HOUR
    return entry.replace(
        cost=entry.cost + per_second * seconds, month=month, month_cost=earlier + per_second * in_month
    )


def month_of(now: Time) -> str:
    """The calendar month by UTC, as 2030-01."""
    return f"{now.astimezone(datetime.UTC):%Y-%m}"


def first_of_month(now: Time) -> Time:
    """Its first moment."""
    day = now.astimezone(datetime.UTC)
    return day.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
