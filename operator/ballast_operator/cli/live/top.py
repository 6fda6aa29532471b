"""``ballast top``: pools and jobs of a live cluster."""

import asyncio
import contextlib

import click

from ballast_operator.cli.live.connection import cluster_errors, kubeconfig_option
from ballast_operator.cli.option_names import Number


@click.command()
@click.option("-n", "--namespace", default="", help="Jobs of this namespace; default: all.")
@kubeconfig_option
@click.option("--once", is_flag=True, help="Look once and end.")
@click.option("--every", default=1.0, show_default=True, type=Number(min=0.1), help="Seconds between looks.")
@click.option(
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: one line a look.",
)
def top(namespace: str, kubeconfig: str | None, once: bool, every: float, output: str) -> None:
    """Watch node pools and training jobs until Ctrl-C."""
    with cluster_errors(), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_show(namespace, kubeconfig, once, every, output))


async def _show(namespace: str, kubeconfig: str | None, once: bool, every: float, output: str) -> None:
    from rich.console import Console
    from rich.live import Live

    from ballast_operator.cli.live.overview_tables import Tables
    from ballast_operator.kube.client import connect, is_missing, missing
    from ballast_operator.report.overview import read_overview

    async with await connect(kubeconfig) as cluster:
        if namespace and await is_missing(cluster, namespace):
            raise click.ClickException(missing(namespace))
        if output == "json":
            while True:
                click.echo((await read_overview(cluster, namespace)).to_json())
                if once:
                    return
                await asyncio.sleep(every)
        if once:
            Console().print(Tables(await read_overview(cluster, namespace)))
            return
        with Live(Tables(await read_overview(cluster, namespace)), screen=False) as live:
            while True:
                await asyncio.sleep(every)
                live.update(Tables(await read_overview(cluster, namespace)))
