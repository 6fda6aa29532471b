"""``ballast top``: pools and jobs of a live cluster."""

import asyncio
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ballast_operator.report.overview import Overview


@click.command()
@click.option("-n", "--namespace", default="", help="Jobs of this namespace; default: all.")
@click.option("--kubeconfig", type=click.Path(exists=True, dir_okay=False), help="Default: $KUBECONFIG.")
@click.option("--once", is_flag=True, help="Look once and end.")
@click.option(
    "--every", default=1.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between looks."
)
@click.option(
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: one line a look.",
)
def top(namespace: str, kubeconfig: str | None, once: bool, every: float, output: str) -> None:
    """Watch node pools and training jobs until Ctrl-C."""
    from kubernetes.aio.config import ConfigException

    from ballast_operator.errors import OperatorError

    try:
        asyncio.run(_show(namespace, kubeconfig, once, every, output))
    except KeyboardInterrupt:
        return
    except (OperatorError, ConfigException) as error:
        raise click.ClickException(f"{error}. To fix: give --kubeconfig, or mend the connection") from error


async def _show(namespace: str, kubeconfig: str | None, once: bool, every: float, output: str) -> None:
    from rich.console import Console
    from rich.live import Live

    from ballast_operator.kube.client import connect
    from ballast_operator.report.overview import read_overview

    async with await connect(kubeconfig) as cluster:
        if output == "json":
            while True:
                click.echo((await read_overview(cluster, namespace)).to_json())
                if once:
                    return
                await asyncio.sleep(every)
        if once:
            Console().print(as_tables(await read_overview(cluster, namespace)))
            return
        with Live(as_tables(await read_overview(cluster, namespace)), screen=False) as live:
            while True:
                await asyncio.sleep(every)
                live.update(as_tables(await read_overview(cluster, namespace)))


def as_tables(seen: "Overview") -> "RenderableType":
    """The overview as two tables."""
    from rich.console import Group
    from rich.table import Table

    pools = Table(title="Pools", title_justify="left")
    for column in ("pool", "GPU type", "nodes", "GPUs held"):
        pools.add_column(column)
    for pool in seen.pools:
        pools.add_row(pool.pool, pool.gpu_type, str(pool.nodes), f"{pool.held} of {pool.gpus}")
    jobs = Table(title="Jobs (speeds marked * are emulated)", title_justify="left", expand=True)
    for column in ("job", "state", "GPUs", "step", "steps/s", "loss", "imbalance", "restarts", "cost"):
        jobs.add_column(column, no_wrap=True)
    jobs.add_column("why", overflow="fold")
    for job in seen.jobs:
        speed = (
            "-"
            if job.steps_per_second is None
            else f"{job.steps_per_second:.2f}{'*' if job.emulated else ''}"
        )
        jobs.add_row(
            f"{job.namespace}/{job.job}",
            job.state,
            f"{job.gpus} x {job.gpu_type}" if job.gpus else "-",
            f"{job.step} / {job.total_steps}",
            speed,
            "-" if job.loss is None else f"{job.loss:.3f}",
            "-" if job.imbalance is None else f"{job.imbalance:.0%}",
            str(job.restarts),
            f"{job.cost:.2f}",
            job.why,
        )
    return Group(*(f"ClusterPolicy {line}" for line in seen.policies), pools, jobs)
