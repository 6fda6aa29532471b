"""Run Karpenter in a local cluster, with process nodes for the Node objects that it makes."""

import json
from pathlib import Path

from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.custom_resources import install_custom_resources
from ballast_localcluster.errors import NodesFileError
from ballast_localcluster.karpenter.binary import Karpenter
from ballast_localcluster.rest import Rest

INSTANCE_TYPES = Path(__file__).with_name("instance-types.json")
"""The usual instance types: one or two emulated GPUs of three types, spot and on demand."""

NODE_LABELS = {"kwok.x-k8s.io/node": "fake"}
"""On every Node that Karpenter's kwok provider makes."""

NODE_CLASS = "default"
"""The KWOKNodeClass that is made, for NodePools to refer to."""

_GRACE_SECONDS = 5.0


def read_instance_types(path: Path) -> tuple[str, ...]:
    """Names of the instance types in a file of the kwok provider; Karpenter itself ends at a bad one.

    Raises:
        NodesFileError: no such file, not JSON, or not a list of objects with a name, resources and offerings.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise NodesFileError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise NodesFileError(f"{path} is not JSON: {error}") from error
    keys = {"name": str, "architecture": str, "operatingSystems": list, "resources": dict, "offerings": list}
    entries = found if isinstance(found, list) else [found]
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), t) for k, t in keys.items()):
            raise NodesFileError(
                f"{path}: an instance type needs {', '.join(keys)}. To fix: see {INSTANCE_TYPES}."
            )
    if not isinstance(found, list) or not found:
        raise NodesFileError(f"{path}: expected a list of instance types. See {INSTANCE_TYPES}.")
    return tuple(entry["name"] for entry in found)


def start_karpenter(
    cluster: LocalCluster,
    karpenter: Karpenter,
    *,
    name: str = "karpenter",
    instance_types: Path = INSTANCE_TYPES,
) -> Path:
    """Install Karpenter's definitions and a node class, run it as the administrator, and serve its nodes.

    Args:
        cluster: it runs.
        karpenter: the program.
        name: among the cluster's processes.
        instance_types: a JSON file as the kwok provider reads it.

    Returns:
        Karpenter's log.

    Raises:
        CallError, TimeoutError: the API server refuses its definitions, or does not serve them in time.
    """
    rest = Rest(cluster.kubeconfig)
    install_custom_resources(rest, karpenter.crds)
    group = "karpenter.kwok.sh/v1alpha1"
    node_class = {"apiVersion": group, "kind": "KWOKNodeClass", "metadata": {"name": NODE_CLASS}}
    rest.apply(f"/apis/{group}/kwoknodeclasses/{NODE_CLASS}", node_class)
    cluster.adopt_nodes(NODE_LABELS)
    return cluster.run(
        name,
        [
            "/usr/bin/env",
            f"KUBECONFIG={cluster.kubeconfig}",
            str(karpenter.program),
            "-disable-leader-election",
            f"-instance-types-file-path={instance_types.resolve()}",
            "-metrics-port=0",  # any free port
            "-health-probe-port=0",
        ],
        grace_seconds=_GRACE_SECONDS,
    )
