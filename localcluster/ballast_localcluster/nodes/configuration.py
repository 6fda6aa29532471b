"""The configuration of a node agent: one JSON file, written by the program that starts it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from ballast_localcluster.nodes.node import ProcessNode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfiguration:
    """Configuration of one agent process.

    Attributes:
        certificates: folder with ``ca.crt`` and the agent's serving pair ``node-agent.crt`` and ``.key``.
        folder: where pods get their folders.
        logs: where what pods print is kept, and left when a failed cluster's logs are.
        adopts: labels of further nodes that it serves: another program makes and removes their objects.
        warm_start: fork trainers from one process that has torch imported.
    """

    kubeconfig: Path
    certificates: Path
    folder: Path
    logs: Path
    nodes: tuple[ProcessNode, ...]
    adopts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warm_start: bool = True

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(json.dumps(dataclasses.asdict(self), default=str, indent=1))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the JSON file back."""
        value = json.loads(path.read_text())
        return cls(
            kubeconfig=Path(value["kubeconfig"]),
            certificates=Path(value["certificates"]),
            folder=Path(value["folder"]),
            logs=Path(value["logs"]),
            nodes=tuple(ProcessNode.from_values(node) for node in value["nodes"]),
            adopts=value["adopts"],
            warm_start=value["warm_start"],
        )
