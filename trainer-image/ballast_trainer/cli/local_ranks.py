"""Ranks of a pod, or of a machine outside of pods: forks that share one import of torch, and end as one.

Where they go on without a lost one, this process, which outlives it, has another one serve their store: those
of a gang's pods meet at that of its first pod.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ballast_policies.contract.messages import ExitCode

from ballast_trainer.cli.rank_processes import (
    ENDED_WELL,
    LEAVE_SECONDS,
    Body,
    RankProcess,
    RankSupervisor,
    report,
)
from ballast_trainer.distributed import survivors
from ballast_trainer.environment import STORE_OUTLIVES_ENV
from ballast_trainer.process_exit import print_error

_STORE_SECONDS = 120.0
"""Seconds that the process that serves the ranks' store may take to listen on this machine."""
_LOOKS_FOR_HUNG = 20
"""Looks between two for ranks that hang."""


def attempt_prefix() -> str:
    """Prefix of the ranks' keys in their store: a restarted attempt has others."""
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class _KeptStore:
    """The store of ranks that go on without a lost one, as their parent, which has no threads, sees it."""

    def __init__(self, port: int, supervisor: RankSupervisor) -> None:
        self._port, self._supervisor = port, supervisor
        self._client: Any = None
        self._looks = 0

    def is_lost(self, ended: RankProcess) -> bool:
        """Tell the ranks that one of them has ended; True: others may take it back."""
        store, code = self._reached(), ended.code or 0
        process = survivors.process_of(store, ended.process)
        if process is not None and code in ENDED_WELL:
            survivors.Fate.LEFT.tell(store, process)
            return False
        if process is not None and (code < 0 or code == ExitCode.PEER_LOST):
            survivors.Fate.GONE.tell(store, process)
        elif process is not None or not ended.restarts:
            survivors.tell_none_goes_on(store, f"{ended.name} has ended with exit code {code}")
            return False
        # Else it had started again, and none waits for it.
        return bool(self._supervisor.running())

    def look(self) -> None:
        """End the ranks that the others have given up, and those that the job has ended without."""
        self._looks += 1
        running = self._supervisor.running()
        if self._looks % _LOOKS_FOR_HUNG or not running:
            return
        store = self._reached()
        waiting = len(running) < len(self._supervisor.members)
        for member in running:
            process = survivors.process_of(store, member.process)
            waiting &= process is not None and not survivors.Fate.ENTERED.is_of(store, process)
            if process is not None and survivors.Fate.HUNG.is_of(store, process):
                member.send(signal.SIGKILL)
        for member in running if waiting else ():
            member.give_up()

    def _reached(self) -> Any:
        if self._client is None:
            import torch.distributed as dist

            from ballast_trainer.distributed.process_group import reach_store

            store = reach_store("127.0.0.1", self._port, _STORE_SECONDS)
            self._client = dist.PrefixStore(attempt_prefix(), store)
        return self._client


@contextlib.contextmanager
def _served(address: str, port: int) -> Iterator[None]:
    """Context in which, or until this process is gone, a process of its own serves the ranks' store."""
    # Neither this process nor the server hears of one before it can; `RankSupervisor` unblocks them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(address, port), daemon=True)
    server.start()
    yield
    server.kill()
    server.join()


def _serve(address: str, port: int) -> None:
    from ballast_trainer.distributed.process_group import serve_store

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
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


def run_pod_ranks(
    ranks: int,
    body: Body,
    log: Path | None,
    *,
    imports: str = "ballast_trainer.preload",
    leave_seconds: float = LEAVE_SECONDS,
    restarts: int = 0,
    store: tuple[str, int] | None = None,
) -> int:
    """Run ``body`` in as many forks, and wait for all.

    Args:
        ranks: how many.
        body: of each.
        log: the pod's termination log; None: there is none.
        imports: a module to import first: the forks share it, one import and one copy in memory.
        leave_seconds: how long ranks may stay when another has failed.
        restarts: how often each of them is started again when a signal has killed it.
        store: address and port of the store that another process serves beside them; None: none does.

    Returns:
        the exit code of the pod: 0 where all ranks end well, else that of the first that failed by itself;
        128 + n where signal n killed it.
    """
    # One that comes during the import is for the ranks.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    importlib.import_module(imports)
    supervisor = RankSupervisor(ranks=ranks, body=body, restarts=restarts, leave_seconds=leave_seconds)
    with contextlib.nullcontext() if store is None else _served(*store):
        ended = supervisor.run()
    return report([member for member in ended if not member.started_again], log)


def run_local_ranks(ranks: int, body: Body, *, restarts: int | None = None) -> int:
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
    goes_on = restarts is not None

    def as_under_torchrun(rank: int, log: Path) -> int:
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks)})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        if goes_on:
            os.environ[STORE_OUTLIVES_ENV] = "1"
        return body(rank, log)

    supervisor = RankSupervisor(ranks=ranks, body=as_under_torchrun, interactive=True, restarts=restarts or 0)
    if goes_on:
        kept = _KeptStore(port, supervisor)
        supervisor.leave_seconds, supervisor.is_lost, supervisor.look = None, kept.is_lost, kept.look
    with _served("127.0.0.1", port) if goes_on else contextlib.nullcontext():
        ended = supervisor.run()
    code = report(ended)
    codes = {member.code or 0 for member in ended}
    ended_well = codes.intersection(ENDED_WELL)
    # Where some have ended well, those that were lost do not count.
    own_fault = any(one > 0 for one in codes - {*ENDED_WELL, ExitCode.PEER_LOST})
    return max(ended_well) if goes_on and ended_well and not own_fault else code
