"""A process node and its Node object."""

import dataclasses
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ballast_localcluster.errors import NodesFileError

POOL_LABEL = "ballast.dev/pool"
"""Label of nodes: their pool. Written here or by a cloud, read by a ClusterPolicy's nodeSelector."""

CAPACITY_TYPE_LABEL = "ballast.dev/capacity-type"
"""Label of nodes: ``onDemand`` or ``spot``."""

EMULATED_SLOWDOWN_ANNOTATION = "ballast.dev/emulated-slowdown"
"""Annotation of process nodes: JSON {model family or "default": factor >= 1}. Written here, read by the node
agent, which hands it to the pods that it starts as BALLAST_EMULATED_SLOWDOWN. Missing: no slowdown."""

PROCESS_NODE_ANNOTATION = "ballast.dev/process-node"
"""Annotation of process nodes: what is emulated, as text for people. Written here."""

GPU_RESOURCE = "nvidia.com/gpu"

_CPU, _MEMORY = "32", "64Gi"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A node's taint, as Kubernetes has it; ``effect`` is NoSchedule, PreferNoSchedule or NoExecute."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessNode:
    """A node whose pods are processes of this machine.

    Its capacity is what is declared here, not what the machine has: only kube-scheduler enforces it.

    Attributes:
        gpus: how many emulated ``nvidia.com/gpu`` it offers.
        pool: value of the label ``ballast.dev/pool``; empty for none.
        capacity_type: ``onDemand`` or ``spot``, a label too; empty for none.
        taints: keep pods away that do not tolerate them.
        slowdown: emulated slow-down by model family ("default" for the others), each factor at least 1;
            empty: pods run at the machine's speed, and nothing is emulated.
        cpu, memory, pods: the rest of the capacity, as Kubernetes quantities.
        environment: variables given to every pod of the node.
    """

    name: str
    gpus: int = 0
    pool: str = ""
    capacity_type: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    slowdown: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cpu: str = _CPU
    memory: str = _MEMORY
    pods: int = 110
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gpus < 0:
            raise NodesFileError(f"node {self.name}: gpus is {self.gpus}, and cannot be negative")
        if self.capacity_type not in ("", "onDemand", "spot"):
            raise NodesFileError(
                f"node {self.name}: capacity_type is {self.capacity_type!r}. To fix: onDemand or spot."
            )
        for family, factor in self.slowdown.items():
            if factor < 1:
                raise NodesFileError(
                    f"node {self.name}: slowdown of {family} is {factor}: pads can only slow down, "
                    "so a factor is at least 1"
                )

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Node from JSON or YAML by attributes' names. Raises NodesFileError: unknown key, bad value."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := set(values) - known:
            raise NodesFileError(f"a node has unknown keys {sorted(unknown)}. To fix: use {sorted(known)}.")
        if not values.get("name"):
            raise NodesFileError(f"a node has no name: {dict(values)}")
        taints = tuple(Taint(**taint) for taint in values.get("taints", ()))
        return cls(**{**values, "taints": taints})

    @classmethod
    def from_object(cls, item: Mapping[str, Any]) -> Self:
        """Node from an object that another program made, and its allocatable resources.

        Raises:
            NodesFileError: its number of GPUs is none.
        """
        metadata, offers = item["metadata"], (item.get("status") or {}).get("allocatable") or {}

        def number(resource: str, usual: str) -> int:
            text = offers.get(resource, usual)
            if not text.isdecimal():
                raise NodesFileError(f"node {metadata['name']}: {resource} is {text!r}, which is no number")
            return int(text)

        return cls(
            name=metadata["name"],
            labels=metadata.get("labels") or {},
            gpus=number(GPU_RESOURCE, "0"),
            pods=number("pods", "110"),
            cpu=offers.get("cpu", _CPU),
            memory=offers.get("memory", _MEMORY),
        )

    def manifest(self) -> dict[str, Any]:
        """The Node object, without status."""
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": architecture(),
            **({POOL_LABEL: self.pool} if self.pool else {}),
            **({CAPACITY_TYPE_LABEL: self.capacity_type} if self.capacity_type else {}),
            **self.labels,
        }
        annotations = {
            PROCESS_NODE_ANNOTATION: "pods are processes; images, isolation, capacity, GPUs are emulated",
            **(
                {EMULATED_SLOWDOWN_ANNOTATION: json.dumps(dict(self.slowdown), sort_keys=True)}
                if self.slowdown
                else {}
            ),
            **self.annotations,
        }
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels, "annotations": annotations},
            "spec": {"taints": [dataclasses.asdict(taint) for taint in self.taints]},
        }

    def capacity(self) -> dict[str, str]:
        """Capacity of the node, all of it allocatable."""
        return {
            "cpu": self.cpu,
            "memory": self.memory,
            "pods": str(self.pods),
            "ephemeral-storage": "100Gi",
            **({GPU_RESOURCE: str(self.gpus)} if self.gpus else {}),
        }


def architecture() -> str:
    """This machine's, as Kubernetes and images name it."""
    machine = platform.machine().lower()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


DEFAULT_NODES = Path(__file__).with_name("default-nodes.yaml")


def default_nodes() -> tuple[ProcessNode, ...]:
    """Three pools of different emulated speed, and one of spot machines."""
    import yaml

    return nodes_of(yaml.safe_load(DEFAULT_NODES.read_text()), DEFAULT_NODES)


def nodes_of(content: Any, path: Path) -> tuple[ProcessNode, ...]:
    """The nodes of a file: ``nodes``, a list of objects with the attributes of :class:`ProcessNode`.

    Raises:
        NodesFileError: it is something else, or has a node that cannot be; the text names it.
    """
    if not isinstance(content, dict) or set(content) != {"nodes"} or not isinstance(content["nodes"], list):
        raise NodesFileError(f"{path}: expected one key, nodes, with a list. See {DEFAULT_NODES}.")
    nodes = []
    for values in content["nodes"]:
        try:
            nodes.append(ProcessNode.from_values(values))
        except (TypeError, ValueError, AttributeError) as error:
            raise NodesFileError(f"{path}: {values!r}: {error}") from error
    names = [node.name for node in nodes]
    if double := {name for name in names if names.count(name) > 1}:
        raise NodesFileError(f"{path}: several nodes are named {', '.join(sorted(double))}")
    return tuple(nodes)
