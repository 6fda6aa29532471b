"""``ballast up``: start a local cluster that stays."""

import json
from pathlib import Path

import click


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
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def up(nodes: str, name: str, warm_start: bool, output: str) -> None:
    """Start a local Kubernetes cluster in the background.

    A real control plane (etcd, API server, controllers, scheduler) and process nodes, whose pods are
    processes of this machine and whose GPUs are emulated.  It stays until `ballast down`.
    """
    from ballast_localcluster.background import up as start
    from ballast_localcluster.default_nodes import default_nodes, read_nodes
    from ballast_localcluster.errors import LocalClusterError

    try:
        chosen = {"default": default_nodes, "none": tuple}.get(nodes, lambda: read_nodes(Path(nodes)))()
        cluster = start(name, chosen, warm_start=warm_start)
    except LocalClusterError as error:
        raise click.ClickException(str(error)) from error
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
                }
            )
        )
        return
    if cluster.was_running:
        click.echo(f"Cluster {name} is running already, and left as it is.")
    else:
        click.echo(f"Cluster {name} is up, with {len(cluster.nodes)} process nodes (emulated GPUs).")
    click.echo(f"""
  export KUBECONFIG={cluster.kubeconfig}
  kubectl get nodes -L ballast.dev/pool,ballast.dev/capacity-type

No kubectl? This one was built with the cluster: {cluster.kubectl}
Logs: {cluster.folder / "logs"}
Stop: ballast down{"" if name == "ballast" else f" --name {name}"}""")
