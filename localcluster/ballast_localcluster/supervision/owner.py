"""The owner's side of the warden: start it, tell it what to run, see what ended."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ballast_localcluster.errors import StartError
from ballast_localcluster.supervision.warden import EXITS_NAME, await_end

_LOG_TAIL_LINES = 15
_STACK = re.compile(r"goroutine \d+ |created by |\t\S+\.go:\d+|[\w./][\w./()*]*\(.*\)$")
_NO_SPACE_FIX = "\nTo fix: free some space, or set $XDG_STATE_HOME to a folder of another disk"


class WardenHandle:
    """A running warden of the cluster in ``folder``."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder = folder
        # Its own session: Ctrl-C in the owner's terminal is for the owner.
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ballast_localcluster.supervision.warden", str(folder)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                text=True,
            )

    def start(
        self, name: str, command: list[str], log: Path, *, grace: float = 0.0, restart: bool = False
    ) -> None:
        """Run a command under the warden; with a ``grace``, SIGTERM and that many seconds end it.

        ``restart``: whenever it ends by itself, it is started again after a pause.
        """
        what = {
            "name": name,
            "command": command,
            "log": str(log),
            "grace": grace,
            "restart": restart,
            "environment": dict(os.environ),
        }
        self._send({"start": what})

    def kill(self, name: str) -> None:
        """SIGKILL the process of that name."""
        self._send({"kill": name})

    def release(self) -> None:
        """Keep the warden running without its owner."""
        self._send({"stay": True})
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0  # the warden is no longer waited for here

    def stop(self, *, keep_logs: bool) -> None:
        """End everything and wait until it has ended."""
        try:
            self._send({"keep": keep_logs})
            self._send({"stop": True})
        except BrokenPipeError:
            pass  # the warden has ended already
        assert self._process.stdin is not None
        try:
            await_end(self._folder, lambda: self._process.poll() is not None)
        except TimeoutError:
            # Its children ask the kernel to die with it.
            self._process.kill()
            self._process.wait()
        with self._process.stdin:
            pass

    def check(self, logs: Path, *, ignored: Collection[str] = ()) -> None:
        """Raise where the warden or a process of it has ended, but for those that were meant to.

        Raises:
            StartError: with the last lines of the log.
        """
        if self._process.poll() is not None:
            raise StartError(f"the warden ended with code {self._process.returncode}")
        for end in ended(self._folder):
            if end["name"] in ignored:
                continue
            last = tail(logs / (end["name"] + ".log"))
            fix = _NO_SPACE_FIX if "no space left on device" in last else ""
            raise StartError(f"{end['name']} ended with code {end['code']}. The end of its log:\n{last}{fix}")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


def ended(folder: Path) -> list[dict[str, Any]]:
    """Processes that have ended: ``name``, ``pid`` and exit ``code`` of each."""
    path = folder / EXITS_NAME
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def tail(log: Path) -> str:
    """The last lines of a log, indented; of a crash of Go without the stacks, which hide its reason."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    lines = [line for line in lines if line and not _STACK.match(line)]
    return "\n".join("    " + line[:400] for line in lines[-_LOG_TAIL_LINES:])
