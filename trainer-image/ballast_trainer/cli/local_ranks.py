"""Local ranks as forks of one process, which imports torch once for all of them."""

import importlib
import multiprocessing
import os
import signal
import socket
import time
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from ballast_policies.contract import ExitCode

from ballast_trainer.distributed.stopping import on_closed_terminal
from ballast_trainer.environment import RESTARTS_ENV, STORE_OUTLIVES_ENV
from ballast_trainer.process_exit import end_with_parent, leave, print_error

_POLL_SECONDS = 0.05
_LEAVE_SECONDS = 10.0
"""Seconds for the other ranks to notice that one has failed, and leave."""

_CAUSE_CHARACTERS = 1000
"""Of 16 ranks, less than a pipe takes without a reader."""

_REFUSED_SECONDS = 2.0
"""The same where one of them has refused the configuration."""

_STORE_SECONDS = 120.0
"""Seconds that the process that serves the ranks' store may take to listen on this machine."""
_LOOKS_FOR_HUNG = 20
"""Looks for ranks that have ended between two for ranks that hang."""
_ENDED_WELL = (ExitCode.OK, ExitCode.STOPPED)


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
            print_error(self._queue.get())


def attempt_prefix() -> str:
    """Prefix of the ranks' keys in their store: a restarted attempt has others."""
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class _KeptStore:
    """A store for ranks that go on without a lost one: a process of its own serves it.

    The process that forks the ranks has no threads, and tells them who is gone.
    """

    def __init__(self, port: int, ranks: int) -> None:
        self._port, self._ranks = port, ranks
        self._server = serve("127.0.0.1", port)
        self._client: Any = None
        self._told: set[int | None] = set()
        self.lost: list[BaseProcess] = []
        self._looks = 0

    def look(self, children: list[BaseProcess]) -> None:
        """Tell the ranks which of them have ended, and end those that the others have given up."""
        from ballast_trainer.distributed import survivors

        self._looks += 1
        waiting = bool(self._told)
        for rank, child in enumerate(children):
            code = child.exitcode
            if child.pid in self._told or (code is None and self._looks % _LOOKS_FOR_HUNG):
                waiting &= code is not None
                continue
            store = self._reached()
            process = survivors.process_of(store, child.pid or 0)
            if code is None:
                waiting &= process is not None and not survivors.Fate.ENTERED.is_of(store, process)
                if process is not None and survivors.Fate.HUNG.is_of(store, process):
                    child.kill()
                continue
            self._told.add(child.pid)
            if process is not None and code in _ENDED_WELL:
                survivors.Fate.LEFT.tell(store, process)
            elif process is not None and (code < 0 or code == ExitCode.PEER_LOST):
                survivors.Fate.GONE.tell(store, process)
                self.lost.append(child)
            elif process is None and rank >= self._ranks:
                # It had started again, and none waits for it.
                self.lost.append(child)
            else:
                survivors.tell_none_goes_on(store, f"rank {child.name} has ended with exit code {code}")
        if waiting and not self.lost:
            # The job has ended without those that have started again.
            for child in [one for one in children if one.pid not in self._told]:
                child.kill()
                child.join()
                children.remove(child)

    def _reached(self) -> Any:
        if self._client is None:
            import torch.distributed as dist

            from ballast_trainer.distributed.process_group import reach_store

            store = reach_store("127.0.0.1", self._port, _STORE_SECONDS)
            self._client = dist.PrefixStore(attempt_prefix(), store)
        return self._client

    def close(self) -> None:
        """End the process that serves it."""
        self._server.kill()
        self._server.join()


def serve(address: str, port: int) -> BaseProcess:
    """A process of its own that serves the ranks' store until it is killed, or this one is gone."""
    context = multiprocessing.get_context("fork")
    server = context.Process(target=_serve, args=(address, port), daemon=True)
    server.start()
    return server


def _serve(address: str, port: int) -> None:
    from ballast_trainer.distributed.process_group import serve_store

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    try:
        store = serve_store(address, port, _STORE_SECONDS)
    except OSError as error:
        # On the network of a host its pods share the port: ranks meet at the store of one of them.
        print_error(f"no store is served at {address}:{port}: {error}")
        return
    while os.getppid() == parent:
        time.sleep(1.0)
    del store


def run_local_ranks(
    ranks: int, body: Callable[[], int], causes: Causes | None = None, *, restarts: int | None = None
) -> int:
    """Run ``body`` in ``ranks`` forks, each with the environment that torchrun would give it.

    SIGTERM is passed on to the ranks, which then save and exit, as they do where this process is killed.
    One that is killed is started again so often (``restarts``), while the others go on without it; None: they
    do not.

    Returns:
        0 where all ranks end well, or those that went on; else the exit code of a rank that failed by itself.
    """
    # The forks share the modules imported here: one import, one copy in memory.
    importlib.import_module("ballast_trainer.preload")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A rank that has just begun hears Ctrl-C once it can stop by it (`StopSignal.install`).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    kept = None if restarts is None else _KeptStore(port, ranks)
    variables = {} if kept is None else {STORE_OUTLIVES_ENV: "1"}
    children = [_fork(rank, ranks, port, body, variables) for rank in range(ranks)]
    started: Counter[int] = Counter()

    def pass_on(number: int, frame: types.FrameType | None) -> None:
        for child in children:
            if child.is_alive():
                os.kill(child.pid or 0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    on_closed_terminal(pass_on)
    # Ctrl-C reaches the ranks by itself; this process waits for them to save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    left_behind: set[int] = set()
    while any(child.is_alive() for child in children):
        if any(child.exitcode == ExitCode.USAGE for child in children):
            # No rank trains yet: the others only wait for the one that refused.
            pass_on(signal.SIGTERM, None)
            _end(children, _REFUSED_SECONDS)
        elif kept is not None:
            kept.look(children)
            while kept.lost:
                rank = int(kept.lost.pop().name)
                if started[rank] < (restarts or 0) and any(child.is_alive() for child in children):
                    started[rank] += 1
                    again = variables | {RESTARTS_ENV: str(started[rank])}
                    children.append(_fork(rank, ranks, port, body, again))
        elif any(child.exitcode for child in children):
            left_behind = _end(children, _LEAVE_SECONDS)
        time.sleep(_POLL_SECONDS)
    if kept is not None:
        kept.close()
    code = _exit_code(children, left_behind, went_on=kept is not None)
    if causes is not None:
        causes.print_first()
    return code


def _fork(
    rank: int, ranks: int, port: int, body: Callable[[], int], variables: Mapping[str, str]
) -> BaseProcess:
    """A rank's process, named by its number."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **variables,
    }
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_rank, args=(environment, body, os.getpid()), name=str(rank))
    child.start()
    return child


def _exit_code(children: Sequence[BaseProcess], left_behind: set[int], *, went_on: bool) -> int:
    """The exit code of the rank that failed by itself; names the ranks that were killed.

    ``went_on``: where some have ended well, those that were killed do not count.
    """
    codes = [child.exitcode or 0 for child in children]
    for rank in left_behind:
        codes[rank] = ExitCode.PEER_LOST
        print_error(f"rank {rank} did not end within {_LEAVE_SECONDS:.0f} s of another, and was killed")
    if ExitCode.USAGE in codes:
        return ExitCode.USAGE
    for child, code in zip(children, codes, strict=True):
        if code < 0:
            print_error(f"rank {child.name} was killed by {signal.Signals(-code).name}")
    ended_well = [code for code in codes if code in _ENDED_WELL]
    if went_on and ended_well and all(c in _ENDED_WELL or c < 0 or c == ExitCode.PEER_LOST for c in codes):
        return max(ended_well)
    # A rank that only lost its peer is not the cause.
    first = next((code for code in codes if code not in {0, ExitCode.PEER_LOST}), max(codes))
    return 128 - first if first < 0 else first


def _rank(environment: dict[str, str], body: Callable[[], int], parent: int) -> None:
    end_with_parent(parent, signal.SIGTERM)
    os.environ.update(environment)
    leave(body())


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
