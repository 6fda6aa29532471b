"""What the jobs of each team have cost, summed up in the ClusterPolicy's status, and the teams' budgets.

Sums of jobs' statuses would forget deleted jobs. As in the bill, every change of what a team's GPUs cost an
hour is written when it is seen, so that a new leader knows what was spent while none led.
"""

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.accounting import SECONDS_PER_HOUR

from ballast_operator.allocator.problem.budgets import SpentBudget
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.costs.budgets import BudgetPeriod, OnTeamLimit, TeamBudget, TeamCost
from ballast_operator.report.team_costs import first_of_month, month_of, team_costs
from ballast_operator.views.clock import Time
from ballast_operator.views.hold import ROUNDING
from ballast_operator.views.job import JobView

MOST_TEAMS = 256
"""Teams whose costs are kept: those with a budget and those with GPUs first."""


def next_team_costs(
    status: Mapping[str, Any], jobs: Sequence[JobView], policy: ClusterPolicy | None, now: Time
) -> tuple[TeamCost, ...]:
    """The costs up to ``now``, and what each team's GPUs cost from now on."""
    known = {entry.team: entry for entry in team_costs(status, now)}
    if policy is None:
        return tuple(known.values())
    prices = {pool.name: pool.price_per_gpu_hour for pool in policy.spec.node_pools}
    spent: defaultdict[str, float] = defaultdict(float)
    per_hour: defaultdict[str, float] = defaultdict(float)
    for view in jobs:
        team = (view.spec.entity if view.spec is not None else None) or ""
        spent[team] += view.status.cost_so_far
        allocation = view.status.allocation
        if allocation is None:
            continue
        rate = sum(part.gpus * prices.get(part.pool, 0.0) for part in allocation.by_pool)
        per_hour[team] += rate
        if view.unpaid_since is not None:
            spent[team] += rate * max(0.0, (now - view.unpaid_since).total_seconds()) / SECONDS_PER_HOUR
    found = []
    for team in {**known, **spent, **dict.fromkeys(policy.spec.budgets, 0.0)}:
        entry = known.get(team)
        if entry is None:
            cost = spent.get(team, 0.0)
            entry = TeamCost(team=team, since=now, cost=cost, month=month_of(now), month_cost=cost)
        found.append(entry.replace(cost_per_hour=per_hour.get(team, 0.0)))
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
    """When the next budget will be spent or begin again, epoch seconds; None: none that is known of."""
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
