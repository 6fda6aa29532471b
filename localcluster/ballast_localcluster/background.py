"""Clusters that run in the background, by name: `ballast up` and `ballast down`."""

import dataclasses
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ballast_localcluster.binaries import find_binaries
from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.components import Layout
from ballast_localcluster.errors import LocalClusterError
from ballast_localcluster.go_builds import Progress, locked, print_progress, user_folder
from ballast_localcluster.nodes.node import ProcessNode
from ballast_localcluster.rest import Rest
from ballast_localcluster.supervision.warden import await_end, warden_pid

if TYPE_CHECKING:
    from ballast_localcluster.kubelets.start import RealNodes

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundCluster:
    """A cluster that runs in the background.

    Attributes:
        kubectl: the kubectl that was built with it.
        nodes: names of the nodes it was started with; empty where it was running already.
        was_running: it was there before.
    """

    name: str
    kubeconfig: Path
    kubectl: Path
    folder: Path
    nodes: tuple[str, ...] = ()
    was_running: bool = False


def clusters_folder() -> Path:
    """Folder that holds them: ``$XDG_STATE_HOME`` or ``~/.local/state``, then ``ballast/clusters``."""
    return user_folder("XDG_STATE_HOME", ".local/state") / "ballast" / "clusters"


def up(
    name: str,
    nodes: Iterable[ProcessNode],
    crds: Sequence[Path] = (),
    *,
    warm_start: bool = True,
    real_nodes: "RealNodes | None" = None,
    prepare: Callable[[LocalCluster], None] = lambda cluster: None,
) -> BackgroundCluster:
    """Start a cluster that outlives this program; one that runs already is left as it is.

    ``prepare`` is called with the cluster once it is ready; what it raises ends the cluster. The rest as
    :class:`LocalCluster` has it.

    Raises:
        LocalClusterError: an impossible name, it does not start, or it runs and does not answer.
    """
    folder = _folder(name)
    nodes = tuple(nodes)
    lock = _lock(name)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock, f"cluster {name}", print_progress):
        running = warden_pid(folder) is not None
        if not running:
            _tidy(folder)
            with LocalCluster(
                nodes=nodes, crds=crds, folder=folder, warm_start=warm_start, real_nodes=real_nodes
            ) as cluster:
                prepare(cluster)
                cluster.release()
        elif not _answers(folder):
            raise LocalClusterError(
                f"cluster {name} is starting, or its API server has ended; its logs: {folder}/logs. "
                f"To fix: wait, or ballast down --name {name} and start it again"
            )
    return BackgroundCluster(
        name=name,
        kubeconfig=Layout(folder=folder).kubeconfig("admin"),
        kubectl=find_binaries().program("kubectl"),
        folder=folder,
        nodes=() if running else tuple(node.name for node in nodes),
        was_running=running,
    )


def _answers(folder: Path) -> bool:
    try:
        return Rest(Layout(folder=folder).kubeconfig("admin")).answers("/readyz")
    except (OSError, ValueError):  # its kubeconfig is not written yet
        return False


def down(name: str, progress: Progress = print_progress) -> bool:
    """Stop a background cluster and remove its files; False where there is none of that name.

    ``progress`` takes one line of progress.

    Raises:
        LocalClusterError: a control group of its real nodes stays.
        TimeoutError: it does not end.
    """
    folder = _folder(name)
    pid = warden_pid(folder)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        await_end(folder, lambda: warden_pid(folder) is None, progress)
    existed = pid is not None or folder.exists()
    _tidy(folder)
    _lock(name).unlink(missing_ok=True)
    return existed


def _tidy(folder: Path) -> None:
    """Remove what one has left that did not shut down, e.g. after a power cut."""
    from ballast_localcluster.kubelets.machine import cgroup_name, remove_cgroups

    remove_cgroups(cgroup_name(folder))
    shutil.rmtree(folder, ignore_errors=True)


def names() -> tuple[str, ...]:
    """Names of the background clusters that run."""
    base = clusters_folder()
    if not base.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in base.iterdir() if warden_pid(entry) is not None))


def _folder(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise LocalClusterError(
            f"{name!r} cannot be a cluster's name. To fix: lower-case letters, digits and dashes, 42 at most."
        )
    return clusters_folder() / name


def _lock(name: str) -> Path:
    return clusters_folder().with_name(f"{name}.lock")
