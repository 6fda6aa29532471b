"""The cluster that a command looks at: its option, and what is said where it cannot be reached."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ballast_operator.cli.option_names import printable

if TYPE_CHECKING:
    from ballast_operator.kube.caches import Caches
    from ballast_operator.kube.client import Cluster
    from ballast_operator.kube.kinds import Kind

Found = TypeVar("Found")
Command = TypeVar("Command", bound=Callable[..., Any])


def _of_local_cluster(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The file of ``ballast up``'s cluster, where no other is given and none is at its usual place."""
    usual = os.path.expanduser("~/.kube/config")  # noqa: PTH111 - a user may have no home
    if value is not None or os.environ.get("KUBECONFIG") or Path(usual).exists():
        return value
    try:
        from ballast_localcluster.background import clusters_folder
        from ballast_localcluster.errors import LocalClusterError
    except ModuleNotFoundError:
        return None
    try:
        found = clusters_folder() / "ballast" / "credentials" / "admin.kubeconfig"
    except LocalClusterError:
        return None
    return str(found) if found.exists() else None


kubeconfig_option = click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False),
    callback=_of_local_cluster,
    help="Default: $KUBECONFIG, ~/.kube/config, or the cluster of `ballast up`.",
)


COMPLETION_SECONDS = 2.0
"""Time after which a shell completes no names of objects."""


def _names_at(path: str) -> "Callable[[click.Context, click.Parameter, str], list[str]]":
    """Completion by the names of a list of the API server; none where it does not answer."""

    async def read(kubeconfig: str | None, path: str) -> list[str]:
        from ballast.client import AsyncClient, BallastError

        with contextlib.suppress(BallastError):
            async with AsyncClient(kubeconfig, timeout=COMPLETION_SECONDS) as client:
                return [str(item["metadata"]["name"]) async for item in client.connection.items(path)]
        return []

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
        given = context.params
        at = path.format(namespace=given.get("namespace") or "default")
        return [name for name in asyncio.run(read(given.get("kubeconfig"), at)) if name.startswith(begun)]

    return complete


job_argument = click.argument(
    "job", shell_complete=_names_at("/apis/ballast.dev/v1alpha1/namespaces/{namespace}/trainingjobs")
)


def namespace_option(meaning: str, default: str | None = "") -> Callable[[Command], Command]:
    """``--namespace`` of a command."""
    return click.option(
        "-n",
        "--namespace",
        default=default,
        show_default=bool(default),
        help=meaning,
        shell_complete=_names_at("/api/v1/namespaces"),
    )


@contextlib.contextmanager
def cluster_errors() -> Iterator[None]:
    """Context in which errors of the cluster or of the connection's settings become ClickExceptions."""
    from ballast.client import BallastError
    from ballast.client.connection import LATE_FIX
    from kubernetes.aio.config import ConfigException

    from ballast_operator.errors import Forbidden, NotFound, OperatorError

    try:
        yield
    except BallastError as error:
        raise click.ClickException(printable(str(error))) from error
    except ConfigException as error:
        fix = "give --kubeconfig, or set KUBECONFIG; `ballast up` starts a cluster here and prints its file"
        raise click.ClickException(f"{error}. To fix: {fix}") from error
    except OperatorError as error:
        fix = "give --kubeconfig, or check the connection"
        if isinstance(error.__cause__, TimeoutError):
            fix = LATE_FIX
        elif isinstance(error, Forbidden):
            fix = "ask for the right, or name a namespace where you have it"
        elif isinstance(error, NotFound):
            fix = "install Ballast's custom resource definitions (`ballast crds`)"
        elif "HTTP 401" in str(error):
            fix = "log in again, or give another kubeconfig"
        raise click.ClickException(printable(f"{error}. To fix: {fix}")) from error


def asked(
    kubeconfig: str | None, question: "Callable[[Cluster], Awaitable[Found]]", *, namespace: str = ""
) -> Found:
    """Answer of the cluster to a question; ``namespace``: has to be there; empty: none is named.

    Raises:
        click.ClickException: the cluster cannot be reached or read, or has no such namespace.
    """
    from ballast.client.connection import missing

    from ballast_operator.kube.client import connect, is_missing

    async def ask() -> Found:
        async with await connect(kubeconfig) as cluster:
            if namespace and await is_missing(cluster, namespace):
                raise click.ClickException(missing(namespace))
            return await question(cluster)

    with cluster_errors():
        return asyncio.run(ask())


@contextlib.asynccontextmanager
async def followed(
    cluster: "Cluster", caches: "Caches", namespace: str = "", *, also: "Iterable[Kind]" = ()
) -> AsyncIterator[str]:
    """Context in which watches keep ``caches``; ``namespace``: of jobs; empty: all.

    ``also``: kinds beside jobs and ClusterPolicies, where the account may list them.

    Yields:
        Why ClusterPolicies are not seen, which rights in a namespace do not reach; empty: they are.

    Raises:
        OperatorError: the cluster cannot be reached or read.
    """
    from ballast_operator.errors import Forbidden
    from ballast_operator.kube.kinds import JOB, POLICY
    from ballast_operator.kube.reflector import Reflector, where

    kinds, left_out = [JOB, POLICY, *also], ""
    for kind in tuple(kinds):
        try:
            items, version = await cluster.list(kind, **where(kind, namespace))
        except Forbidden as error:
            if kind is JOB or (kind is POLICY and not namespace):
                raise
            kinds.remove(kind)
            left_out = left_out or str(error)
        else:
            caches.listed(kind, items, version)
    watches = [asyncio.create_task(Reflector(caches, cluster, kind, namespace).run()) for kind in kinds]
    try:
        yield left_out
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
