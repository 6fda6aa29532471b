"""The team that pays for what a job costs: the one that it belonged to when the cost arose."""

from ballast_operator.api.costs.budgets import TeamPart
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.steps.context import ReconcileContext
from ballast_operator.steps.costs.accounting import accrue_cost
from ballast_operator.views.hold import ROUNDING

MOST_TEAMS = 16
"""Teams whose parts a job keeps; of more, the two oldest become one."""


def with_cost_of_last_team(context: ReconcileContext) -> TrainingJobStatus:
    """The status with its cost brought up to now where the job belongs to another team from now on."""
    status = context.view.status
    return accrue_cost(context, status) if _has_changed(context, status) else status


def with_team(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status with what the job has cost booked on its teams, all that is new on the last of them.

    A status of an earlier version names no team: the present one pays for all.
    """
    team, known = context.spec.entity or "", status.team_costs
    if not known and status.allocation is None and status.cost_so_far == 0:
        return status
    *earlier, last = known or (TeamPart(team=team),)
    added = status.cost_so_far - sum(part.cost for part in known)
    if added > ROUNDING * status.cost_so_far:
        last = last.replace(cost=last.cost + added)
    parts = (*earlier, last)
    if last.team != team:
        again = next((part for part in parts if part.team == team), TeamPart(team=team))
        parts = (*(part for part in parts if part.team != team), again)
    if len(parts) > MOST_TEAMS:
        first, second, *rest = parts
        parts = (second.replace(cost=first.cost + second.cost), *rest)
    return status if parts == known else status.replace(team_costs=parts)


def _has_changed(context: ReconcileContext, status: TrainingJobStatus) -> bool:
    return bool(status.team_costs) and status.team_costs[-1].team != (context.spec.entity or "")
