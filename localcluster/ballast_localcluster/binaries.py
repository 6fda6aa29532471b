"""Find the control-plane binaries, or build them once into the user's cache folder.

The build (Go, a few minutes on two cores) is keyed by the bytes it is made from, so that another version or
an edited source is another folder, and a finished folder is never written again.
"""

import contextlib
import dataclasses
import hashlib
import os
import platform
import re
from pathlib import Path

from ballast_localcluster.errors import BinariesError
from ballast_localcluster.go_builds import (
    Progress,
    build_folder,
    build_once,
    compile_packages,
    go_command,
    named_folder,
    print_progress,
)

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
SOURCE = Path(__file__).resolve().with_name("controlplane")
_WHAT = "the local control plane"
VERSION_VARIABLE = "BALLAST_KUBERNETES"
"""The minor to build, as 1.35; unset: that of ``go.mod``. Others have module files in ``versions``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """A folder with the five programs."""

    folder: Path

    def program(self, name: str) -> Path:
        """Path of one of ``PROGRAMS``."""
        return self.folder / name


def find_binaries(progress: Progress = print_progress) -> Binaries:
    """The folder named by the environment, else the cached build, else a new build.

    Raises:
        BinariesError: ``BALLAST_CONTROLPLANE`` lacks a program, or the build is not possible or fails.
    """
    folder = _folder()
    build_once(folder, _WHAT, _build, progress)
    return Binaries(folder=folder)


def present_binaries() -> Binaries | None:
    """The same if they are there; None: they are not built. Raises BinariesError: a program is missing."""
    folder = _folder()
    return Binaries(folder=folder) if folder.is_dir() else None


def _folder() -> Path:
    folder = named_folder("BALLAST_CONTROLPLANE", PROGRAMS)
    # Other projects set KUBEBUILDER_ASSETS to a folder with three of the five: then ours is built.
    with contextlib.suppress(BinariesError):
        folder = folder or named_folder("KUBEBUILDER_ASSETS", PROGRAMS)
    return folder or build_folder("controlplane", build_key())


def build_key(source: Path = SOURCE) -> str:
    """Version, system and a hash of what the binary is made from."""
    digest = hashlib.sha256()
    module = module_file(source)
    files = {"go.mod": module, "go.sum": module.with_suffix(".sum"), "main.go": source / "main.go"}
    for name, file in files.items():
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(" ".join(_build_flags(source)).encode())
    return f"{kubernetes_version(source)}-{system_name()}-{digest.hexdigest()[:12]}"


def system_name() -> str:
    """This machine's system, e.g. ``linux-x86_64``."""
    return f"{platform.system()}-{platform.machine()}".lower()


def kubernetes_version(source: Path = SOURCE) -> str:
    """The version of Kubernetes that is built, e.g. ``v1.34.4``."""
    return _pinned(module_file(source))


def module_file(source: Path = SOURCE) -> Path:
    """The ``go.mod`` of the minor that the environment asks for; its ``go.sum`` lies beside it.

    Raises:
        BinariesError: there is none for it.
    """
    default, wanted = source / "go.mod", os.environ.get(VERSION_VARIABLE, "").removeprefix("v")
    minors = {_minor(file): file for file in [default, *sorted((source / "versions").glob("*.mod"))]}
    if not wanted:
        return default
    if wanted not in minors:
        raise BinariesError(
            f"{VERSION_VARIABLE}={wanted}: no such minor. To fix: one of {', '.join(sorted(minors))}"
        )
    return minors[wanted]


def _minor(module: Path) -> str:
    return _pinned(module).removeprefix("v").rpartition(".")[0]


def _pinned(module: Path) -> str:
    match = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", module.read_text(), re.MULTILINE)
    if match is None:
        raise BinariesError(f"{module} requires no k8s.io/kubernetes")
    return match.group(1)


def _build_flags(source: Path) -> list[str]:
    module = module_file(source)
    other = [] if module.parent == source else [f"-modfile={module.relative_to(source)}"]
    return [*other, *stamped_flags(kubernetes_version(source))]


def stamped_flags(version: str) -> list[str]:
    """Flags of ``go build`` by which programs of Kubernetes say their version."""
    major, minor, _ = version.removeprefix("v").split(".", 2)
    stamped = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in stamped.items())
    return ["-trimpath", "-ldflags", f"-s -w {stamps}"]


def _build(folder: Path, progress: Progress) -> None:
    otherwise = f"set BALLAST_CONTROLPLANE to a folder that holds {', '.join(PROGRAMS)}"
    go = go_command(module_file(), _WHAT, otherwise)
    progress(f"building {_WHAT} (Kubernetes {kubernetes_version()}); once, 4 to 10 minutes on 2 cores")
    output = folder / "controlplane"
    compile_packages(go, _build_flags(SOURCE), ["."], str(output), SOURCE, progress)
    for name in PROGRAMS:
        (folder / name).symlink_to(output.name)
