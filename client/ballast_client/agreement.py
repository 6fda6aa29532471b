"""The last step of a gang: all ranks leave after the same step, without a collective of their own.

Rank 0 listens; each other rank keeps a connection to it. To stop, rank 0 asks every rank to hold: a rank
answers with the step that it is in, and waits at the end of that step. The largest answer is the last step,
which rank 0 tells all of them. A rank that waits has done its part of every step that the others are in, so
none of them waits without a limit.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

logger = logging.getLogger("ballast_client")

MEET_SECONDS = 10.0
"""Seconds that rank 0 waits for the answers of all ranks, before it gives up and trains on."""

_LONGEST_LINE = 200


class LastStep:
    """The last step, if any. The training loop calls :meth:`reached`, the agreement's threads the rest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = 0
        self._holds: int | None = None
        self._last: int | None = None

    def start(self, step: int) -> None:
        """The loop has done ``step`` steps before it begins."""
        with self._changed:
            self._done = step

    def reached(self, step: int) -> bool:
        """The loop has done ``step``: whether it was the last. Waits where that is being found out."""
        with self._changed:
            self._done = step
            while self._last is None and self._holds is not None and step >= self._holds:
                self._changed.wait()
            return self._last is not None and step >= self._last

    def hold(self) -> int:
        """The step that the loop is in; it waits at its end until :meth:`decide` or :meth:`release`."""
        with self._changed:
            if self._holds is None:
                self._holds = self._done + 1
            return self._holds

    def decide(self, step: int) -> None:
        """The last step is known."""
        with self._changed:
            self._last, self._holds = step, None
            self._changed.notify_all()

    def release(self) -> None:
        """There is no agreement: train on."""
        with self._changed:
            self._holds = None
            self._changed.notify_all()


class Leader:
    """Rank 0's side; ``asked`` is called where another rank has been told to end."""

    def __init__(
        self, last: LastStep, *, address: str, port: int, ranks: int, token: str, asked: Callable[[str], None]
    ) -> None:
        self._last = last
        self._ranks = ranks
        self._token = token
        self._asked = asked
        self._peers: dict[int, socket.socket] = {}
        self._answers: dict[socket.socket, int] = {}
        self._changed = threading.Condition()
        self._server: socket.socket | None = None
        if ranks > 1:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._server = socket.create_server((address, port), family=family, reuse_port=False)
            threading.Thread(target=self._accept, name="ballast-accept", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens on; 0: a rank alone does not."""
        return self._server.getsockname()[1] if self._server is not None else 0

    def agree(self) -> bool:
        """Find the last step and tell all ranks; False: not all of them answered, and no rank stops."""
        own = self._last.hold()
        until = time.monotonic() + MEET_SECONDS
        asked: set[socket.socket] = set()
        with self._changed:
            while len(answered := self._answered()) < self._ranks - 1:
                for peer in set(self._peers.values()) - asked:
                    asked.add(peer)
                    _send(peer, "hold")
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    break
            silent = sorted(set(range(1, self._ranks)) - answered.keys())
            step = max([own, *answered.values()])
            for peer in self._peers.values():
                if silent:  # they train on, and answer anew once they have connected again
                    _hang_up(peer)
                else:
                    _send(peer, f"stop {step}")
            if silent:
                self._peers.clear()
        if not silent:
            self._last.decide(step)
            return True
        self._last.release()
        logger.warning("ranks %s did not answer; to save together, make a Job in every rank", silent)
        return False

    def _answered(self) -> dict[int, int]:
        """Ranks that hold -> the step that they are in."""
        return {rank: self._answers[peer] for rank, peer in self._peers.items() if peer in self._answers}

    def close(self) -> None:
        """Listen no more; the connections stay until the process ends."""
        if self._server is not None:
            self._server.close()

    def _accept(self) -> None:
        assert self._server is not None
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), name="ballast-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        reading = peer.makefile("r", encoding="ascii", errors="replace")
        with contextlib.suppress(OSError), peer, reading as lines:
            rank = self._greeted(lines.readline(_LONGEST_LINE))
            if rank is None:
                return
            with self._changed:
                self._peers[rank] = peer
                self._changed.notify_all()
            try:
                for word, value in _words(lines):
                    if word == "at":
                        with self._changed:
                            self._answers[peer] = value
                            self._changed.notify_all()
                    elif word == "ask":
                        self._asked(f"rank {rank} has been told to end")
            finally:
                with self._changed:
                    self._answers.pop(peer, None)
                    if self._peers.get(rank) is peer:
                        del self._peers[rank]

    def _greeted(self, line: str) -> int | None:
        """The rank that ``join TOKEN RANK`` names; None: a stranger."""
        parts = line.split()
        if len(parts) != 3 or not secrets.compare_digest(parts[1].encode(), self._token.encode()):
            return None
        return int(parts[2]) if parts[2].isdecimal() and 0 < int(parts[2]) < self._ranks else None


class Follower:
    """The side of a rank other than 0: connects in the background, and again where the connection is lost."""

    def __init__(self, last: LastStep, *, address: str, port: int, rank: int, token: str) -> None:
        self._last = last
        self._where = (address, port)
        self._greeting = f"join {token} {rank}"
        self._connection: socket.socket | None = None
        self._wants = False
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ballast-follow", daemon=True).start()

    def ask(self) -> None:
        """Ask rank 0 to find a last step: this rank has been told to end."""
        self._wants = True
        if self._connection is not None:
            _send(self._connection, "ask 0")

    def close(self) -> None:
        """Follow no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with socket.create_connection(self._where, timeout=5.0) as connection:
                    connection.settimeout(None)
                    _send(connection, self._greeting)
                    self._connection = connection
                    if self._wants:
                        _send(connection, "ask 0")
                    self._follow(connection)
            except OSError:
                pass
            finally:
                self._connection = None
                self._last.release()
            self._closed.wait(0.5)

    def _follow(self, connection: socket.socket) -> None:
        with connection.makefile("r", encoding="ascii", errors="replace") as lines:
            for word, value in _words(lines):
                if word == "hold":
                    _send(connection, f"at {self._last.hold()}")
                elif word == "stop":
                    self._last.decide(value)


def _words(lines: TextIO) -> Iterator[tuple[str, int]]:
    """(word, number) of each line; a line without a number has 0; ends with the connection or nonsense."""
    while line := lines.readline(_LONGEST_LINE):
        word, _, number = line.strip().partition(" ")
        if number and not (number.isdecimal() and len(number) <= 16):
            return
        yield word, int(number or 0)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _send(connection: socket.socket, line: str) -> None:
    try:
        connection.sendall(f"{line}\n".encode("ascii"))
    except OSError as error:
        logger.debug("not sent: %s: %s", line.split(maxsplit=1)[0], error)
