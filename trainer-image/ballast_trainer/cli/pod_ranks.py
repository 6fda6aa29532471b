"""The ranks of a pod with several GPUs: one process each, supervised as one.

The supervisor starts them, passes on SIGTERM, puts the local rank in front of what they print, and reaps what
they leave behind.  Where one fails, the others have some seconds to notice and leave, then they are killed;
the pod's exit code and termination message are those of the first rank that failed by itself.

Where the ranks of a gang go on in place, one that a signal kills is started again, and this process, which
outlives it, has another one serve a store: the gang meets at that of its first pod.
"""

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import sys
import termios
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from ballast_policies.contract import ContractError, ExitCode, TerminationMessage

from ballast_trainer.cli.local_ranks import serve
from ballast_trainer.environment import RESTARTS_ENV
from ballast_trainer.process_exit import end_with_parent, leave, print_error

Body = Callable[[int, Path], int]
"""Function of a rank: gets its local rank and where to write its termination message, returns an exit code.
It unblocks SIGTERM once it has a handler."""

LEAVE_SECONDS = 10.0
"""Seconds for the other ranks to leave when one has failed; they notice by themselves."""

_POLL_SECONDS = 0.05
_OUTPUT_SECONDS = 30.0
"""Seconds to wait for the last lines where nobody reads them."""
_LONGEST_LINE = 1 << 16
_NOT_TO_BLAME = (ExitCode.OK, ExitCode.STOPPED, ExitCode.PEER_LOST)


class _Rank:
    """One process of the pod, as the supervisor holds it: its id, and the pipes that it writes to."""

    def __init__(self, local_rank: int, restarts: int = 0) -> None:
        self.local_rank, self.restarts = local_rank, restarts
        self.process = 0
        self.code: int | None = None
        self.outputs = {1: os.pipe(), 2: os.pipe()}
        self.message, self.ended = os.pipe(), os.pipe()
        self.copying: list[threading.Thread] = []

    def close(self) -> None:
        """Close all pipes, which belong to another process."""
        for read, write in (*self.outputs.values(), self.message, self.ended):
            os.close(read)
            os.close(write)

    def become(self, ranks: int, body: Body) -> int:
        """Run ``body`` in the fork, under torchrun's names of the local rank."""
        for descriptor, (_, write) in self.outputs.items():
            os.dup2(write, descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.update({"LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(ranks)})
        os.environ[RESTARTS_ENV] = str(self.restarts)
        return body(self.local_rank, Path(f"/dev/fd/{self.message[1]}"))

    def copy_output(self, ranks: int, before: Sequence[threading.Thread] = ()) -> None:
        """Copy what the rank prints until it has ended, in threads: each after the one before it.

        Processes that it has left behind may hold its output open.
        """
        for number, (descriptor, (read, write)) in enumerate(self.outputs.items()):
            os.close(write)
            # The first rank's standard output is the job's figures, a JSON object a line.
            figures = descriptor == 1 and self.local_rank == 0
            prefix = b"" if figures or ranks == 1 else f"[local rank {self.local_rank}] ".encode()
            arguments = (read, self.ended[0], descriptor, prefix, before[number] if before else None)
            self.copying.append(threading.Thread(target=_copy_lines, args=arguments, daemon=True))
            self.copying[-1].start()
        os.close(self.message[1])

    def termination(self) -> TerminationMessage | None:
        """Termination message that it wrote; None: nothing that can be read."""
        os.set_blocking(self.message[0], False)
        try:
            text = os.read(self.message[0], _LONGEST_LINE).decode()
            first, _ = json.JSONDecoder().raw_decode(text)
            return TerminationMessage.from_json(json.dumps(first))
        except (BlockingIOError, ValueError, ContractError):
            return None


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
        restarts: how often each of them is started again when a signal has killed it, unless this process was
            told to stop.
        store: address and port of the store that another process serves beside them; None: none does.

    Returns:
        the exit code of the pod: 0 where all ranks end well, else that of the first that failed by itself;
        128 + n where signal n killed it.
    """
    # No SIGTERM is missed while they start, and none runs this process's handler in a fork.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    importlib.import_module(imports)
    server = None if store is None else serve(*store)
    members = [_Rank(number) for number in range(ranks)]
    _fork(members, members, body)
    for member in members:
        member.copy_output(ranks)
    stopping = False

    def pass_on(number: int, frame: types.FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for member in members:
            if member.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.process, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def again(member: _Rank) -> bool:
        """Start a rank again that has been killed; False: its end counts."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            if stopping or member.restarts >= restarts:
                return False
            print_error(f"local rank {member.local_rank} was killed, and is started again")
            new = _Rank(member.local_rank, member.restarts + 1)
            members[member.local_rank] = new
            _fork([new], members, body)
            new.copy_output(ranks, before=member.copying)
            return True
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    ended = _wait(members, leave_seconds, again)
    deadline = time.monotonic() + _OUTPUT_SECONDS
    for thread in (thread for member in members for thread in member.copying):
        thread.join(max(0.0, deadline - time.monotonic()))
    if server is not None:
        server.kill()
        server.join()
    return _report(ended, log, ranks)


def _fork(new: Sequence[_Rank], members: Sequence[_Rank], body: Body) -> None:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    for member in new:
        member.process = os.fork()
        if member.process == 0:
            code = int(ExitCode.ERROR)
            try:
                end_with_parent(parent)
                for other in new:
                    if other is not member:
                        other.close()
                code = member.become(len(members), body)
            finally:
                leave(code)


def _wait(members: list[_Rank], leave_seconds: float, again: Callable[[_Rank], bool]) -> list[_Rank]:
    """The ranks, in the order of their ends; those that are not started again."""
    ended: list[_Rank] = []
    deadline: float | None = None
    while len(ended) < len(members):
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            if deadline is not None and time.monotonic() > deadline:
                _kill_the_rest(members)
                deadline = None
            time.sleep(_POLL_SECONDS)
            continue
        # Otherwise it is one that a rank has left behind.
        for member in [one for one in members if one.process == process]:
            code = os.waitstatus_to_exitcode(status)
            os.write(member.ended[1], b".")
            if code < 0 and deadline is None and member.code is None and again(member):
                continue
            if member.code is None:
                member.code = code
                if deadline is None and code not in (ExitCode.OK, ExitCode.STOPPED):
                    deadline = time.monotonic() + leave_seconds
            ended.append(member)
    return ended


def _kill_the_rest(members: Sequence[_Rank]) -> None:
    for member in members:
        if member.code is None:
            print_error(
                f"local rank {member.local_rank} did not leave after another had failed, and is killed"
            )
            # It is not the cause.
            member.code = ExitCode.PEER_LOST
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.process, signal.SIGKILL)


def _report(ended: Sequence[_Rank], log: Path | None, ranks: int) -> int:
    """Write the pod's termination message, and return its exit code."""
    first = _decisive(ended)
    code, who = first.code or 0, f"local rank {first.local_rank}"
    said, text = first.termination(), None
    if said is not None:
        message = said.message if code == ExitCode.OK or ranks == 1 else f"{who}: {said.message}"
        text = TerminationMessage(reason=said.reason, message=message, step=said.step).to_json()
        if code not in _NOT_TO_BLAME:
            # Its own line is above those of the ranks that only lost it.
            print_error(f"{said.reason}: {message}")
    elif code < 0:
        # Not in the contract's form: whether the job is to blame is for Kubernetes to say (OOMKilled).
        text = f"{who} was killed by {signal.Signals(-code).name}"
        print_error(text)
    if log is not None and text is not None:
        try:
            log.write_text(text)
        except OSError as error:
            print_error(f"cannot write {log}: {error}")
    return 128 - code if code < 0 else code


def _decisive(ended: Sequence[_Rank]) -> _Rank:
    """The rank whose end is the pod's: the first that failed by itself, else one that stopped or lost one."""
    failed = [member for member in ended if member.code not in _NOT_TO_BLAME]
    stopped = [member for member in ended if member.code == ExitCode.STOPPED]
    lost = [member for member in ended if member.code == ExitCode.PEER_LOST]
    first_rank = [member for member in ended if member.local_rank == 0]
    return next(iter((*failed, *stopped, *lost, *first_rank)))


def _copy_lines(source: int, ended: int, target: int, prefix: bytes, before: threading.Thread | None) -> None:
    if before is not None:
        before.join()
    rest = b""
    while chunk := _read(source, ended):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        _write(target, b"".join(prefix + line + b"\n" for line in lines))
    if rest:
        _write(target, prefix + rest + b"\n")


def _read(source: int, ended: int) -> bytes:
    """Some of what a rank has written; empty: it has closed ``source``, or ``ended``, and all is read."""
    ready, _, _ = select.select([source, ended], [], [])
    if ended in ready:
        # All that it has written is here.
        unread = int.from_bytes(fcntl.ioctl(source, termios.FIONREAD, bytes(4)), sys.byteorder)
        return os.read(source, min(unread, _LONGEST_LINE)) if unread else b""
    return os.read(source, _LONGEST_LINE)


def _write(target: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]
