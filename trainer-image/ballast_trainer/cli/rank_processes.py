"""Rank processes of one pod or machine: forks of one process, which supervises them as one.

It starts them, passes on SIGTERM, starts again those that are lost, and reaps what they leave behind.  Where
one fails, the others have some seconds to notice and leave, then they are killed.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import select
import signal
import sys
import termios
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.messages import ExitCode, ExitReason, TerminationMessage

from ballast_trainer.environment import RESTARTS_ENV
from ballast_trainer.process_exit import PIPES, end_with_parent, json_of, leave, print_error, write_message
from ballast_trainer.terminal import on_terminal

Body = Callable[[int, Path], int]
"""Function of a rank: gets its number and where to write its termination message, returns an exit code.
`StopSignal.install` lets SIGTERM through, which is kept until then."""

LEAVE_SECONDS = 10.0
"""Seconds for the other ranks to leave when one has failed; they notice by themselves."""

ENDED_WELL = (ExitCode.OK, ExitCode.STOPPED)

_REFUSED_SECONDS = 2.0
"""The same where one of them has refused the configuration: none trains yet."""
_POLL_SECONDS = 0.05
_KEPT = {signal.SIGTERM, signal.SIGINT}
_OUTPUT_SECONDS = 30.0
"""Seconds to wait for the last lines where nobody reads them."""
_LONGEST_LINE = 1 << 16


class RankProcess:
    """One process of a rank, as its parent holds it: its id, and the pipes that it writes to."""

    def __init__(self, number: int, *, copied: bool, restarts: int = 0) -> None:
        """Not started; ``copied``: its parent copies its output. ``restarts``: its starts before this one."""
        self.number, self.restarts = number, restarts
        self.name = f"local rank {number}" if copied else f"rank {number}"
        self.process = 0
        self.code: int | None = None
        self.started_again = False
        self.outputs = {descriptor: os.pipe() for descriptor in ((1, 2) if copied else ())}
        self.message, self.ended = os.pipe(), os.pipe()
        self.copying: list[threading.Thread] = []

    def become(self, ranks: int, body: Body, forked: Sequence["RankProcess"]) -> int:
        """Run ``body`` in the fork, under torchrun's names of the local rank."""
        for other in [one for one in forked if one is not self]:
            for descriptor in itertools.chain(*other.outputs.values(), other.message, other.ended):
                os.close(descriptor)
        if not self.outputs:
            # The terminal's signals are for the parent, which tells all ranks.
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, (_, write) in self.outputs.items():
            os.dup2(write, descriptor)
        if self.outputs:
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.update({"LOCAL_RANK": str(self.number), "LOCAL_WORLD_SIZE": str(ranks)})
        os.environ[RESTARTS_ENV] = str(self.restarts)
        return body(self.number, PIPES / str(self.message[1]))

    def copy_output(self, *, labelled: bool, before: Sequence[threading.Thread] = ()) -> None:
        """Copy what the rank prints until it has ended, in threads: each after the one before it.

        Processes that it has left behind may hold its output open.
        """
        for number, (descriptor, (read, write)) in enumerate(self.outputs.items()):
            os.close(write)
            # The first rank's standard output is the job's figures, a JSON object a line.
            figures = descriptor == 1 and self.number == 0
            prefix = f"[{self.name}] ".encode() if labelled and not figures else b""
            arguments = (read, self.ended[0], descriptor, prefix, before[number] if before else None)
            self.copying.append(threading.Thread(target=_copy_lines, args=arguments, daemon=True))
            self.copying[-1].start()
        os.close(self.message[1])

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, number)

    def give_up(self) -> None:
        """Kill it, which is not the cause of what ends the others."""
        self.code = ExitCode.PEER_LOST
        self.send(signal.SIGKILL)

    def termination(self) -> TerminationMessage | None:
        """Termination message that it wrote; None: nothing that can be read."""
        os.set_blocking(self.message[0], False)
        try:
            text = os.read(self.message[0], _LONGEST_LINE).decode()
            first, _ = json.JSONDecoder().raw_decode(text)
            return TerminationMessage.from_json(json.dumps(first))
        except (BlockingIOError, ValueError, ContractError):
            return None

    def killed_by(self) -> str | None:
        """The signal that has ended it, in words; None: none has."""
        code = self.code or 0
        return f"{self.name} was killed by {signal.Signals(-code).name}" if code < 0 else None


@dataclasses.dataclass(kw_only=True)
class RankSupervisor:
    """The parent of rank processes, until the last has ended.

    Attributes:
        ranks: how many.
        body: of each.
        interactive: they have the terminal, and may save at Ctrl-C, or when it is closed or this process is
            killed; a second Ctrl-C ends them. Else this process copies what they print, their name in front,
            and they end with it.
        restarts: how often each is started again when it is lost, unless this process was told to stop.
        leave_seconds: how long ranks may stay when another has failed; None: they go on.
        is_lost: called with each that has ended; True: it may be started again.
        look: called again and again while some run.
        members: all that were started, in this order; one that was started again is here as often.
    """

    ranks: int
    body: Body
    interactive: bool = False
    restarts: int = 0
    leave_seconds: float | None = LEAVE_SECONDS
    is_lost: Callable[[RankProcess], bool] = lambda ended: ended.killed_by() is not None
    look: Callable[[], None] = lambda: None
    members: list[RankProcess] = dataclasses.field(default_factory=list)
    _stopping: bool = False
    _deadline: float | None = None

    def run(self) -> list[RankProcess]:
        """Start the ranks, and wait for all; returns them in the order of their ends."""
        self._fork(range(self.ranks))
        ended: list[RankProcess] = []
        while len(ended) < len(self.members):
            process, status = os.waitpid(-1, os.WNOHANG)
            # Otherwise it is one that a rank has left behind.
            for member in [one for one in self.members if process and one.process == process]:
                ended.append(member)
                os.write(member.ended[1], b".")
                if member.code is None:
                    member.code = os.waitstatus_to_exitcode(status)
                    self._follow(member)
            if process == 0:
                if self._deadline is None:
                    self.look()
                elif time.monotonic() > self._deadline:
                    for member in self.running():
                        print_error(f"{member.name} did not leave after another had failed, and is killed")
                        member.give_up()
                time.sleep(_POLL_SECONDS)
        deadline = time.monotonic() + _OUTPUT_SECONDS
        for thread in (thread for member in ended for thread in member.copying):
            thread.join(max(0.0, deadline - time.monotonic()))
        return ended

    def running(self) -> list[RankProcess]:
        """Processes that have not ended."""
        return [member for member in self.members if member.code is None]

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        if number == signal.SIGINT and self._stopping:
            for member in self.running():
                member.send(signal.SIGKILL)
            print_error("ended at once by a second Ctrl-C; the newest checkpoint counts")
            leave(128 + signal.SIGINT)
        self._stopping = True
        for member in self.running():
            member.send(signal.SIGTERM)

    def _fork(self, numbers: Iterable[int], before: RankProcess | None = None) -> None:
        restarts = 0 if before is None else before.restarts + 1
        new = [RankProcess(one, copied=not self.interactive, restarts=restarts) for one in numbers]
        parent = os.getpid()
        # No signal is missed meanwhile, and none runs this process's handler in a fork.
        signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT)
        sys.stdout.flush()
        sys.stderr.flush()
        for member in new:
            member.process = os.fork()
            if member.process == 0:
                code = int(ExitCode.ERROR)
                try:
                    end_with_parent(parent, signal.SIGTERM if self.interactive else signal.SIGKILL)
                    code = member.become(self.ranks, self.body, new)
                except BaseException:
                    traceback.print_exc()
                finally:
                    leave(code)
        self.members.extend(new)
        for member in new:
            member.copy_output(labelled=self.ranks > 1, before=before.copying if before else ())
            if self._stopping:
                # The others were told just before.
                member.send(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._stop)
        if self.interactive:
            on_terminal(self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT)

    def _follow(self, member: RankProcess) -> None:
        """Do what the end of a rank asks for: start it again, or have the others leave."""
        seconds = self.leave_seconds
        if member.code == ExitCode.USAGE:
            self._stop(signal.SIGTERM, None)
            seconds = _REFUSED_SECONDS
        elif self._deadline is not None:
            return
        elif self.is_lost(member) and member.restarts < self.restarts and not self._stopping:
            print_error(f"{member.name} was lost, and is started again")
            member.started_again = True
            self._fork([member.number], before=member)
            return
        if member.code not in ENDED_WELL and seconds is not None:
            self._deadline = time.monotonic() + seconds


def report(ended: Sequence[RankProcess], log: Path | None = None) -> int:
    """Say what the cause is, also as the pod's termination message, and return the exit code of all."""
    first, said = _decisive(ended), {member: member.termination() for member in ended}
    code, own, text = first.code or 0, said[first], first.killed_by()
    for killed in filter(None, (member.killed_by() for member in ended)):
        # Not in the contract's form: whether the job is to blame is for Kubernetes to say (OOMKilled).
        print_error(killed)
    alike: dict[tuple[ExitReason, str], list[RankProcess]] = {}
    for member, told in said.items():
        if told is not None:
            alike.setdefault((told.reason, told.message), []).append(member)
    words = {key: _named(members, key[1], len(ended)) for key, members in alike.items()}
    failed = [key for key in alike if key[0] is ExitReason.FAILED]
    for reason, message in sorted(failed, key=lambda key: first in alike[key]):
        # The cause is below the lines of the ranks that only lost it.
        print_error(f"{reason}: {words[reason, message]}")
    if own is not None:
        message = own.message if code == ExitCode.OK else words[own.reason, own.message]
        text = json_of(TerminationMessage(reason=own.reason, message=message, step=own.step))
    if log is not None and text is not None:
        write_message(log, text)
    return 128 - code if code < 0 else code


def _named(members: Sequence[RankProcess], message: str, ended: int) -> str:
    """The message with the ranks that ended by it, of ``ended``; one that names the rank at fault stays."""
    if ended == 1 or message.startswith("rank "):
        return message
    numbers = sorted({member.number for member in members})
    kind = members[0].name.rpartition(" ")[0]
    return f"{kind}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {message}"


def _decisive(ended: Sequence[RankProcess]) -> RankProcess:
    """The rank whose end counts: the first that failed by itself, else one that stopped or lost one."""
    order: dict[int, int] = {ExitCode.STOPPED: 1, ExitCode.PEER_LOST: 2, ExitCode.OK: 3}
    return min(ended, key=lambda member: (order.get(member.code or 0, 0), member.code == 0 and member.number))


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
