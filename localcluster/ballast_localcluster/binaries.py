"""Find the control-plane binaries, or build them once into the user's cache folder.

The build (Go, a few minutes on two cores) is keyed by the bytes it is made from, so that another version or
an edited source is another folder, and a finished folder is never written again.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ballast_localcluster.errors import BinariesError

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
SOURCE = Path(__file__).resolve().with_name("controlplane")
FOLDER_VARIABLES = ("BALLAST_CONTROLPLANE", "KUBEBUILDER_ASSETS")
VERSION_VARIABLE = "BALLAST_KUBERNETES"
"""The minor to build, as 1.35; unset: that of ``go.mod``. Others have module files in ``versions``."""
_PROGRESS_SECONDS = 10.0

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """A folder with the five programs."""

    folder: Path

    def program(self, name: str) -> Path:
        """Path of one of ``PROGRAMS``."""
        return self.folder / name


def find_binaries(progress: Progress | None = None) -> Binaries:
    """The folder named by the environment, else the cached build, else a new build.

    Args:
        progress: takes one line of progress; None writes to standard error.

    Raises:
        BinariesError: ``BALLAST_CONTROLPLANE`` lacks a program, or the build is not possible or fails.
    """
    progress = progress or _print_progress
    for variable in FOLDER_VARIABLES:
        if value := os.environ.get(variable):
            folder = Path(value).expanduser().resolve()
            missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
            if not missing:
                return Binaries(folder=folder)
            # Other projects set KUBEBUILDER_ASSETS to a folder with three of the five: then ours is built.
            if variable == "BALLAST_CONTROLPLANE":
                raise BinariesError(
                    f"{variable}={value} has no {', '.join(missing)}. "
                    f"To fix: put them there, or unset {variable} so that they are built."
                )
    return _cached_or_built(progress)


def cache_folder() -> Path:
    """Where builds are kept: ``$XDG_CACHE_HOME`` or ``~/.cache``, then ``ballast/controlplane``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ballast" / "controlplane"


def build_key(source: Path = SOURCE) -> str:
    """Version, system and a hash of what the binary is made from."""
    digest = hashlib.sha256()
    module = module_file(source)
    files = {"go.mod": module, "go.sum": module.with_suffix(".sum"), "main.go": source / "main.go"}
    for name, file in files.items():
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(" ".join(_build_flags(source)).encode())
    system = f"{platform.system()}-{platform.machine()}".lower()
    return f"{kubernetes_version(source)}-{system}-{digest.hexdigest()[:12]}"


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
    version = kubernetes_version(source)
    major, minor, _ = version.removeprefix("v").split(".", 2)
    package = "k8s.io/component-base/version"
    stamped = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = " ".join(f"-X {package}.{key}={value}" for key, value in stamped.items())
    module = module_file(source)
    other = [] if module.parent == source else [f"-modfile={module.relative_to(source)}"]
    return [*other, "-trimpath", "-ldflags", f"-s -w {stamps}"]


def _cached_or_built(progress: Progress) -> Binaries:
    folder = cache_folder() / build_key()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock"), progress):
            if not folder.is_dir():
                _build(folder, progress)
    return Binaries(folder=folder)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a file lock that ends with this process, however it ends."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is building the control plane: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(folder: Path, progress: Progress) -> None:
    go = _go_command()
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
    for leftover in folder.parent.glob(folder.name + ".building-*"):  # of a build that was killed
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=folder.name + ".building-", dir=folder.parent) as scratch:
        progress(
            f"building the local control plane (Kubernetes {kubernetes_version()}); "
            "once, about 4 minutes on 2 cores"
        )
        progress("fetching its Go modules")
        flags = _build_flags(SOURCE)
        listed = _run([go, "list", *flags[:-2], "-deps", "."], environment)
        packages = len(listed.splitlines())
        output = Path(scratch) / "controlplane"
        _compile(
            [go, "build", "-v", *flags, "-o", str(output), "."],
            environment,
            packages,
            progress,
        )
        for name in PROGRAMS:
            (Path(scratch) / name).symlink_to(output.name)
        Path(scratch).chmod(0o755)
        os.rename(scratch, folder)  # noqa: PTH104 - the rename of a folder is what makes it appear whole
        Path(scratch).mkdir()  # what TemporaryDirectory removes
    progress(f"control plane built: {folder}")


def _go_command() -> str:
    go = shutil.which("go")
    wanted = re.search(r"^go (\d+)\.(\d+)", module_file().read_text(), re.MULTILINE)
    assert wanted is not None
    least = f"{wanted[1]}.{wanted[2]}"
    fix = (
        f"To fix: install Go {least} or later (go.dev/dl), or set BALLAST_CONTROLPLANE "
        f"to a folder that holds {', '.join(PROGRAMS)}."
    )
    if go is None:
        raise BinariesError(f"no `go` found, and the local control plane is built with it. {fix}")
    text = _run([go, "env", "GOVERSION"], dict(os.environ)).strip()
    found = re.match(r"go(\d+)\.(\d+)", text)
    if found and (int(found[1]), int(found[2])) < (int(wanted[1]), int(wanted[2])):
        raise BinariesError(f"{go} is {text}, and the local control plane needs Go {least}. {fix}")
    return go


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=SOURCE, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BinariesError(f"`{' '.join(command)}` failed in {SOURCE}:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def _compile(command: list[str], environment: dict[str, str], packages: int, progress: Progress) -> None:
    """Run the compiler, which names each package on a line, and report how far it is."""
    compiled, reported, others = 0, time.monotonic(), []
    with subprocess.Popen(
        command, cwd=SOURCE, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if re.fullmatch(r"[\w./\-]+\n", line):
                    compiled += 1
                else:
                    others.append(line)
                if time.monotonic() - reported >= _PROGRESS_SECONDS:
                    reported = time.monotonic()
                    progress(f"compiled {compiled} packages of at most {packages}")
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise BinariesError(f"`go build` failed in {SOURCE}:\n{''.join(others).strip()[-4000:]}")


def _print_progress(line: str) -> None:
    print(f"localcluster: {line}", file=sys.stderr, flush=True)  # noqa: T201 - progress of minutes
