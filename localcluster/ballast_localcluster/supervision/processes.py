"""Processes that must not outlive their purpose: death with the parent, whole groups, marked processes.

Three nets, each for what the one before lets through: the kernel signals a child whose parent dies
(Linux); a signal goes to a whole process group; and every process that carries a mark in its environment
can be found and killed (Linux), also one that left its group.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

MARK_VARIABLE = "BALLAST_LOCAL_CLUSTER"
"""Variable of every process that a cluster runs: the cluster's folder."""

PART_VARIABLE = "BALLAST_LOCAL_CLUSTER_PART"
"""The same, and which of the warden's processes it came from."""

_PR_SET_PDEATHSIG = 1
_LINUX = sys.platform.startswith("linux")
_LIBC = ctypes.CDLL(None, use_errno=True) if _LINUX else None


def die_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """Function of a new child before its program: ask the kernel for ``number`` when this process dies.

    Call it in the parent, on its main thread (the kernel means the thread that forked).  Elsewhere than on
    Linux there is no such request; there the warden's sweep at the end has to do.
    """
    parent = os.getpid()

    def ask() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
            if os.getppid() != parent:  # it died before the kernel was asked
                os._exit(1)

    return ask


def signal_group(group: int, number: int) -> bool:
    """Signal every process of a group; False where there is none left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
        return False
    return True


def marked_processes(mark: str) -> list[int]:
    """The user's processes whose environment began with ``mark`` ("NAME=value"); none without ``/proc``."""
    wanted, found = mark.encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes come and go while we look, and those of other users cannot be read.
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill_marked(mark: str) -> int:
    """Kill every marked process, until a look finds none; how many were killed."""
    killed: set[int] = set()
    # A process may fork while we look, so look again; one that is not gone after this is a zombie.
    for _ in range(10):
        fresh = [pid for pid in marked_processes(mark) if pid not in killed and pid != os.getpid()]
        if not fresh:
            break
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return len(killed)
