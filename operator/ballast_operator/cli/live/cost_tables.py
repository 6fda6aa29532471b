"""The tables of ``ballast cost``, which fit the terminal, without truncation at 80 columns."""

from rich.console import Console, ConsoleOptions, RenderResult

from ballast_operator.cli.text_table import WIDE_COLUMNS, stacked, text_table
from ballast_operator.report.costs import Costs, JobCost, PoolCostLine, TeamCost

STACKED = 3
"""Figures in a cell, one below the other, below ``WIDE_COLUMNS``."""

_JOB = (
    "state",
    "GPU h",
    "cost",
    "at the end",
    "start-up",
    "lost steps",
    "data",
    "saved: on-demand",
    "any type",
    "goodput",
)
_TEAM = ("jobs", "cost", "at the end", "with deleted", "budget", "goodput")
_POOL = ("GPUs", "price", "bill", "jobs", "deleted jobs", "idle", "data", "goodput")


class CostTables:
    """Costs that are laid out for the width at which they are printed.

    Args:
        found: the costs.
        by: ``job``, ``team`` or ``pool``: only this table; None: all that have rows.
    """

    def __init__(self, found: Costs, by: str | None) -> None:
        self._found, self._by = found, by

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Jobs, teams, pools."""
        found, size = self._found, 1 if options.max_width >= WIDE_COLUMNS else STACKED
        pools = "Pools: bill = jobs + deleted jobs + idle; data is a part of jobs"
        for kind, title, headings, rows in (
            ("job", f"Jobs, up to {found.at}", _JOB, [_of_job(job) for job in found.jobs]),
            ("team", "Teams", _TEAM, [_of_team(team) for team in found.teams]),
            ("pool", pools, _POOL, [_of_pool(pool) for pool in found.pools]),
        ):
            if self._by in (None, kind) and rows:
                yield text_table(
                    title,
                    (kind, *stacked(headings, size)),
                    [(name, *stacked(figures, size)) for name, *figures in rows],
                    breaks=(kind,),
                    show_lines=size > 1,
                )


def amount(value: float | None) -> str:
    """Two digits behind the point, never "-0.00"; "-" for what is not known."""
    if value is None:
        return "-"
    text = f"{value:,.2f}"
    return "0.00" if text == "-0.00" else text


def part(value: float | None) -> str:
    """In percent; "-" for what is not known."""
    return "-" if value is None else f"{value:.0%}"


def _of_job(job: JobCost) -> tuple[str, ...]:
    of_gpus = job.cost - job.data_cost
    figures = (job.gpu_hours, job.cost, job.projected, job.startup_cost, job.lost_cost, job.data_cost)
    saved = (
        None if other is None else other - of_gpus for other in (job.on_demand_cost, job.type_blind_cost)
    )
    shared = f" (shares its GPU with {job.partner})" if job.partner else ""
    return (
        f"{job.namespace}/{job.job}{shared}",
        job.state,
        *map(amount, figures),
        *map(amount, saved),
        part(job.goodput),
    )


def _of_team(team: TeamCost) -> tuple[str, ...]:
    figures = (team.cost, team.projected, team.spent, team.budget)
    return (team.team or "(none)", f"{team.jobs}", *map(amount, figures), part(team.goodput))


def _of_pool(pool: PoolCostLine) -> tuple[str, ...]:
    figures = (pool.price, pool.bill, pool.jobs, pool.deleted_jobs, pool.idle, pool.data)
    return (f"{pool.pool} ({pool.gpu_type})", f"{pool.gpus}", *map(amount, figures), part(pool.goodput))
