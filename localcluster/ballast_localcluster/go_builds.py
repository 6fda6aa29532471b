"""Build a Go program once into the user's cache folder: locked, with progress, and whole or not at all."""

import contextlib
import fcntl
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ballast_localcluster.errors import BinariesError

_PROGRESS_SECONDS = 10.0
# Binaries are stripped: an eighth of the compiler's work is for debuggers, and a twentieth for a small heap.
_QUICKLY = ("-gcflags=all=-dwarf=false",)
_HEAP = {"GOGC": "400"}

Progress = Callable[[str], None]


def print_progress(line: str) -> None:
    """Write a line of progress to standard error."""
    print(f"localcluster: {line}", file=sys.stderr, flush=True)  # noqa: T201 - progress of minutes


def cache_base() -> Path:
    """``$XDG_CACHE_HOME`` or ``~/.cache``, then ``ballast``."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "ballast"


def build_folder(kind: str, name: str) -> Path:
    """The cache's folder of a build; under sudo the caller's, if it is there and this code is theirs."""
    folder = cache_base() / kind / name
    caller = os.environ.get("SUDO_UID")
    if folder.is_dir() or caller != str(Path(__file__).stat().st_uid):
        return folder
    with contextlib.suppress(KeyError):  # a user whom no list of users has
        callers = Path(pwd.getpwuid(int(caller)).pw_dir, ".cache", "ballast", kind, name)
        return callers if callers.is_dir() else folder
    return folder


def user_folder(variable: str, at_home: str) -> Path:
    """The folder that a variable names, or one of the home folder. Raises BinariesError: there is neither."""
    if base := os.environ.get(variable):
        return Path(base)
    try:
        return Path.home() / at_home
    except RuntimeError as error:  # without $HOME, a user whom no list of users has
        raise BinariesError(f"there is no home folder. To fix: set HOME or {variable}") from error


def build_once(folder: Path, what: str, build: Callable[[Path, Progress], None], progress: Progress) -> None:
    """Make ``folder`` by ``build`` unless it is there; of several processes one builds, the others wait.

    It appears whole, after ``build`` has filled the folder that it is given. ``what`` is built, for people.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
    except OSError as error:
        raise BinariesError(
            f"{what} is kept in {folder.parent}, which cannot be written: {error.strerror}. "
            "To fix: set XDG_CACHE_HOME to a folder that can"
        ) from error
    with locked(folder.with_name(folder.name + ".lock"), what, progress):
        if folder.is_dir():
            return
        for leftover in folder.parent.glob(folder.name + ".building-*"):  # of a build that was killed
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=folder.name + ".building-", dir=folder.parent) as scratch:
            build(Path(scratch), progress)
            Path(scratch).chmod(0o755)
            os.rename(scratch, folder)  # noqa: PTH104 - the rename of a folder is what makes it appear whole
            Path(scratch).mkdir()  # what TemporaryDirectory removes
    progress(f"{what} built: {folder}")


def named_folder(variable: str, programs: Sequence[str]) -> Path | None:
    """The folder that a variable names, if any. Raises BinariesError: it lacks one of the programs."""
    value = os.environ.get(variable)
    if not value:
        return None
    folder = Path(value).expanduser().resolve()
    if missing := [name for name in programs if not os.access(folder / name, os.X_OK)]:
        raise BinariesError(
            f"{variable}={value} has no {', '.join(missing)}. "
            f"To fix: put them there, or unset {variable} so that they are built."
        )
    return folder


@contextlib.contextmanager
def locked(path: Path, what: str, progress: Progress) -> Iterator[None]:
    """Hold a file lock that ends with this process, however it ends; ``what`` it builds, for who waits."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is building {what}: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def go_command(module: Path, what: str, otherwise: str) -> str:
    """The `go` of this machine, new enough for the ``go`` line of ``module``, a ``go.mod``.

    ``what`` is built with it, and ``otherwise``: how to do without, for the message.

    Raises:
        BinariesError: there is none, or it is too old.
    """
    go = shutil.which("go")
    wanted = re.search(r"^go (\d+(?:\.\d+)+)", module.read_text(), re.MULTILINE)
    assert wanted is not None
    least = wanted[1].removesuffix(".0")
    fix = f"To fix: install Go {least} or later (go.dev/dl), or {otherwise}."
    if go is None:
        raise BinariesError(f"no `go` found, and {what} is built with it. {fix}")
    text = run_go([go, "env", "GOVERSION"], module.parent).strip()
    found = re.match(r"go(\d+(?:\.\d+)+)", text)
    if found and _numbers(found[1]) < _numbers(least):
        raise BinariesError(f"{go} is {text}, and {what} needs Go {least}. {fix}")
    return go


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def run_go(command: Sequence[str], source: Path) -> str:
    """Run a Go command in a module's folder; its output. Raises BinariesError, with what it wrote."""
    done = subprocess.run(
        command, cwd=source, env=_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BinariesError(f"`{' '.join(command)}` failed in {source}:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def compile_packages(
    go: str, flags: Sequence[str], packages: Sequence[str], output: str, source: Path, progress: Progress
) -> None:
    """Run `go build -v -o output`, reporting how far it is. Raises BinariesError: the compiler's words."""
    progress("fetching the Go modules")
    most = len(run_go([go, "list", *flags, "-deps", *packages], source).splitlines())
    compiled, reported, others = 0, time.monotonic(), []
    with subprocess.Popen(
        [go, "build", "-v", *_QUICKLY, *flags, "-o", output, *packages],
        cwd=source,
        env={**_HEAP, **_environment()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
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
                    progress(f"compiled {compiled} packages of at most {most}")
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise BinariesError(f"`go build` failed in {source}:\n{''.join(others).strip()[-4000:]}")


def _environment() -> dict[str, str]:
    """Environment of a build of pinned modules for this machine, without a vendor folder."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GOOS", "GOARCH")}
    flags = f"{kept.get('GOFLAGS', '')} -mod=readonly"
    return kept | {"CGO_ENABLED": "0", "GOWORK": "off", "GO111MODULE": "on", "GOFLAGS": flags}
