"""Local ranks as forks of one process, which imports torch once for all of them."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from ballast_policies.contract import ExitCode

_POLL_SECONDS = 0.05
_LEAVE_SECONDS = 10.0
"""How long the other ranks have to notice that one has failed, and leave."""

_CAUSE_CHARACTERS = 1000
"""Of 16 ranks, less than a pipe takes without a reader."""

_REFUSED_SECONDS = 2.0
"""The same where one of them has refused the configuration."""


class Causes:
    """The causes of failed ranks, sent to the process that started them."""

    def __init__(self) -> None:
        self._queue = multiprocessing.get_context("fork").SimpleQueue()

    def add(self, reason: str) -> None:
        """This rank has failed by itself."""
        rank = os.environ.get("RANK", "0")
        self._queue.put(f"rank {rank}: {reason[:_CAUSE_CHARACTERS]}")

    def print_first(self) -> None:
        """The cause as the last line, after those of the ranks that only lost it."""
        if not self._queue.empty():
            _print_error(self._queue.get())


def run_local_ranks(ranks: int, body: Callable[[], int], causes: Causes | None = None) -> int:
    """Run ``body`` in ``ranks`` forks, each with the environment that torchrun would give it.

    SIGTERM is passed on to the ranks, which then save and exit.

    Args:
        ranks: how many.
        body: returns an exit code.
        causes: receives the causes of failed ranks; printed last.

    Returns:
        0 where all ranks end well; else the exit code of a rank that failed by itself.
    """
    # The forks share the modules imported here: one import, one copy in memory.
    importlib.import_module("ballast_trainer.preload")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = _fork(ranks, port, body)

    def pass_on(number: int, frame: types.FrameType | None) -> None:
        for child in children:
            if child.is_alive():
                os.kill(child.pid or 0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    # Ctrl-C reaches the ranks by itself; this process waits for them to save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    left_behind: set[int] = set()
    while any(child.is_alive() for child in children):
        if any(child.exitcode == ExitCode.USAGE for child in children):
            # No rank trains yet: the others only wait for the one that refused.
            pass_on(signal.SIGTERM, None)
            _end(children, _REFUSED_SECONDS)
        elif any(child.exitcode for child in children):
            left_behind = _end(children, _LEAVE_SECONDS)
        time.sleep(_POLL_SECONDS)
    code = _exit_code([child.exitcode or 0 for child in children], left_behind)
    if causes is not None:
        causes.print_first()
    return code


def _fork(ranks: int, port: int, body: Callable[[], int]) -> list[BaseProcess]:
    context = multiprocessing.get_context("fork")
    children: list[BaseProcess] = []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        child = context.Process(target=_rank, args=(environment, body))
        child.start()
        children.append(child)
    return children


def _exit_code(codes: list[int], left_behind: set[int]) -> int:
    """The exit code of the rank that failed by itself; names the ranks that were killed."""
    for rank in left_behind:
        codes[rank] = ExitCode.PEER_LOST
        _print_error(f"rank {rank} did not end within {_LEAVE_SECONDS:.0f} s of another, and was killed")
    if ExitCode.USAGE in codes:
        return ExitCode.USAGE
    for rank, code in enumerate(codes):
        if code < 0:
            _print_error(f"rank {rank} was killed by {signal.Signals(-code).name}")
    # A rank that only lost its peer is not the cause.
    first = next((code for code in codes if code not in {0, ExitCode.PEER_LOST}), max(codes))
    return 128 - first if first < 0 else first


def _rank(environment: dict[str, str], body: Callable[[], int]) -> None:
    os.environ.update(environment)
    code = body()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Threads of gloo and of the store may still hold sockets of ended ranks: exit at once.
    os._exit(code)


def _print_error(text: str) -> None:
    print(f"ballast-train: {text}", file=sys.stderr)


def _end(children: Sequence[BaseProcess], seconds: float) -> set[int]:
    """Wait for all to leave; returns those that did not, and were killed."""
    deadline = time.monotonic() + seconds
    left_behind = set()
    for rank, child in enumerate(children):
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
            left_behind.add(rank)
    return left_behind
