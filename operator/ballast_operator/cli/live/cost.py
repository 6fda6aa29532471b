"""``ballast cost``: what jobs, teams and pools of a live cluster cost."""

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.live.connection import asked, kubeconfig_option, namespace_option
from ballast_operator.cli.live.history import Moment, against_text
from ballast_operator.cli.live.history import against as against_policies
from ballast_operator.cli.option_names import Database, NewFile, import_from_here, printable
from ballast_operator.cli.text_table import NARROW_COLUMNS, WIDE_COLUMNS, stacked, text_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from ballast_operator.report.costs import Costs, JobCost, PoolCostLine, TeamCost


NOT_IN_TABLES = ("by_pool", "data_by_pool", "badput", "gpu_hours_by_pool")


@click.command()
@namespace_option("Jobs of this namespace, without pools; default: all.")
@kubeconfig_option
@click.option(
    "--by",
    type=click.Choice(["job", "team", "pool"]),
    help="Only this table. [default: all; with --output csv: job]",
)
@click.option("--output", type=click.Choice(["text", "json", "csv"]), default="text", show_default=True)
@click.option(
    "--plot",
    type=NewFile(),
    metavar="FILE.html",
    help="Write a picture, too: pools, teams and jobs, with what was wasted.",
)
@click.option(
    "--against",
    multiple=True,
    metavar="POLICY",
    help="What the jobs of the operator's --history would have cost and taken under it, and the least that "
    "any could; may be repeated; all: every policy. No cluster is read.",
)
@click.option(
    "--history",
    envvar="BALLAST_HISTORY",
    show_envvar=True,
    type=Database(),
    help="With --against: the operator's file, or postgresql://...; in its pod it is set.",
)
@click.option(
    "--since", type=Moment(), metavar="TIME", help="With --against. [default: a day before --until]"
)
@click.option("--until", type=Moment(), metavar="TIME", help="With --against. [default: now]")
def cost(
    namespace: str,
    kubeconfig: str | None,
    by: str | None,
    output: str,
    plot: Path | None,
    against: tuple[str, ...],
    **recorded: Any,
) -> None:
    """Show costs of jobs, teams and pools, past and to come, with what was saved and wasted.

    Amounts are in the currency of the ClusterPolicy's pricePerGpuHour.
    """
    if against:
        if namespace or by or plot is not None or output == "csv":
            raise click.UsageError(
                "--against: not with --namespace, --by, --plot or csv. To fix: leave them out"
            )
        _print_against(against, output, **recorded)
        return
    if recorded["since"] is not None or recorded["until"] is not None:
        raise click.UsageError(
            "--since and --until: they go with --against. To fix: add it, or leave them out"
        )
    if namespace and by == "pool":
        raise click.UsageError("--by pool: pools belong to no namespace. To fix: leave --namespace out")
    if plot is not None and plot.suffix != ".html":
        raise click.UsageError(f"--plot: {plot.name} does not end in .html. To fix: name it so")
    from ballast_operator.report.costs import as_html, read_costs

    found = asked(kubeconfig, lambda cluster: read_costs(cluster, namespace), namespace=namespace)
    if plot is not None:
        plot.write_text(as_html(found), encoding="utf-8")
    if found.left_out:
        click.echo(printable(f"not shown: {found.left_out}"), err=True)
    if output == "json":
        content = found.to_dict()
        kept = content if by is None else {"at": content["at"], f"{by}s": content[f"{by}s"]}
        click.echo(json.dumps(kept, indent=2))
    elif output == "csv":
        click.echo(as_csv(found, by or "job"), nl=False)
    else:
        from rich.console import Console

        console = Console()
        console.print(CostTables(found, by))
        if by is None and not found.jobs and not found.pools:
            console.print("there are no jobs, and no ClusterPolicy with a bill yet")


def _print_against(
    policies: tuple[str, ...], output: str, history: str | None, since: float | None, until: float | None
) -> None:
    if history is None:
        raise click.UsageError("--against: needs --history. To fix: name what the operator has")
    for name in policies:
        import_from_here(name)
    found = against_policies(history, policies, since, until)
    click.echo(json.dumps(found, indent=2) if output == "json" else printable(against_text(found)))


def as_csv(found: "Costs", by: str) -> str:
    """A table, its first line the names of the columns; what is not known is empty."""
    from ballast_operator.report.costs import JobCost, PoolCostLine, TeamCost

    kind: Any = {"job": JobCost, "team": TeamCost, "pool": PoolCostLine}[by]
    names = [field.name for field in dataclasses.fields(kind) if field.name not in NOT_IN_TABLES]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in getattr(found, f"{by}s"))
    return text.getvalue()


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

    ``by``: only the table of the ``job``, ``team`` or ``pool``; None: all that have rows.
    """

    def __init__(self, found: "Costs", by: str | None) -> None:
        self._found, self._by = found, by

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Jobs, teams, pools."""
        found, size = self._found, 1 if options.max_width >= WIDE_COLUMNS else STACKED
        if options.max_width < NARROW_COLUMNS:
            size = len(_JOB)
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
    """Percentage; "-" for what is not known."""
    return "-" if value is None else f"{value:.0%}"


def _of_job(job: "JobCost") -> tuple[str, ...]:
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


def _of_team(team: "TeamCost") -> tuple[str, ...]:
    figures = (team.cost, team.projected, team.spent, team.budget)
    return (team.team or "(none)", f"{team.jobs}", *map(amount, figures), part(team.goodput))


def _of_pool(pool: "PoolCostLine") -> tuple[str, ...]:
    figures = (pool.price, pool.bill, pool.jobs, pool.deleted_jobs, pool.idle, pool.data)
    return (f"{pool.pool} ({pool.gpu_type})", f"{pool.gpus}", *map(amount, figures), part(pool.goodput))
