"""The cluster's side of real nodes: their network, their images, and what each keeper is told.

kubelet, kube-proxy, a device plugin, CoreDNS, kube-router (for NetworkPolicies) and pause are found, or built
once into the user's cache folder; the Go module beside this file pins their versions.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from ballast_localcluster.binaries import kubernetes_version, stamped_flags, system_name
from ballast_localcluster.components import Layout
from ballast_localcluster.credentials import write_kubeconfig
from ballast_localcluster.errors import StartError
from ballast_localcluster.go_builds import (
    Progress,
    build_folder,
    build_once,
    compile_packages,
    go_command,
    named_folder,
    print_progress,
)
from ballast_localcluster.kubelets.configuration import (
    MOST_NODES,
    Network,
    NodeConfiguration,
    write_pause_archive,
)
from ballast_localcluster.kubelets.machine import cgroup_name, check_machine, plugins_folder, remove_cgroups
from ballast_localcluster.nodes.node import PROCESS_NODE_ANNOTATION, ProcessNode
from ballast_localcluster.rest import Rest
from ballast_localcluster.supervision.processes import die_with_parent

SOURCE = Path(__file__).parent
FOLDER_VARIABLE = "BALLAST_KUBELETS"
PROGRAMS = ("kubelet", "kube-proxy", "device-plugin", "coredns", "pause", "kube-router")
_WHAT = "kubelet"
_OF_NODES = PROGRAMS[:3]
_PACKAGES = (".", "./coredns", "./pause", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router")


def present_kubelets() -> Path | None:
    """The environment's or the cached build; None: neither. Raises BinariesError: a program is missing."""
    folder = named_folder(FOLDER_VARIABLE, PROGRAMS) or _cache_folder()
    return folder if folder.is_dir() else None


def find_kubelets(progress: Progress = print_progress) -> Path:
    """The present folder, else a new build. Raises BinariesError: it lacks one, or the build fails."""
    folder = present_kubelets() or _cache_folder()
    build_once(folder, _WHAT, _build, progress)
    return folder


def _cache_folder() -> Path:
    digest = hashlib.sha256(" ".join(stamped_flags(kubernetes_version(SOURCE))).encode())
    for file in sorted([SOURCE / "go.mod", SOURCE / "go.sum", *SOURCE.glob("**/*.go")]):
        digest.update(str(file.relative_to(SOURCE)).encode() + b"\0" + file.read_bytes() + b"\0")
    name = f"{kubernetes_version(SOURCE)}-{system_name()}-{digest.hexdigest()[:12]}"
    return build_folder("kubelets", name)


def _build(folder: Path, progress: Progress) -> None:
    otherwise = f"set {FOLDER_VARIABLE} to a folder that holds {', '.join(PROGRAMS)}"
    go = go_command(SOURCE / "go.mod", _WHAT, otherwise)
    progress(f"building {_WHAT} ({kubernetes_version(SOURCE)}) and CoreDNS; once, about 6 minutes on 2 cores")
    flags = stamped_flags(kubernetes_version(SOURCE))
    compile_packages(go, flags, _PACKAGES, f"{folder}/", SOURCE, progress)
    (folder / "kubelets").rename(folder / "node")
    for name in _OF_NODES:
        (folder / name).symlink_to("node")


_COREFILE = """\
.:53 {{
    bind {address}
    errors
    cache 2
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
    }}
}}
"""


class RealNodes:
    """Nodes that are a kubelet and a containerd each, in namespaces of this machine; they need root on Linux.

    Args:
        archives: files of images that every node has from the start, as `docker save` and
            `buildah push IMAGE docker-archive:FILE` write them.
        progress: takes one line of progress.
    """

    def __init__(self, archives: tuple[Path, ...] = (), progress: Progress = print_progress) -> None:
        self._archives = tuple(archive.resolve() for archive in archives)
        self._progress = progress
        self._indices: dict[str, int] = {}

    def prepare(self, folder: Path) -> None:
        """Find or build the programs, and refuse where the nodes cannot run; nothing is started.

        Raises:
            BinariesError, StartError: with everything that is missing.
        """
        check_machine(folder)
        for archive in self._archives:
            if not archive.is_file():
                raise StartError(f"{archive}: no such file. To fix: name what `docker save` has written.")
        find_kubelets(self._progress)

    def network_command(self, layout: Layout) -> list[str]:
        """Command of the keeper of the network, which writes ``network.json``."""
        return [*_KEEPER, "network", str(layout.folder), str(find_kubelets(self._progress))]

    def network(self, layout: Layout) -> Network | None:
        """The network; None while there is none yet."""
        path = layout.folder / "network.json"
        return Network.read(path) if path.exists() else None

    def names_command(self, layout: Layout) -> list[str]:
        """Command of CoreDNS, which answers in the network."""
        network = self._network(layout)
        corefile = layout.folder / "Corefile"
        corefile.write_text(_COREFILE.format(address=network.names, kubeconfig=layout.kubeconfig("coredns")))
        coredns = find_kubelets(self._progress) / "coredns"
        return ["nsenter", "-t", str(network.bridge), "-n", str(coredns), "-conf", str(corefile)]

    def import_images(self, layout: Layout) -> None:
        """Import the images once; nodes share the result. Raises StartError: an archive is none."""
        pause = layout.folder / "pause.tar"
        programs = find_kubelets(self._progress)
        write_pause_archive(programs / "pause", pause)
        if self._archives:
            gigabytes = sum(archive.stat().st_size for archive in self._archives) / 1e9
            names = ", ".join(archive.name for archive in self._archives)
            self._progress(f"importing {names} ({gigabytes:.1f} GB; minutes on a busy machine)")
        configuration = NodeConfiguration(
            folder=layout.folder / "nodes" / "images",
            programs=programs,
            plugins=_plugins(),
            cgroup=cgroup_name(layout.folder, "images"),
            node=ProcessNode(name="images"),
            archives=(pause, *self._archives),
        )
        log = layout.logs / "images.log"
        command = [*_KEEPER, "images", str(self._write(configuration))]
        with log.open("w") as output:
            done = subprocess.run(
                command, stdout=output, stderr=output, check=False, preexec_fn=die_with_parent()
            )
        if done.returncode != 0:
            last = [line for line in log.read_text().splitlines() if "Error" in line][-1:]
            raise StartError(f"images could not be imported: {' '.join(last)} (all of it: {log})")

    def node_command(self, layout: Layout, node: ProcessNode, server: str) -> list[str]:
        """Command of a node's keeper; a node of the same name gets the disk and the address that it had.

        Raises:
            StartError: the cluster's network has no address left.
        """
        # The certificates' module loads `cryptography`, which a program that only imports this one need not.
        from ballast_localcluster.certificates import Identity, add_certificate

        index = self._indices.setdefault(node.name, len(self._indices) + 1)
        if index > MOST_NODES:
            raise StartError(f"a cluster has at most {MOST_NODES} real nodes, and {node.name} is one more")
        network = self._network(layout)
        folder = layout.folder / "nodes" / node.name
        certificates = folder / "certificates"
        certificates.mkdir(parents=True, exist_ok=True, mode=0o700)
        identity = Identity(
            file=f"kubelet-{node.name}",
            common_name=f"system:node:{node.name}",
            organization="system:nodes",
            hosts=(network.node(index), node.name),
        )
        add_certificate(layout.certificates, identity)
        for file, target in (("ca.crt", "ca.crt"), *((f"{identity.file}{e}", f"kubelet{e}") for e in _PAIR)):
            shutil.copy(layout.certificates / file, certificates / target)
        inside = "/run/node/certificates/kubelet"
        write_kubeconfig(
            folder / "kubeconfig",
            server=server,
            authority=(layout.certificates / "ca.crt").read_bytes(),
            user={"client-certificate": f"{inside}.crt", "client-key": f"{inside}.key"},
        )
        for file in ("proxy", "policies"):
            shutil.copy(layout.kubeconfig(file), folder / f"{file}.kubeconfig")
        configuration = NodeConfiguration(
            folder=folder,
            programs=find_kubelets(self._progress),
            plugins=_plugins(),
            cgroup=cgroup_name(layout.folder, node.name),
            node=node,
            index=index,
            network=network,
            images=layout.folder / "nodes" / "images" / "var-lib" / "containerd",
        )
        return [*_KEEPER, "node", str(self._write(configuration))]

    def describe(self, rest: Rest, node: ProcessNode) -> None:
        """Set the labels and annotations that a kubelet may not set itself."""
        metadata = node.manifest()["metadata"]
        del metadata["annotations"][PROCESS_NODE_ANNOTATION]
        rest.call(
            "PATCH", f"/api/v1/nodes/{node.name}", {"metadata": metadata}, "application/merge-patch+json"
        )

    @staticmethod
    def clear(layout: Layout) -> None:
        """Remove what nodes left whose power was cut. Raises LocalClusterError: a control group stays."""
        remove_cgroups(cgroup_name(layout.folder))

    def _network(self, layout: Layout) -> Network:
        network = self.network(layout)
        assert network is not None
        return network

    @staticmethod
    def _write(configuration: NodeConfiguration) -> Path:
        configuration.folder.mkdir(parents=True, exist_ok=True)
        path = configuration.folder / "configuration.json"
        configuration.write(path)
        return path


_KEEPER = (sys.executable, "-m", "ballast_localcluster.kubelets.agent")
_PAIR = (".crt", ".key")


def _plugins() -> Path:
    folder = plugins_folder()
    assert folder is not None
    return folder
