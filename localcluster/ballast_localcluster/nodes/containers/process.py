"""One run of a container: a process in a session of its own, its output in a file."""

import asyncio
import dataclasses
import signal
from collections.abc import Mapping
from pathlib import Path

from ballast_localcluster.supervision.processes import die_with_parent, signal_group

TERMINATION_MESSAGE_BYTES = 4096
FALLBACK_BYTES = 2048
FALLBACK_LINES = 80


class ProcessStartError(Exception):
    """The command cannot be run; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program and its arguments as real paths, and the file ``log`` that gets its two outputs."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    log: Path


class ContainerProcess:
    """A started command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, command: Command) -> "ContainerProcess":
        """Start it. Raises ProcessStartError: no such program, not executable, no such working directory."""
        if not command.folder.is_dir():
            raise ProcessStartError(f"workingDir {command.folder} does not exist on this machine")
        command.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with command.log.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *command.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(command.environment),
                    cwd=command.folder,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
        except OSError as error:
            raise ProcessStartError(f"exec {command.argv[0]!r}: {error.strerror}") from error
        return cls(process)

    def terminate(self) -> None:
        """SIGTERM to the container's first process, as a container engine does."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._process.returncode is None:
            signal_group(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for the first process, then end the others; the exit code, 128 + n for signal n."""
        code = await self._process.wait()
        signal_group(self.pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code


def termination_message(path: Path, log: Path, *, policy: str, exit_code: int) -> str:
    """Content of the termination file; else, by policy and if the process failed, its log's end."""
    if path.is_file() and (left := path.read_bytes()[:TERMINATION_MESSAGE_BYTES]):
        return left.decode(errors="replace")
    if policy == "FallbackToLogsOnError" and exit_code != 0 and log.is_file():
        lines = log.read_bytes()[-FALLBACK_BYTES:].decode(errors="replace").splitlines(keepends=True)
        return "".join(lines[-FALLBACK_LINES:])
    return ""
