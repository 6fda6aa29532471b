"""Find the programs of real nodes, or build them once into the user's cache folder.

kubelet, kube-proxy, a device plugin, CoreDNS and pause: the Go module beside this file pins their versions.
"""

import functools
import hashlib
import os
from pathlib import Path

from ballast_localcluster.binaries import kubernetes_version, system_name
from ballast_localcluster.errors import BinariesError
from ballast_localcluster.go_builds import (
    Progress,
    build_once,
    cache_base,
    compile_packages,
    go_command,
    print_progress,
    run_go,
)

SOURCE = Path(__file__).parent
FOLDER_VARIABLE = "BALLAST_KUBELETS"
PROGRAMS = ("kubelet", "kube-proxy", "device-plugin", "coredns", "pause")
_WHAT = "kubelet"
_OF_NODES = PROGRAMS[:3]
_PACKAGES = (".", "./coredns", "./pause")


def present_kubelets() -> Path | None:
    """The folder that the environment names, else the cached build; None where there is neither.

    Raises:
        BinariesError: ``BALLAST_KUBELETS`` names a folder that lacks a program.
    """
    if value := os.environ.get(FOLDER_VARIABLE):
        folder = Path(value).expanduser().resolve()
        if missing := [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]:
            raise BinariesError(
                f"{FOLDER_VARIABLE}={value} has no {', '.join(missing)}. "
                f"To fix: put them there, or unset {FOLDER_VARIABLE} so that they are built."
            )
        return folder
    folder = _cache_folder()
    return folder if folder.is_dir() else None


def find_kubelets(progress: Progress | None = None) -> Path:
    """The folder that is present, else of a new build.

    Args:
        progress: takes one line of progress; None writes to standard error.

    Raises:
        BinariesError: the environment's folder lacks a program, or the build is not possible or fails.
    """
    progress = progress or print_progress
    if found := present_kubelets():
        return found
    folder = _cache_folder()
    build_once(folder, _WHAT, functools.partial(_build, progress=progress), progress)
    return folder


def _flags() -> list[str]:
    version = kubernetes_version(SOURCE)
    major, minor, _ = version.removeprefix("v").split(".", 2)
    stamped = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in stamped.items())
    return ["-trimpath", "-ldflags", f"-s -w {stamps}"]


def _cache_folder() -> Path:
    digest = hashlib.sha256(" ".join(_flags()).encode())
    for file in sorted([SOURCE / "go.mod", SOURCE / "go.sum", *SOURCE.glob("**/*.go")]):
        digest.update(str(file.relative_to(SOURCE)).encode() + b"\0" + file.read_bytes() + b"\0")
    name = f"{kubernetes_version(SOURCE)}-{system_name()}-{digest.hexdigest()[:12]}"
    return cache_base() / "kubelets" / name


def _build(folder: Path, progress: Progress) -> None:
    otherwise = f"set {FOLDER_VARIABLE} to a folder that holds {', '.join(PROGRAMS)}"
    go = go_command(SOURCE / "go.mod", _WHAT, otherwise)
    progress(f"building {_WHAT} ({kubernetes_version(SOURCE)}) and CoreDNS; once, about 5 minutes on 2 cores")
    progress("fetching their Go modules")
    packages = len(run_go([go, "list", "-deps", *_PACKAGES], SOURCE).splitlines())
    compile_packages([go, *_flags(), "-o", f"{folder}/", *_PACKAGES], SOURCE, packages, progress)
    (folder / "kubelets").rename(folder / "node")
    for name in _OF_NODES:
        (folder / name).symlink_to("node")
