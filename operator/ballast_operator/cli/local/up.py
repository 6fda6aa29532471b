"""``ballast up``: start of a local cluster in the background."""

import json
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import OBJECT
from ballast_policies.contract.yaml_text import parse_yaml

if TYPE_CHECKING:
    from ballast_localcluster import LocalCluster
    from ballast_localcluster.kubelets.start import RealNodes
    from ballast_localcluster.nodes.node import ProcessNode


OPERATOR = "operator"
"""Name of the operator among the cluster's processes."""

KARPENTER = "karpenter"
"""Name of Karpenter among them."""

OPERATOR_GRACE_SECONDS = 10.0

TOKEN_SECONDS = 365 * 24 * 3600
"""The operator's token is valid for as long as a local cluster may stay."""

NO_OPERATOR = """\
No operator runs on it. To run one: `ballast down`, and `ballast up` without --no-operator; or, by hand:
  ballast crds --output-dir - | kubectl apply --server-side -f -
  kubectl create namespace ballast-system
  ballast operator"""


@click.command()
@click.option(
    "--nodes",
    default="default",
    show_default=True,
    metavar="FILE|default|none",
    help="YAML file that describes process nodes; see docs/localcluster.md.",
)
@click.option("--name", default="ballast", show_default=True, help="Name of the cluster; several may run.")
@click.option(
    "--warm-start/--no-warm-start",
    default=True,
    show_default=True,
    help="Fork the trainers from one process that has torch imported (from the first one on), or start each.",
)
@click.option(
    "--operator/--no-operator",
    "operator",
    default=True,
    show_default=True,
    help="Install Ballast and run its operator; without: a plain Kubernetes cluster.",
)
@click.option(
    "--karpenter",
    is_flag=False,
    flag_value="default",
    metavar="[FILE]",
    help="Also run Karpenter, which makes process nodes for pods that wait, of the instance types in FILE "
    "(JSON) or of the usual ones; built at the first use. See docs/tasks/spot.md.",
)
@click.option(
    "--real-nodes",
    type=click.IntRange(1),
    metavar="N",
    help="Run the first N of the nodes as kubelets and containers (root, Linux); built at the first use. "
    "See docs/localcluster.md.",
)
@click.option(
    "--image",
    "images",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="With --real-nodes: images that every node has, as `docker save` writes them; repeatable.",
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def up(
    nodes: str,
    name: str,
    warm_start: bool,
    operator: bool,
    karpenter: str | None,
    output: str,
    **real: Any,
) -> None:
    """Start a local Kubernetes cluster in the background, with Ballast's operator.

    A real control plane (etcd, API server, controllers, scheduler) and process nodes, whose pods are
    processes of this machine and whose GPUs are emulated.  It stays until `ballast down`.
    """
    from ballast_localcluster.background import up as start
    from ballast_localcluster.errors import LocalClusterError
    from ballast_localcluster.nodes.node import default_nodes

    from ballast_operator.local_operator import write_definitions

    try:
        chosen = {"default": default_nodes, "none": tuple}.get(nodes, lambda: read_nodes(Path(nodes)))()
        chosen, kubelets = _run_by(chosen, nodes, karpenter, **real)
        autoscale = _autoscaler(karpenter)

        def prepare(cluster: "LocalCluster") -> None:
            autoscale(cluster)
            if operator:
                _start_operator(cluster)

        with tempfile.TemporaryDirectory(prefix="ballast-up-") as folder:
            crds = [write_definitions(Path(folder))] if operator else []
            cluster = start(name, chosen, crds, warm_start=warm_start, real_nodes=kubelets, prepare=prepare)
    except (LocalClusterError, TimeoutError) as error:
        raise click.ClickException(str(error)) from error
    log, karpenter_log = (cluster.folder / "logs" / f"{part}.log" for part in (OPERATOR, KARPENTER))
    running, scales = log.exists(), karpenter_log.exists()
    if output == "json":
        click.echo(
            json.dumps(
                {
                    "name": cluster.name,
                    "kubeconfig": str(cluster.kubeconfig),
                    "kubectl": str(cluster.kubectl),
                    "folder": str(cluster.folder),
                    "nodes": list(cluster.nodes),
                    "wasRunning": cluster.was_running,
                    "operatorLog": str(log) if running else None,
                    "karpenterLog": str(karpenter_log) if scales else None,
                }
            )
        )
        return
    if cluster.was_running:
        click.echo(f"Cluster {name} is already running; nothing was changed.")
    else:
        kind = "real nodes (kubelet, containerd; no GPUs)" if kubelets else "process nodes (emulated GPUs)"
        click.echo(f"Cluster {name} is up, with {len(cluster.nodes)} {kind}.")
    kubectl = "kubectl" if shutil.which("kubectl") else shlex.quote(str(cluster.kubectl))
    click.echo(f"The operator runs, and ends with the cluster. Its log: {log}" if running else NO_OPERATOR)
    if scales:
        click.echo(f"Karpenter makes nodes for pods that wait. Its log: {karpenter_log}")
    # The examples' volume: kubelet would make it root's, and pods run as another user.
    volume = "\n  install -d -m 777 /var/tmp/ballast-demo" if kubelets and nodes == "default" else ""
    click.echo(f"""
Next:
  export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}{volume}
  {kubectl} apply -f {_examples() if nodes == "default" else "POLICY.yaml -f JOB.yaml"}
  ballast top                   # pools and jobs, live; `ballast explain JOB` says why a job runs or waits

Nodes: {kubectl} get nodes -L ballast.dev/pool,ballast.dev/capacity-type
Logs: {cluster.folder / "logs"}
Stop: ballast down{"" if name == "ballast" else f" --name {name}"}""")


def read_nodes(path: Path) -> "tuple[ProcessNode, ...]":
    """The nodes that a YAML file describes. Raises ClickException: it cannot be read; NodesFileError."""
    from ballast_localcluster.nodes.node import nodes_of

    try:
        return nodes_of(parse_yaml(OBJECT.read(path)), path)
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}. To fix: name a file of nodes") from error
    except ContractError as error:
        raise click.ClickException(f"{path}: {error}") from error


def _run_by(
    described: "tuple[ProcessNode, ...]",
    source: str,
    karpenter: str | None,
    *,
    real_nodes: int | None,
    images: tuple[Path, ...],
) -> "tuple[tuple[ProcessNode, ...], RealNodes | None]":
    """The nodes, or the first ``real_nodes`` and what runs them; of the default ones, the fastest first."""
    from ballast_localcluster.kubelets.start import RealNodes

    if not real_nodes:
        if images:
            raise click.UsageError("--image needs --real-nodes: process nodes do not read images.")
        return described, None
    if karpenter is not None:
        raise click.UsageError("--karpenter makes process nodes, which --real-nodes does not mix with.")
    if real_nodes > len(described):
        raise click.UsageError(
            f"--real-nodes {real_nodes}: {source} describes {len(described)} nodes. "
            "To fix: describe more in a file (--nodes)."
        )
    ordered = tuple(reversed(described)) if source == "default" else described
    return ordered[:real_nodes], RealNodes(images)


def _autoscaler(instance_types: str | None) -> Callable[["LocalCluster"], object]:
    """Starter of Karpenter, found or built before anything runs; None, ``default`` or a path: its types."""
    if instance_types is None:
        return lambda cluster: None
    from ballast_localcluster.karpenter.start import (
        INSTANCE_TYPES,
        find_karpenter,
        read_instance_types,
        start_karpenter,
    )

    path = INSTANCE_TYPES if instance_types == "default" else Path(instance_types)
    read_instance_types(path)
    found = find_karpenter()
    return lambda cluster: start_karpenter(cluster, found, name=KARPENTER, instance_types=path)


def _examples() -> str:
    """The demo's manifests, by the shortest path from here."""
    from ballast_operator.demo.report import demo_manifests

    folder = demo_manifests()
    here = Path.cwd()
    return shlex.quote(f"{folder.relative_to(here) if folder.is_relative_to(here) else folder}/")


def _start_operator(cluster: "LocalCluster") -> None:
    """Install Ballast's roles, and run the operator under the warden until it leads. Raises StartError."""
    from ballast_localcluster.errors import StartError
    from ballast_localcluster.supervision.owner import tail
    from ballast_localcluster.waiting import Limit, wait_until
    from kubernetes import client
    from kubernetes.dynamic import DynamicClient

    from ballast_operator.kube.leadership import LEASE_NAME
    from ballast_operator.local_operator import (
        OPERATOR_NAMESPACE,
        api_client,
        apply_objects,
        install_objects,
        operator_command,
        write_operator_kubeconfig,
    )

    with api_client(cluster.kubeconfig) as api:
        kube = DynamicClient(api, cache_file=str(cluster.folder / "discovery.json"))
        apply_objects(kube, install_objects(OPERATOR_NAMESPACE))
        account = write_operator_kubeconfig(
            api, cluster.kubeconfig, cluster.folder / "operator.kubeconfig", token_seconds=TOKEN_SECONDS
        )
        log = cluster.run(OPERATOR, operator_command(account), grace_seconds=OPERATOR_GRACE_SECONDS)
        leases = client.CoordinationV1Api(api)

        def leads() -> bool:
            found = leases.list_namespaced_lease(OPERATOR_NAMESPACE).items
            return any(lease.metadata.name == LEASE_NAME and lease.spec.holder_identity for lease in found)

        try:
            wait_until(leads, "the operator to lead", Limit.CONTROLLERS_READY)
        except TimeoutError as error:
            raise StartError(f"{error}. The end of its log:\n{tail(log)}") from error


@click.command()
@click.option("--name", default="ballast", show_default=True, help="Name of the cluster, as given to up.")
def down(name: str) -> None:
    """Stop a local cluster: its pods, its control plane, its files."""
    from ballast_localcluster.background import down as stop
    from ballast_localcluster.background import names
    from ballast_localcluster.errors import LocalClusterError

    try:
        stopped = stop(name)
    except (LocalClusterError, TimeoutError) as error:
        raise click.ClickException(str(error)) from error
    if not stopped:
        others = ", ".join(names())
        raise click.ClickException(
            f"no cluster {name!r} runs here" + (f"; these do: {others}" if others else "")
        )
    click.echo(f"Cluster {name} is down, and nothing of it is left.")
