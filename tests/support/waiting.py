"""Waiting in tests: for a condition, never for a time."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ballast_localcluster.waiting import patience

WAIT_SECONDS = 60.0 * patience()
"""Limit of every wait, times ``BALLAST_PATIENCE``: long enough for a machine with other work, and reached
only by a test that fails."""

_POLL_SECONDS = 0.02
_POLL_SHARE, _LONGEST_POLL_SECONDS = 0.1, 0.5
"""The longer something takes, the seldomer it is looked at: a look may cost the API server milliseconds."""

Found = TypeVar("Found")


def eventually(
    look: Callable[[], Found], what: str = "the condition", details: Callable[[], object] | None = None
) -> Found:
    """Look repeatedly until the result is true and no assertion fails, and return it.

    A condition has to stay true once it is: a state that passes may lie between two looks. For those, read
    a watch's history (``Pods.history``), an Event or a log.

    Args:
        look: looks once; a falsy result or an AssertionError means not yet, other errors are raised.
        what: what is waited for, for the message.
        details: called for the message of a failure.

    Raises:
        AssertionError: not within ``WAIT_SECONDS``; with the result of the last look.
    """
    began = time.monotonic()
    deadline = began + WAIT_SECONDS
    while True:
        failure, result = None, None
        try:
            result = look()
        except AssertionError as error:
            failure = error
        if failure is None and result:
            return result
        if time.monotonic() > deadline:
            found = failure if failure is not None else f"it found {result!r}"
            more = f"\n{details()}" if details is not None else ""
            raise AssertionError(
                f"waited {WAIT_SECONDS:g} s for {what}; at the last look: {found}{more}"
            ) from failure
        waited = time.monotonic() - began
        time.sleep(min(max(_POLL_SECONDS, _POLL_SHARE * waited), _LONGEST_POLL_SECONDS))


def is_alive(pid: int) -> bool:
    """Whether a process of that id runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
