"""``ballast cost``: what jobs, teams and pools of a live cluster cost."""

import asyncio
import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.live.connection import cluster_errors, kubeconfig_option
from ballast_operator.cli.live.twin import Moment
from ballast_operator.cli.option_names import import_from_here, printable

if TYPE_CHECKING:
    from ballast_operator.report.costs import Costs


NOT_IN_TABLES = ("by_pool", "data_by_pool", "badput", "gpu_hours_by_pool")


@click.command()
@click.option("-n", "--namespace", default="", help="Jobs of this namespace, without pools; default: all.")
@kubeconfig_option
@click.option(
    "--by",
    type=click.Choice(["job", "team", "pool"]),
    help="Only this table. [default: all; with --output csv: job]",
)
@click.option("--output", type=click.Choice(["text", "json", "csv"]), default="text", show_default=True)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
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
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --against: the operator's file; in its pod it is set.",
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
    """What jobs, teams and pools have cost and will cost, what was saved, and what was wasted.

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
    with cluster_errors():
        found = asyncio.run(_read(namespace, kubeconfig))
    if plot is not None:
        from ballast_operator.report.cost_plot import as_html

        try:
            plot.write_text(as_html(found), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"--plot: {error}. To fix: name a file that can be written") from error
    if output == "json":
        content = found.to_dict()
        kept = content if by is None else {"at": content["at"], f"{by}s": content[f"{by}s"]}
        click.echo(json.dumps(kept, indent=2))
    elif output == "csv":
        click.echo(as_csv(found, by or "job"), nl=False)
    else:
        _print(found, by)


def _print_against(
    policies: tuple[str, ...], output: str, history: Path | None, since: float | None, until: float | None
) -> None:
    from ballast_operator.cli.live.cost_against import against, as_text

    if history is None:
        raise click.UsageError("--against: needs --history. To fix: name the operator's file")
    for name in policies:
        import_from_here(name)
    found = against(history, policies, since, until)
    click.echo(json.dumps(found, indent=2) if output == "json" else printable(as_text(found)))


async def _read(namespace: str, kubeconfig: str | None) -> "Costs":
    from ballast_operator.kube.client import connect, is_missing, missing
    from ballast_operator.report.costs import read_costs

    async with await connect(kubeconfig) as cluster:
        if namespace and await is_missing(cluster, namespace):
            raise click.ClickException(missing(namespace))
        return await read_costs(cluster, namespace)


def as_csv(found: "Costs", by: str) -> str:
    """One table, its first line the names of the columns; what is not known is empty."""
    rows: list[dict[str, Any]] = [dataclasses.asdict(row) for row in _rows(found, by)]
    for row in rows:
        for name in NOT_IN_TABLES:
            row.pop(name, None)
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(_kind(by)) if field.name not in NOT_IN_TABLES]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _kind(by: str) -> type[Any]:
    from ballast_operator.report.costs import JobCost, PoolCostLine, TeamCost

    return {"job": JobCost, "team": TeamCost, "pool": PoolCostLine}[by]


def _rows(found: "Costs", by: str) -> tuple[Any, ...]:
    return {"job": found.jobs, "team": found.teams, "pool": found.pools}[by]


def _print(found: "Costs", by: str | None) -> None:
    from rich.console import Console

    from ballast_operator.cli.live.cost_tables import CostTables

    console = Console()
    console.print(CostTables(found, by))
    if by is None and not found.jobs and not found.pools:
        console.print("there are no jobs, and no ClusterPolicy with a bill yet")
