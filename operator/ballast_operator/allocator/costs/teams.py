"""Costs of each team's jobs, kept in the ClusterPolicy's status, and the teams' budgets.

The sums are the jobs' own, as in the bill, and beside them what deleted jobs have paid.
"""

import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.accounting import SECONDS_PER_HOUR
from ballast_policies.scheduling.refusals import Refusal

from ballast_operator.allocator.costs.bill import Paid
from ballast_operator.allocator.problem.admission import RefusedJob
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.cluster_policy_status import team_costs
from ballast_operator.api.conditions import JobReason
from ballast_operator.api.costs import (
    BudgetPeriod,
    OnTeamLimit,
    TeamBudget,
    TeamCost,
    first_of_month,
    month_of,
)
from ballast_operator.views.clock import Time
from ballast_operator.views.job import ROUNDING, JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpentBudget:
    """A team has spent its budget.

    Attributes:
        message: which, and what to change.
        suspends: its jobs hold no GPUs until there is budget again.
    """

    message: str
    suspends: bool


def without_suspended_teams(
    wanting: Sequence[JobView], spent: Mapping[str, SpentBudget]
) -> tuple[list[JobView], list[RefusedJob]]:
    """(jobs that may take part, jobs that may not)."""
    kept, refused = [], []
    for view in wanting:
        over = spent.get(view.spec.asked.entity or "") if view.spec is not None else None
        if over is None or not over.suspends:
            kept.append(view)
            continue
        refusal = Refusal(JobReason.TEAM_BUDGET_SPENT, over.message)
        refused.append(RefusedJob(view, refusal))
    return kept, refused


MOST_TEAMS = 256
"""Teams whose costs are kept: those with a budget and those with GPUs first."""


def next_team_costs(
    status: Mapping[str, Any], policy: ClusterPolicy | None, paid: Paid | None, now: Time
) -> tuple[TeamCost, ...]:
    """The costs up to ``now``, and what each team's GPUs cost from now on.

    ``policy``, ``paid`` (by jobs, a moment ago) None: no policy can be used; what teams cost counts on.
    """
    known = {entry.team: entry for entry in team_costs(status, now)}
    if policy is None or paid is None or paid.teams.at is None:
        return tuple(known.values())
    sums, seconds = paid.teams, max(0.0, (now - paid.teams.at).total_seconds())
    per_second: defaultdict[str, float] = defaultdict(float)
    for rates in sums.per_second.values():
        for team, rate in rates.items():
            per_second[team] += rate
    found = []
    for team in {**known, **sums.by_key, **dict.fromkeys(policy.spec.budgets)}:
        cost = sums.of(team) + per_second[team] * seconds
        entry = known.get(team)
        if entry is None:
            entry = TeamCost(team=team, since=now, month=month_of(now))
        month = max(0.0, entry.month_cost + cost - entry.cost)
        found.append(
            entry.replace(
                cost=cost,
                month_cost=month,
                cost_per_hour=per_second[team] * SECONDS_PER_HOUR,
                deleted_jobs_cost=sums.others.get(team, 0.0),
            )
        )
    found.sort(key=lambda entry: (entry.team in policy.spec.budgets, entry.cost_per_hour > 0, entry.cost))
    return tuple(sorted(found[-MOST_TEAMS:], key=lambda entry: entry.team))


def spent_budgets(policy: ClusterPolicy, teams: Sequence[TeamCost]) -> dict[str, SpentBudget]:
    """Teams that have spent their budget."""
    found = {}
    for entry in teams:
        budget = policy.spec.budgets.get(entry.team)
        if budget is not None and _left(budget, entry) <= ROUNDING * budget.amount:
            found[entry.team] = SpentBudget(
                message=_message(entry.team, budget),
                suspends=budget.on_exhausted is OnTeamLimit.SUSPEND,
            )
    return found


def _left(budget: TeamBudget, entry: TeamCost) -> float:
    return budget.amount - (entry.month_cost if budget.period is BudgetPeriod.MONTH else entry.cost)


def _message(team: str, budget: TeamBudget) -> str:
    monthly = budget.period is BudgetPeriod.MONTH
    message = f"the jobs of team {team} have cost its budget of {budget.amount:.10g}"
    message += " of this month" if monthly else ""
    if budget.on_exhausted is OnTeamLimit.CONTINUE:
        return f"{message}, and continue, as the budget's onExhausted is Continue"
    wait = "wait for the next month, or " if monthly else ""
    raise_it = f"ask the cluster's administrator to raise budgets.{team}.amount of the ClusterPolicy"
    return f"{message}. To fix: {wait}{raise_it}"


def next_change(policy: ClusterPolicy, teams: Sequence[TeamCost], now: Time) -> float | None:
    """Time when the next budget is spent or begins again, epoch seconds; None: none is known."""
    found = []
    for entry in teams:
        budget = policy.spec.budgets.get(entry.team)
        if budget is None:
            continue
        left = _left(budget, entry)
        if left > ROUNDING * budget.amount and entry.cost_per_hour > 0:
            found.append(now.timestamp() + left / entry.cost_per_hour * SECONDS_PER_HOUR)
        elif left <= ROUNDING * budget.amount and budget.period is BudgetPeriod.MONTH:
            found.append(first_of_month(first_of_month(now) + datetime.timedelta(days=32)).timestamp())
    return min(found, default=None)
