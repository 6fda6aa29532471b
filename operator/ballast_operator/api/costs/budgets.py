"""What happens when a budget is spent or a deadline has passed."""

import enum
from typing import Annotated

from pydantic import Field

from ballast_operator.api.base import ApiModel, StatusModel, Time


class OnLimit(enum.StrEnum):
    """What happens to a job that has reached a limit."""

    SUSPEND = "Suspend"
    """It saves a checkpoint, stops, and holds no GPUs until the limit is raised."""
    CONTINUE = "Continue"
    """It continues; the condition and an Event say that the limit is reached."""
    FAIL = "Fail"
    """It saves a checkpoint, stops, and has failed for good."""


class OnTeamLimit(enum.StrEnum):
    """What happens to the jobs of a team that has spent its budget."""

    SUSPEND = "Suspend"
    """They save a checkpoint, stop, and hold no GPUs until there is budget again."""
    CONTINUE = "Continue"
    """They continue; their condition BudgetExhausted and an Event say so."""


class BudgetPeriod(enum.StrEnum):
    """For how long a budget is meant."""

    TOTAL = "Total"
    """For all that the team's jobs cost since Ballast has known the team."""
    MONTH = "Month"
    """For each calendar month, by UTC."""


class TeamBudget(ApiModel):
    """What the jobs of a team may cost."""

    amount: Annotated[float, Field(gt=0, le=1e12)]
    """In the currency of ``pricePerGpuHour``. ``status.teams`` has what is spent, deleted jobs included."""
    period: BudgetPeriod = BudgetPeriod.TOTAL
    """For how long."""
    on_exhausted: OnTeamLimit = OnTeamLimit.SUSPEND
    """What happens to the team's jobs when it is spent."""


class TeamPart(StatusModel):
    """What one team has paid for a job."""

    team: Annotated[str, Field(max_length=253)]
    """The team, ``spec.entity`` then; empty: none."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """What it has paid."""


class TeamCost(StatusModel):
    """What the jobs of a team have cost, deleted ones included, up to ``billAt``."""

    team: Annotated[str, Field(max_length=253)]
    """The team, ``spec.entity`` of its jobs; empty: jobs without one."""
    since: Time
    """When it was seen first."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """Since then; what its jobs had cost by then included."""
    month: Annotated[str, Field(max_length=7)] = ""
    """The calendar month of ``monthCost``, as 2030-01."""
    month_cost: Annotated[float, Field(ge=0)] = 0.0
    """In this month."""
    deleted_jobs_cost: float | None = None
    """The part of ``cost`` that its deleted jobs have paid, and those that belong to another team now."""
    cost_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """What its GPUs cost since ``billAt``."""
