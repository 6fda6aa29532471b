"""``ballast ui``: the page of an operator, of a cluster, or of a simulation, in a browser."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ballast_policies.contract.limits import Limits

from ballast_operator.cli.live.connection import (
    asked,
    cluster_errors,
    followed,
    kubeconfig_option,
    namespace_option,
)

if TYPE_CHECKING:
    from ballast_operator.page.server import Page

RESULT = Limits(most_bytes=256 * 2**20)
"""Limits of a simulation's result."""


@click.command()
@click.argument("result", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@namespace_option("Where the operator runs.", "ballast-system")
@click.option("--service", default="ballast-ui", show_default=True, help="Service of its page.")
@click.option(
    "--direct", is_flag=True, help="Read the cluster with your own rights; no page is needed there."
)
@kubeconfig_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8090,
    show_default=True,
    help="Port on this machine; 0: a free one.",
)
@click.option("--open/--no-open", "opens", default=True, help="Open a browser.")
def ui(
    result: Path | None,
    namespace: str,
    service: str,
    direct: bool,
    kubeconfig: str | None,
    port: int,
    opens: bool,
) -> None:
    """Look at a cluster in a browser until Ctrl-C: pools, jobs, teams, decisions.

    With RESULT, what `ballast simulate --jobs --output json` has printed, look at that, without a cluster.
    """
    if result is not None and direct:
        raise click.UsageError("--direct reads a cluster. To fix: leave it or RESULT out")
    with contextlib.suppress(KeyboardInterrupt):
        try:
            if result is not None:
                asyncio.run(_simulation(result, port, opens))
            elif direct:
                with cluster_errors():
                    asyncio.run(_directly(kubeconfig, port, opens))
            else:
                _forward(namespace, service, kubeconfig, port, opens)
        except OSError as error:
            raise click.ClickException(f"{error}. To fix: choose another --port") from error


def _say(address: str, opens: bool) -> None:
    click.echo(f"{address}\nEnd with Ctrl-C.")
    if opens:
        click.launch(address)


async def _serve(page: "Page", key: str, port: int, opens: bool) -> None:
    from ballast_operator.page.server import serving

    async with serving(page, host="127.0.0.1", port=port) as served:
        _say(f"http://127.0.0.1:{served}/open?key={key}", opens)
        await asyncio.Event().wait()


async def _simulation(path: Path, port: int, opens: bool) -> None:
    from ballast_operator.page.access import OneKey
    from ballast_operator.page.server import Page
    from ballast_operator.page.simulated import simulated

    try:
        recent = simulated(_read(path))
    except ValueError as error:
        raise click.ClickException(f"{path}: {error}") from error
    access = OneKey()
    page = Page(recent, access, title=path.name, window="all")
    await _serve(page, access.key, port, opens)


def _read(path: Path) -> Any:
    try:
        return json.loads(RESULT.read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}. To fix: give what `ballast simulate` has printed") from error


async def _directly(kubeconfig: str | None, port: int, opens: bool) -> None:
    from ballast_operator.history.recent import Recent
    from ballast_operator.kube.caches import Caches
    from ballast_operator.kube.client import connect
    from ballast_operator.kube.kinds import JOB, LEASE, POD
    from ballast_operator.page.access import OneKey
    from ballast_operator.page.server import Page

    async with await connect(kubeconfig) as cluster:
        caches, access = Caches(), OneKey(lambda: cluster.serves(JOB))
        recent = Recent(caches, clock=time.time)
        async with followed(cluster, caches, also=(POD, LEASE)):
            page = Page(recent, access, title=cluster.configuration.host)
            await _serve(page, access.key, port, opens)


def _built_kubectl() -> str | None:
    """The kubectl that was built for `ballast up`; None: there is none."""
    try:
        from ballast_localcluster.binaries import present_binaries
        from ballast_localcluster.errors import LocalClusterError
    except ModuleNotFoundError:
        return None
    try:
        found = present_binaries()
    except LocalClusterError:
        return None
    return str(found.program("kubectl")) if found else None


def _forward(namespace: str, service: str, kubeconfig: str | None, port: int, opens: bool) -> None:
    """Forward a port of this machine to the operator's page, by kubectl."""
    # Of a cluster that does not answer kubectl says five lines, and not what to change.
    asked(kubeconfig, lambda _: asyncio.sleep(0), namespace=namespace)
    kubectl = shutil.which("kubectl") or _built_kubectl()
    if kubectl is None:
        fix = "install kubectl, or read the cluster with your own rights: ballast ui --direct"
        raise click.ClickException(f"kubectl is not installed. To fix: {fix}")
    command = [kubectl, *(["--kubeconfig", kubeconfig] if kubeconfig else []), "--namespace", namespace]
    command += ["port-forward", f"service/{service}", f"{port or ''}:ui"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("Forwarding from 127.0.0.1:"):
                    forwarded = line.split()[2]
                    _say(f"http://{forwarded}/", opens)
        except BaseException:
            process.terminate()
            raise
        if process.wait():
            fix = "set ui.enabled in the chart, see --namespace and --service, or use --direct"
            raise click.ClickException(f"kubectl could not forward to service/{service}. To fix: {fix}")
