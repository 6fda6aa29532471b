"""A time limit for every test, and what its child processes were doing where it, or a wait, is over."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ballast_localcluster.supervision.processes import MARK_VARIABLE

from tests.support.waiting import WAIT_SECONDS

LIMIT_SECONDS = 3 * WAIT_SECONDS
"""Of a test with its fixtures: a wait that fails says so first. Tests marked ``timeout`` have their own."""

STACKS_VARIABLE = "PYTHONFAULTHANDLER"
"""Set, a Python process writes the stacks of its threads where it is told to abort."""

_MOST_CHARACTERS = 20_000


def limited(item: pytest.Item) -> None:
    """Give a test the limit, unless it has one."""
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))


def is_over(failure: BaseException) -> bool:
    """Whether a test failed because it waited too long."""
    text = str(failure)
    return "from pytest-timeout" in text or text.startswith(f"waited {WAIT_SECONDS:g} s for ")


def now() -> float:
    """Seconds since the machine has started: the clock by which the kernel notes when processes begin."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def stacks_of_children(since: float, of: int | None = None) -> str:
    """End Python processes that this one (or ``of``) has started, and return where each of them was.

    Those from before ``since`` (:func:`now`) are left alone, as are local clusters: other tests share them.
    """
    found = []
    for pid in _descendants(of or os.getpid()):
        with contextlib.suppress(OSError):
            if _began(pid) < since:
                continue
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(v.startswith(f"{MARK_VARIABLE}=".encode()) for v in variables):
                continue
            if not any(v.startswith(f"{STACKS_VARIABLE}=".encode()) for v in variables):
                continue
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            if "ballast_localcluster.supervision.warden" in command:  # with it the cluster would end
                continue
            errors = Path(f"/proc/{pid}/fd/2").readlink()
            begin = errors.stat().st_size if errors.is_file() else 0
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGABRT)
            _wait_for_end(pid)
            text = ""
            if errors.is_file():
                with errors.open(errors="replace") as file:
                    file.seek(begin)
                    text = file.read(_MOST_CHARACTERS)
            found.append(f"process {pid}: {command}\n{text or f'(it writes to {errors})'}")
    return "\n".join(found)


def _descendants(pid: int) -> Iterator[int]:
    """Of a process, those first that were started last."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield from _descendants(child)
        yield child


def _began(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    # The kernel rounds down.
    return (int(ticks) + 1) / os.sysconf("SC_CLK_TCK")


def _wait_for_end(pid: int) -> None:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
