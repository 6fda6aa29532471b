"""The configuration of a keeper of a node, or of the network between nodes: one JSON file."""

import dataclasses
import hashlib
import io
import ipaddress
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Self

from ballast_localcluster.nodes.node import ProcessNode, architecture

PAUSE = "localhost/ballast-pause:1"
"""The image of every pod's first process."""


def write_pause_archive(program: Path, archive: Path) -> None:
    """Write an image that holds one program as `docker save` would, the same bytes each time."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as inner:
        entry = tarfile.TarInfo("pause")
        entry.size, entry.mode = program.stat().st_size, 0o755
        with program.open("rb") as content:
            inner.addfile(entry, content)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    image = {
        "architecture": architecture(),
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, mode="w") as outer:
        for name, data in (
            ("config.json", json.dumps(image).encode()),
            ("layer.tar", layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            outer.addfile(entry, io.BytesIO(data))


IMAGES = Path("/run/images")
"""Folder in which a node sees the containerd folder that its images come from."""


def share_images(source: Path, target: Path) -> None:
    """Give ``target``, of a node that sees ``source`` as ``IMAGES``, a containerd folder with its images.

    Layers and blobs are never changed once they are written: a layer, of thousands of files, is one symbolic
    link, a blob a hard link; databases are copied.
    """

    def copy(one: str, other: str) -> None:
        if one.endswith(".db"):
            shutil.copy2(one, other)
        else:
            os.link(one, other)

    def layers(folder: str, names: list[str]) -> list[str]:
        return names if Path(folder).name == "snapshots" else []

    shutil.copytree(source, target, ignore=layers, copy_function=copy)
    for layer in source.glob("*/snapshots/*"):
        place = layer.relative_to(source)
        (target / place).symlink_to(IMAGES / place)


MOST_NODES = 15
"""Each has a /24 of the cluster's /20; the first one is the nodes' own."""

_FIRST_NETWORK = ipaddress.IPv4Address("198.18.0.0")  # RFC 2544: 198.18.0.0/15 is for tests of networks
_ADDRESSES = 4096
CLUSTERS = 32
"""Number of clusters that have a network of their own at a time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network of one cluster: nodes, pods, and this machine, on one bridge.

    Attributes:
        number: which one, below ``CLUSTERS``.
        bridge: process whose network namespace has the bridge.
    """

    number: int
    bridge: int = 0

    @property
    def link(self) -> str:
        """This machine's interface to it."""
        return f"ballast{self.number}"

    @property
    def gateway(self) -> str:
        """This machine's address in it: the API server's."""
        return self.address(1)

    @property
    def names(self) -> str:
        """CoreDNS's address."""
        return self.address(2)

    def address(self, host: int) -> str:
        """An address of the nodes' /24."""
        return str(_FIRST_NETWORK + self.number * _ADDRESSES + host)

    def node(self, index: int) -> str:
        """Address of the node with this index, from 1 on."""
        return self.address(10 + index)

    def pods(self, index: int) -> str:
        """Addresses of the pods of that node."""
        return f"{_FIRST_NETWORK + self.number * _ADDRESSES + index * 256}/24"

    @property
    def whole(self) -> str:
        """All of it."""
        return f"{self.address(0)}/20"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what a keeper wrote."""
        return cls(**json.loads(path.read_text()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfiguration:
    """Configuration of one node's keeper.

    Attributes:
        folder: the node's disk.
        programs: folder of the programs that ``binary`` finds.
        plugins: folder of the CNI plugins.
        cgroup: name of its control group.
        index: from 1 on: which of the network's addresses are its own.
        images: a disk with images whose files it shares; None: archives below are imported.
        archives: files with images.
    """

    folder: Path
    programs: Path
    plugins: Path
    cgroup: str
    node: ProcessNode
    index: int = 0
    network: Network | None = None
    images: Path | None = None
    archives: tuple[Path, ...] = ()

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(json.dumps(dataclasses.asdict(self), default=str, indent=1))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the JSON file back."""
        value = json.loads(path.read_text())
        return cls(
            folder=Path(value["folder"]),
            programs=Path(value["programs"]),
            plugins=Path(value["plugins"]),
            cgroup=value["cgroup"],
            node=ProcessNode.from_values(value["node"]),
            index=value["index"],
            network=Network(**value["network"]) if value["network"] else None,
            images=Path(value["images"]) if value["images"] else None,
            archives=tuple(Path(archive) for archive in value["archives"]),
        )
