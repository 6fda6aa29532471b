"""One process with torch imported, from which the trainers of an agent's pods are forked.

Importing torch costs seconds of CPU and half a gigabyte, and on one machine every pod would pay it.  The
trainer package has a server for that (``ballast_trainer.warm_start``); it is started for the first pod
that can use it, and pods that start meanwhile wait for it, not for an import of their own.  The pod
keeps its own process (group, signals, exit code, log); where nothing listens it starts as usual.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ballast_localcluster.nodes.pod_resources.environment import inherited_environment, search_path
from ballast_localcluster.supervision.processes import die_with_parent
from ballast_localcluster.waiting import patience

log = logging.getLogger(__name__)

WARM_START_VARIABLE = "BALLAST_WARM_START"
"""Variable of a trainer pod: the server's socket, see the trainer. A pod that sets it itself, to
nothing, starts as usual."""

_PROGRAM = ("ballast-train", "pod")
_LISTEN_SECONDS = 10.0
_LOOK_SECONDS = 0.01
_LONGEST_SOCKET_PATH = 100
"""Bytes; the kernel allows 108."""


class WarmStart:
    """The server of one agent, at ``socket``; its output goes to ``log_file``."""

    def __init__(self, socket: Path, log_file: Path) -> None:
        self._socket = socket
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._works = True

    @property
    def process_id(self) -> int | None:
        """Process ID of the server; None before the first."""
        return None if self._process is None else self._process.pid

    async def variables(self, argv: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
        """Variables to add to the environment of ``argv``; none where it is not the trainer."""
        program = (Path(argv[0]).name, *argv[1 : len(_PROGRAM)])
        if program != _PROGRAM or WARM_START_VARIABLE in environment or not await self._listens():
            return {}
        return {WARM_START_VARIABLE: str(self._socket)}

    async def close(self) -> None:
        """End the server, and with it what was forked from it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _listens(self) -> bool:
        async with self._starting:
            if self._works and (self._process is None or self._process.returncode is not None):
                self._works = await self._start()
                if not self._works:
                    log.warning(
                        "no warm start, pods import torch themselves; see above, or %s", self._log_file
                    )
            return self._works

    async def _start(self) -> bool:
        if len(os.fsencode(self._socket)) > _LONGEST_SOCKET_PATH:
            longest = _LONGEST_SOCKET_PATH
            log.warning("%s has over %d bytes. To fix: a cluster's folder nearer to /", self._socket, longest)
            return False
        self._socket.unlink(missing_ok=True)
        # -P: no folder of the moment among those that modules are searched in, as for an installed program.
        command = [sys.executable, "-P", "-m", "ballast_trainer.warm_start", str(self._socket)]
        environment = {
            "PATH": search_path(),
            "HOME": str(self._socket.parent),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            **inherited_environment(),
        }
        with self._log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self._socket.parent,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_SECONDS * patience()):
                while self._process.returncode is None:
                    if self._socket.exists():
                        return True
                    await asyncio.sleep(_LOOK_SECONDS)
        return False
