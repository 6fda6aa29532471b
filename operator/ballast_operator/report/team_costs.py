"""Costs of each team's jobs, read from a ClusterPolicy's status and brought up to a moment."""

import datetime
from collections.abc import Mapping
from typing import Any

from ballast_policies.accounting import SECONDS_PER_HOUR

from ballast_operator.api.base import Time
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus
from ballast_operator.api.costs import TeamCost


def team_costs(status: Mapping[str, Any] | None, now: Time) -> tuple[TeamCost, ...]:
    """The costs of the status of a ClusterPolicy, brought up to ``now``; none where it cannot be read."""
    known = {name: status[name] for name in ("teams", "billAt") if status and status.get(name) is not None}
    try:
        before = ClusterPolicyStatus.model_validate(known)
    except ValueError:
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
