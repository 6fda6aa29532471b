"""Run Karpenter in a local cluster, with process nodes for the Node objects that it makes.

The program, with its kwok provider, is found or built once into the user's cache folder; the Go module beside
this file pins its version.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from ballast_localcluster.binaries import system_name
from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.errors import BinariesError, NodesFileError
from ballast_localcluster.go_builds import (
    Progress,
    build_folder,
    build_once,
    compile_packages,
    go_command,
    print_progress,
    run_go,
)
from ballast_localcluster.rest import Rest, install_custom_resources

MODULE = Path(__file__).with_name("go.mod")
FOLDER_VARIABLE = "BALLAST_KARPENTER"
PROGRAM = "karpenter-kwok"
_WHAT = "Karpenter"
_REPOSITORY = "sigs.k8s.io/karpenter"
_PACKAGE = f"{_REPOSITORY}/kwok"
_DEFINITIONS = ("kwok/charts/crds", "kwok/apis/crds")
_FLAGS = ("-trimpath", "-ldflags", "-s -w")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Karpenter:
    """A folder with the program and ``crds``, the definitions of its kinds."""

    folder: Path

    @property
    def program(self) -> Path:
        """The executable."""
        return self.folder / PROGRAM

    @property
    def crds(self) -> tuple[Path, ...]:
        """Files of CustomResourceDefinitions."""
        return tuple(sorted((self.folder / "crds").glob("*.yaml")))


def karpenter_version() -> str:
    """The version that is built, e.g. ``v1.14.1``."""
    match = re.search(rf"^\s*(?:require )?{re.escape(_REPOSITORY)} (v\S+)", MODULE.read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def present_karpenter() -> Karpenter | None:
    """The one that the environment names, else the cached build; None where there is neither.

    Raises:
        BinariesError: ``BALLAST_KARPENTER`` names a folder that lacks something.
    """
    if value := os.environ.get(FOLDER_VARIABLE):
        named = Karpenter(folder=Path(value).expanduser().resolve())
        if not os.access(named.program, os.X_OK) or not named.crds:
            raise BinariesError(
                f"{FOLDER_VARIABLE}={value} has no program {PROGRAM}, or no crds/*.yaml. "
                f"To fix: put them there, or unset {FOLDER_VARIABLE} so that they are built."
            )
        return named
    folder = _cache_folder()
    return Karpenter(folder=folder) if folder.is_dir() else None


def find_karpenter(progress: Progress = print_progress) -> Karpenter:
    """The present one, else a new build. Raises BinariesError: it lacks something, or the build fails."""
    found = present_karpenter() or Karpenter(folder=_cache_folder())
    build_once(found.folder, _WHAT, _build, progress)
    return found


def _cache_folder() -> Path:
    digest = hashlib.sha256(MODULE.read_bytes() + b"\0" + MODULE.with_suffix(".sum").read_bytes())
    digest.update(" ".join(_FLAGS).encode())
    return build_folder("karpenter", f"{karpenter_version()}-{system_name()}-{digest.hexdigest()[:12]}")


def _build(folder: Path, progress: Progress) -> None:
    source = MODULE.parent
    go = go_command(MODULE, _WHAT, f"set {FOLDER_VARIABLE} to a folder that holds {PROGRAM} and crds/*.yaml")
    progress(f"building {_WHAT} {karpenter_version()}; once, about 5 minutes on 2 cores")
    compile_packages(go, _FLAGS, [_PACKAGE], str(folder / PROGRAM), source, progress)
    module = Path(run_go([go, "list", "-m", "-f", "{{.Dir}}", _REPOSITORY], source).strip())
    (folder / "crds").mkdir()
    for part in _DEFINITIONS:
        for file in sorted((module / part).glob("*.yaml")):
            shutil.copyfile(file, folder / "crds" / file.name)  # without the module cache's mode, read-only


INSTANCE_TYPES = Path(__file__).with_name("instance-types.json")
"""The usual instance types: one or two emulated GPUs of three types, spot and on demand."""

NODE_LABELS = {"kwok.x-k8s.io/node": "fake"}
"""Labels of every Node that Karpenter's kwok provider makes."""

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

    ``name``: among the cluster's processes. ``instance_types``: a JSON file as the kwok provider reads it.

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
