"""The warden: starts the cluster's processes, and ends all of them when it ends itself.

It is a process of its own, in its own session, so that neither Ctrl-C nor a SIGKILL of the program that
wanted the cluster can keep it from cleaning up.  Its owner writes one JSON object a line to its standard
input::

    {"start": {"name": ..., "command": [...], "environment": {...}, "log": path, "grace": seconds,
               "restart": whether to start it again when it ends}}
    {"kill": name}      SIGKILL, as a power cut
    {"stay": true}      keep running when the owner is gone (`ballast up`)
    {"keep": true}      keep the logs when it ends
    {"stop": true}      end now

and the warden ends on ``stop``, on SIGTERM, and, unless told to stay, when the owner is gone: its end of
the pipe is closed then, whatever it died of.  Ends of processes are written to ``exits.jsonl`` in the
cluster's folder.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ballast_localcluster.supervision.processes import (
    MARK_VARIABLE,
    PART_VARIABLE,
    die_with_parent,
    kill_marked,
    marked_processes,
    signal_group,
)
from ballast_localcluster.waiting import Limit, wait_until

LOCK_NAME = "warden.lock"
EXITS_NAME = "exits.jsonl"
KEPT_FOLDERS = ("logs",)
_LINE_BYTES = 16 * 1024 * 1024  # a line holds a whole environment
_OWNER_POLL_SECONDS = 1.0
_RESTART_PAUSE_SECONDS = 2.0


class Warden:
    """The processes of one cluster folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._graces: dict[str, float] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()
        self._stay = False
        self._keep = False

    async def run(self) -> None:
        """Serve the owner until the end, then leave nothing behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._ending.set)
        ending = asyncio.create_task(self._ending.wait())
        listening = asyncio.create_task(self._listen())
        watching = asyncio.create_task(self._watch_owner())
        waiting: set[asyncio.Task[Any]] = {ending, listening, watching}
        try:
            while not self._ending.is_set():  # a listener may finish because we are to stay
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in waiting:
                task.cancel()
            await self._end()

    async def _listen(self) -> None:
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while line := await reader.readline():
            await self._obey(json.loads(line))
        if not self._stay:
            self._ending.set()

    async def _watch_owner(self) -> None:
        """A forked child of the owner may hold its end of the pipe open: look at the owner itself, too."""
        owner = os.getppid()
        while not self._stay:
            if os.getppid() != owner:
                self._ending.set()
                return
            await asyncio.sleep(_OWNER_POLL_SECONDS)

    async def _obey(self, message: dict[str, Any]) -> None:
        match message:
            case {"start": what}:
                await self._start(what)
            case {"kill": name} if name in self._children:
                signal_group(self._children[name].pid, signal.SIGKILL)
            case {"stay": stay}:
                self._stay = stay
            case {"keep": keep}:
                self._keep = keep
            case {"stop": True}:
                self._ending.set()

    async def _start(self, what: dict[str, Any]) -> None:
        name = what["name"]
        # A process with a grace is itself a keeper of processes: told to end, it ends them first.
        number = signal.SIGTERM if what.get("grace") else signal.SIGKILL
        with Path(what["log"]).open("ab") as log:  # noqa: ASYNC230 - a local file, opened once
            child = await asyncio.create_subprocess_exec(
                *what["command"],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **what["environment"],
                    MARK_VARIABLE: str(self._folder),
                    PART_VARIABLE: self._part(name),
                },
                cwd=self._folder,
                start_new_session=True,
                preexec_fn=die_with_parent(number),
            )
        self._children[name] = child
        self._graces[name] = what.get("grace") or 0.0
        keep = self._keep_running(what, child) if what.get("restart") else self._record_exit(name, child)
        watcher = asyncio.create_task(keep)
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _record_exit(self, name: str, child: asyncio.subprocess.Process) -> None:
        code = await child.wait()
        with (self._folder / EXITS_NAME).open("a") as exits:
            exits.write(json.dumps({"name": name, "pid": child.pid, "code": code}) + "\n")
        # What an agent that was killed could not clean up any more.
        kill_marked(f"{PART_VARIABLE}={self._part(name)}")

    async def _keep_running(self, what: dict[str, Any], child: asyncio.subprocess.Process) -> None:
        """Start it again whenever it ends, after a pause, until the cluster ends; its log says why."""
        await child.wait()
        kill_marked(f"{PART_VARIABLE}={self._part(what['name'])}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), _RESTART_PAUSE_SECONDS)
        if not self._ending.is_set():
            await self._start(what)

    def _part(self, name: str) -> str:
        return str(self._folder / name)

    async def _end(self) -> None:
        self._ending.set()
        keepers = [name for name, grace in self._graces.items() if grace]
        for name in keepers:
            if self._children[name].returncode is None:
                self._children[name].send_signal(signal.SIGTERM)
        for name in keepers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._children[name].wait(), self._graces[name])
        for child in self._children.values():
            if child.returncode is None:
                signal_group(child.pid, signal.SIGKILL)
        for child in self._children.values():
            await child.wait()
        await asyncio.gather(*self._watchers)
        kill_marked(f"{MARK_VARIABLE}={self._folder}")
        self._tidy()

    def _tidy(self) -> None:
        # The lock goes last: who waits for it may use the folder again.
        kept = {*KEPT_FOLDERS, EXITS_NAME} if self._keep else {LOCK_NAME}
        for entry in self._folder.iterdir():
            if entry.name in kept:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    entry.unlink()
        if not self._keep:
            shutil.rmtree(self._folder, ignore_errors=True)


def is_alive(folder: Path) -> bool:
    """True if a warden holds the folder (by its lock, which no dead process holds)."""
    return warden_pid(folder) is not None


def warden_pid(folder: Path) -> int | None:
    """Process id of the warden that holds the folder; None where there is none."""
    try:
        with (folder / LOCK_NAME).open("r") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read())
    except FileNotFoundError:
        pass
    return None


def await_end(
    folder: Path, ended: Callable[[], bool], progress: Callable[[str], None] = lambda line: None
) -> None:
    """Wait until the warden of ``folder``, told to stop, has ended: its processes, then it removes files.

    ``progress`` takes one line before each of the two.

    Raises:
        TimeoutError: it does not.
    """
    marked = f"{MARK_VARIABLE}={folder}"
    progress(f"ending the processes of {folder}")
    wait_until(
        lambda: ended() or not marked_processes(marked), f"processes of {folder} to end", Limit.STOPPED
    )
    progress("removing its files; large images take minutes")
    wait_until(ended, f"the files of {folder} to be removed", Limit.REMOVED)


def main() -> int:
    """``python -m ballast_localcluster.supervision.warden FOLDER``."""
    folder = Path(sys.argv[1])
    with (folder / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        asyncio.run(Warden(folder).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
