"""A real Kubernetes control plane on one machine, with process nodes."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ballast_localcluster.cluster import LocalCluster
    from ballast_localcluster.nodes.node import ProcessNode

__all__ = ["LocalCluster", "ProcessNode"]

_HOMES = {
    "LocalCluster": "ballast_localcluster.cluster",
    "ProcessNode": "ballast_localcluster.nodes.node",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is used: the warden and the node agents need little, and start often."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
