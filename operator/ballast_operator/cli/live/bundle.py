"""``ballast support-bundle``: what somebody else needs who looks for a fault, without secrets."""

import asyncio
import contextlib
import dataclasses
import datetime
import io
import json
import os
import tarfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ballast_operator.cli.live.connection import cluster_errors, kubeconfig_option, namespace_option
from ballast_operator.cli.option_names import NewFile

if TYPE_CHECKING:
    from ballast.client import AsyncClient

LEFT_OUT = "(left out)"
MOST_ITEMS = 5000
MOST_LINES, MOST_LOG = 100_000, 10 * 1024 * 1024
"""Lines and bytes that are kept of a log: the last ones."""

OBJECTS = {
    "clusterpolicies": "/apis/ballast.dev/v1alpha1/clusterpolicies",
    "trainingjobs": "/apis/ballast.dev/v1alpha1/trainingjobs",
    "nodes": "/api/v1/nodes",
    "pods": "/api/v1/pods?labelSelector=ballast.dev/job",
    "events": "/api/v1/events",
    "leases": "/apis/coordination.k8s.io/v1/leases?labelSelector=ballast.dev/job",
}


@click.command("support-bundle")
@namespace_option("Where the operator runs.", "ballast-system")
@click.option(
    "--file",
    type=NewFile(),
    help="What to write. [default: ballast-support-TIME.tar.gz]",
)
@kubeconfig_option
def support_bundle(namespace: str, file: Path | None, kubeconfig: str | None) -> None:
    """Write a tar.gz of policies, jobs, nodes, pods, events, the operator's logs, and `ballast doctor`.

    Secrets are not read; left out are what was applied last and values of environment variables, of HTTP
    headers and on command lines.
    """
    now = datetime.datetime.now(datetime.UTC)
    file = file or Path(f"ballast-support-{now:%Y%m%d-%H%M%S}.tar.gz")
    with cluster_errors():
        parts = asyncio.run(_collect(kubeconfig, namespace))
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as handle, tarfile.open(fileobj=handle, mode="w:gz") as archive:  # noqa: PTH123
        for name, data in parts.items():
            entry = tarfile.TarInfo(f"ballast-support/{name}")
            entry.size, entry.mtime = len(data), int(now.timestamp())
            archive.addfile(entry, io.BytesIO(data))
    partial = [name.removesuffix(".error.txt") for name in parts if name.endswith(".error.txt")]
    if partial:
        click.echo(f"not whole: {', '.join(partial)}; their .error.txt files say why", err=True)
    click.echo(
        f"{file}: {len(parts)} files. Look through it before you send it: names and messages are in it"
    )


async def _collect(kubeconfig: str | None, namespace: str) -> dict[str, bytes]:
    from ballast.client import AsyncClient, BallastError

    from ballast_operator.cli.live.doctor import examine

    findings = [dataclasses.asdict(one) for one in await examine(kubeconfig, namespace)]
    parts = {"doctor.json": _json(findings)}
    async with AsyncClient(kubeconfig, namespace=namespace) as client:
        server = await client.connection.request("get", "/version")
        own = {name: version(name) for name in ("ballast-operator", "ballast-policies", "ballast-client")}
        parts["versions.json"] = _json({"server": server, "here": own})
        where = {"operator-pods": f"/api/v1/namespaces/{namespace}/pods", **OBJECTS}
        where["operator-deployments"] = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        for name, path in where.items():
            try:
                found = await _list(client, path)
                if len(found) > MOST_ITEMS:
                    parts[f"{name}.error.txt"] = f"{name}.json has the first {MOST_ITEMS} alone".encode()
                parts[f"{name}.json"] = _json(without_secrets(found[:MOST_ITEMS]))
            except BallastError as error:
                parts[f"{name}.error.txt"] = str(error).encode()
        parts |= await _logs(client, namespace)
    return parts | _local_log(kubeconfig)


async def _list(client: "AsyncClient", path: str) -> list[Any]:
    """The first items of a list, one more than are kept where there are more."""
    path, _, selector = path.partition("?labelSelector=")
    query = {"labelSelector": selector} if selector else {}
    return [item async for item in client.connection.items(path, query, most=MOST_ITEMS + 1)]


def without_secrets(value: Any) -> Any:
    """Objects without what may be a password: values of environment variables, headers and command lines.

    What is only a copy of them is left out, too.
    """
    if isinstance(value, list):
        return [without_secrets(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for key, part in value.items():
        if key == "managedFields" or key.startswith("kubectl.kubernetes.io/last-applied"):
            continue
        if key in ("env", "httpHeaders") and isinstance(part, list):
            kept[key] = [_variable(one) for one in part]
        elif key in ("command", "args") and isinstance(part, list):
            kept[key] = [_option(one) for one in part]
        else:
            kept[key] = without_secrets(part)
    return kept


def _variable(one: Any) -> Any:
    if isinstance(one, Mapping) and "value" in one:
        return {**one, "value": LEFT_OUT}
    return one if isinstance(one, Mapping) else LEFT_OUT


def _option(word: Any) -> str:
    """The name of an option of a command line; the rest may be a value."""
    name, equals, _ = str(word).partition("=")
    if not name.startswith("-"):
        return LEFT_OUT
    if not name.startswith("--"):
        return name[:2]
    return f"{name}={LEFT_OUT}" if equals else name


async def _logs(client: "AsyncClient", namespace: str) -> dict[str, bytes]:
    """The end of the logs of each of the operator's containers, now and before its last restart."""
    from ballast.client import BallastError

    found: dict[str, bytes] = {}
    with contextlib.suppress(BallastError):
        for pod in await _list(client, f"/api/v1/namespaces/{namespace}/pods"):
            name = pod["metadata"]["name"]
            for container in pod["spec"]["containers"]:
                for previous in ("false", "true"):
                    query = {
                        "container": container["name"],
                        "previous": previous,
                        "tailLines": str(MOST_LINES),
                    }
                    end, text = ".previous.log" if previous == "true" else ".log", bytearray()
                    with contextlib.suppress(BallastError):  # what came before an error is kept
                        path = f"/api/v1/namespaces/{namespace}/pods/{name}/log"
                        async for line in client.connection.lines(path, query):
                            text += line + b"\n"
                            del text[:-MOST_LOG]
                    if text:
                        found[f"logs/{name}-{container['name']}{end}"] = bytes(text)
    return found


def _local_log(kubeconfig: str | None) -> dict[str, bytes]:
    """The log of the operator of ``ballast up``, whose kubeconfig this is."""
    name = kubeconfig or os.environ.get("KUBECONFIG") or ""
    log = Path(name).parent.parent / "logs" / "operator.log"
    if Path(name).name != "admin.kubeconfig" or not log.is_file():
        return {}
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - MOST_LOG))
        return {"logs/operator.log": handle.read()}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace")
