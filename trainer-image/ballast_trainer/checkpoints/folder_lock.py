"""A lock on a checkpoint folder: one run writes to it, on storage that many machines share.

The lock is a file that names its owner.  While the owner lives it touches the file; a process that finds
the file watches, by its own clock, whether it is touched, so no clocks of two machines are compared.
A lock is taken over at once from a process of this machine that is gone and from an earlier launch
of the same job (the operator has ended it, or has lost its node, behind which it may train on), else after
:data:`STALE_SECONDS` without a touch.  An owner that was stopped or cut off until it lost the lock finds
out before it puts a checkpoint in place.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from ballast_policies.contract.decode import decode_text

from ballast_trainer.errors import CheckpointError

logger = logging.getLogger(__name__)

LOCK = ".lock"
TOUCH_SECONDS = 5.0
STALE_SECONDS = 30.0
_POLL_SECONDS = 0.5
_SETTLE_SECONDS, _SETTLE_SECONDS_HERE = 1.0, 0.1
"""Pauses after a take-over: two that saw the same stale lock see by then which of them has it. The second is
for an owner known to be gone, where there was no waiting."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of a lock.

    Attributes:
        token: of this holding alone.
        run: the job in its cluster, ``namespace/name``; empty outside of one.
        launch: which launch of the job.
        host: name of the machine or pod.
        machine: identifies the machine's boot and the namespace that ``pid`` counts in.
        pid: the process.
        started: when it started, in the kernel's ticks.
    """

    token: str
    run: str
    launch: int
    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def this_process(cls, launch: int, environment: Mapping[str, str] = os.environ) -> "Owner":
        """This process, with a new token."""
        job = environment.get("BALLAST_JOB", "")
        return cls(
            token=uuid.uuid4().hex,
            run=f"{environment.get('BALLAST_NAMESPACE', '')}/{job}" if job else "",
            launch=launch,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()) or "",
        )

    @classmethod
    def read(cls, path: Path) -> "Owner | None":
        """The owner in a lock file; None: gone or damaged. Raises OSError: storage does not answer."""
        try:
            return decode_text(cls, path.read_text(), unknown="ignore", spelling=str)
        except (FileNotFoundError, ValueError):
            return None

    def gives_way_to(self, other: "Owner") -> bool:
        """True if ``other`` may take over without watching whether this owner lives."""
        if self.run and self.run == other.run:
            return self.launch <= other.launch
        return self.machine == other.machine != "" and not self.lives_here

    @property
    def lives_here(self) -> bool:
        """True if it is a process of this machine, and alive."""
        return self.machine == _machine() != "" and _started(self.pid) == self.started != ""

    def __str__(self) -> str:
        name = f"{self.run}, launch {self.launch}, " if self.run else ""
        return f"{name}process {self.pid} on {self.host}"


class FolderLock:
    """The lock of one folder; held from :meth:`acquire` to :meth:`release`."""

    def __init__(
        self,
        folder: Path,
        owner: Owner,
        *,
        check: Callable[[], None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; ``check``, called as it waits for a lock that is not touched, may raise."""
        self._path = folder / LOCK
        self._owner = owner
        self._check, self._sleep, self._clock = check, sleep, clock
        self._released = threading.Event()

    @property
    def token(self) -> str:
        """Token of this holding."""
        return self._owner.token

    def acquire(self) -> None:
        """Take it. Raises CheckpointError: another living run has it; OSError: the folder is not writable."""
        fresh = self._write_fresh()
        try:
            while not self._create(fresh):
                self._take_over(fresh)
                if self.held():
                    break
        finally:
            fresh.unlink(missing_ok=True)
        self._remove_left()
        threading.Thread(target=self._touch, name="checkpoint-lock", daemon=True).start()

    def held(self) -> bool:
        """True if the lock is still this owner's; an unreadable lock counts as held."""
        try:
            found = Owner.read(self._path)
        except OSError:
            return True
        return found is not None and found.token == self._owner.token

    def gone(self) -> bool:
        """True if there is no lock: removed with its folder, or by a run that took over and has ended."""
        try:
            return not self._path.exists()
        except OSError:
            return False

    def retake(self) -> bool:
        """Take a lock that is gone once more, in a new folder if need be; False where another run is faster.

        Raises:
            OSError: the folder cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._write_fresh()
        try:
            self._create(fresh)
        finally:
            fresh.unlink(missing_ok=True)
        return self.held()

    def release(self) -> None:
        """Give the lock back, if it is still this owner's."""
        self._released.set()
        with contextlib.suppress(OSError):
            if self.held():
                self._path.unlink()

    def _write_fresh(self) -> Path:
        fresh = self._path.with_name(f"{LOCK}-{self._owner.token}")
        fresh.write_text(json.dumps(dataclasses.asdict(self._owner)))
        return fresh

    def _remove_left(self) -> None:
        """Remove what processes that were killed while they took the lock have left of it."""
        for left in self._path.parent.glob(f"{LOCK}-*"):
            with contextlib.suppress(OSError):
                owner = Owner.read(left)
                if owner is not None and owner.gives_way_to(self._owner):
                    left.unlink()

    def _create(self, fresh: Path) -> bool:
        """Make the lock file, whole at once; False where there is one."""
        try:
            os.link(fresh, self._path)
        except FileExistsError:
            return False
        except OSError:
            # Storage without hard links.
            try:
                with self._path.open("x") as file:
                    file.write(fresh.read_text())
            except FileExistsError:
                return False
        return True

    def _take_over(self, fresh: Path) -> None:
        """Replace a lock whose owner is gone; returns without it where the lock changes meanwhile.

        Raises:
            CheckpointError: its owner lives.
        """
        found, touched = Owner.read(self._path), self._touched()
        known_gone = found is not None and found.gives_way_to(self._owner)
        if touched is None or not (known_gone or self._is_stale(found, touched)):
            return
        copy = fresh.with_suffix(".new")
        copy.write_text(fresh.read_text())
        if self._touched() != touched:
            copy.unlink()
            return
        copy.replace(self._path)
        logger.warning(
            "%s is taken over from %s, %s", self._path, found or "a damaged lock", self._state(found)
        )
        self._sleep(_SETTLE_SECONDS_HERE if known_gone else _SETTLE_SECONDS)

    def _state(self, found: Owner | None) -> str:
        """State of the owner of a lock that is taken over, as text."""
        if found is None or not found.gives_way_to(self._owner):
            return f"which did not touch it for {STALE_SECONDS:g} s"
        if found.machine == self._owner.machine != "" and not found.lives_here:
            return "which has ended"
        return "which can write no checkpoint here any more, should it still run on a node that was lost"

    def _is_stale(self, found: Owner | None, first: tuple[int, int]) -> bool:
        """True if the lock stays untouched for long enough; False where it is given back.

        Raises:
            CheckpointError: it is touched.
        """
        began = self._clock()
        lives = found is not None and found.lives_here
        while not lives and self._clock() - began < STALE_SECONDS:
            self._check()
            self._sleep(_POLL_SECONDS)
            now = self._touched()
            if now is None:
                return False
            lives = now != first
        if lives:
            raise CheckpointError(
                f"{self._path.parent} is in use by another run: {found or 'its lock changes'}. To fix: "
                "give each job a checkpoint.path of its own, or end the other run"
            )
        return True

    def _touched(self) -> tuple[int, int] | None:
        """Time and inode of the file's last touch; opened, so that no cache of the client answers."""
        try:
            with self._path.open() as file:
                status = os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            # A full disk does not keep a file from being touched.
            with contextlib.suppress(OSError):
                if self.held():
                    os.utime(self._path)


def _machine() -> str:
    """The boot of this machine and the namespace of its process numbers; empty where the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Start of a process, in ticks since boot; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie holds nothing.
    return None if fields[0] == "Z" else fields[19]
