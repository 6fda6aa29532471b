"""The TCP connections of this process's gloo groups, which can be shut from any thread.

A rank waits inside torch for another one, and neither destroying nor aborting a gloo group wakes it: an end
of its connections does.  Gloo does not tell which sockets are its own: they are noted as a group is made.
Nor does that wake a thread that has a part of a message (gloo's ``Pair::signalException`` leaves out the one
that is being read), or that waits for a rank to connect: such a thread is left behind.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from ballast_trainer.errors import ConfigurationError

_OPEN_FILES = Path("/proc/self/fd")


class Connections:
    """Connections of the groups that this process is in, or enters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: set[str] = set()
        self._before: set[str] | None = None
        self._left_behind: set[int] = set()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """The sockets that appear meanwhile are a group's."""
        with self._lock:
            outer, before = self._before, set(_sockets().values())
            self._before = before if outer is None else outer
        try:
            yield
        finally:
            self.stay_if_left_behind()
            with self._lock:
                self._noted |= set(_sockets().values()) - before
                self._before = outer

    def shut(self) -> None:
        """End all of them: whoever waits at either end gets an error."""
        with self._lock:
            for number, name in _sockets().items():
                if name in self._noted or (self._before is not None and name not in self._before):
                    _shut(number, name)

    def forget(self) -> None:
        """The groups have ended."""
        with self._lock:
            self._noted.clear()
            self._before = None

    def leave_behind(self, thread: int) -> None:
        """Mark a thread that is to do nothing more, should it come back from torch."""
        self._left_behind.add(thread)

    def stay_if_left_behind(self) -> None:
        """Return in all other threads alone."""
        while threading.get_ident() in self._left_behind:
            threading.Event().wait()


CONNECTIONS = Connections()
"""Of this process."""


def check_connections(field: str) -> None:
    """Refuse a field that needs the list of sockets. Raises ConfigurationError: the system has none."""
    if not _OPEN_FILES.is_dir():
        raise ConfigurationError(field, f"this system has no {_OPEN_FILES}. To fix: 0, or Linux")


def _sockets() -> dict[int, str]:
    """File descriptor -> the kernel's name of the socket."""
    found = {}
    with contextlib.suppress(OSError):
        for each in os.listdir(_OPEN_FILES):  # noqa: PTH208 - names alone
            with contextlib.suppress(OSError):
                name = os.readlink(_OPEN_FILES / each)  # noqa: PTH115 - a name, no path
                if name.startswith("socket:"):
                    found[int(each)] = name
    return found


def _shut(number: int, name: str) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        same = os.readlink(_OPEN_FILES / str(one.fileno())) == name  # noqa: PTH115 - else it was closed
        if same and one.family in (socket.AF_INET, socket.AF_INET6):
            one.getpeername()  # one that listens has no other end
            one.shutdown(socket.SHUT_RDWR)
