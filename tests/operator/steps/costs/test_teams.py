"""A job's cost is booked on the team that it belonged to when the cost arose."""

import pytest
from ballast_operator.api.costs import TeamPart
from ballast_operator.steps.accounting import MOST_TEAMS, accrue_cost, with_cost_of_last_team, with_team
from ballast_operator.steps.context import with_status
from ballast_operator.views.assignment import GangPools, PoolInfo

from tests.operator.steps.contexts import a_context, an_idle_view

PRICED = GangPools(first=PoolInfo(price_per_hour=2.5))


def context_of(team: str | None, status=None, *, hours: float = 1.0):
    context = a_context(seconds=3600 * hours, pools=PRICED, spec={} if team is None else {"entity": team})
    return context if status is None else with_status(context, status)


def booked(status) -> dict[str, float]:
    return {part.team: pytest.approx(part.cost) for part in status.team_costs}


def test_a_job_that_changes_its_team_has_paid_until_then_for_the_old_one():
    """Four GPUs for an hour each, whenever a pass comes; the last entry is the team that pays now."""
    first = context_of("vision")
    status = with_team(first, accrue_cost(first, first.view.status))
    assert booked(status) == {"vision": 10.0}
    change = context_of("speech", status, hours=2)
    status = with_team(change, with_cost_of_last_team(change))
    assert booked(status) == {"vision": 20.0, "speech": 0.0}
    later = context_of("speech", status, hours=3)
    status = with_team(later, accrue_cost(later, status))
    back = context_of("vision", status, hours=3)
    status = with_team(back, with_cost_of_last_team(back))
    assert [(part.team, part.cost) for part in status.team_costs] == [
        ("speech", pytest.approx(10.0)),
        ("vision", pytest.approx(20.0)),
    ]


def test_what_an_earlier_version_has_written_is_the_present_teams():
    """It did not say whose it was; a job without GPUs and cost says nothing yet."""
    context = context_of("vision")
    assert booked(with_team(context, context.view.status.replace(cost_so_far=7.0))) == {"vision": 7.0}
    idle = a_context(an_idle_view())
    assert with_team(idle, idle.view.status) == idle.view.status


def test_a_job_that_goes_from_team_to_team_keeps_a_bounded_list():
    """No cost is lost."""
    context = context_of("0")
    status = context.view.status
    for number in range(3 * MOST_TEAMS):
        context = context_of(str(number), status, hours=1 + number)
        status = with_team(context, with_cost_of_last_team(context))
    assert len(status.team_costs) == MOST_TEAMS
    assert sum(part.cost for part in status.team_costs) == pytest.approx(status.cost_so_far)
    assert status.team_costs[-1] == TeamPart(team=str(3 * MOST_TEAMS - 1))
