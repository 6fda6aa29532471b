"""Stopping on SIGTERM: finish the step, save, exit; with a message where the grace period is too short.

A rank that the operator may release, since its pod alone is evicted, first trains on for a while: once a plan
says so, it hands its layers over, and the job need not stop.

A spot notice or an eviction gives a pod ``terminationGracePeriodSeconds``, then kills it.  Python
handles a signal between two bytecodes of the main thread, which may wait for another rank inside
torch; so a separate thread is woken by the C handler at once and watches the time.
"""

import os
import signal
import socket
import threading
import time
import types
from collections.abc import Callable, Mapping

from ballast_policies.contract.messages import HANDOVER_ENV

from ballast_trainer.environment import seconds_from
from ballast_trainer.terminal import on_terminal

STOP_SECONDS_ENV = "BALLAST_STOP_SECONDS"
"""Seconds from SIGTERM to SIGKILL; the operator sets it from the pod's grace period."""

LEAVE_SECONDS = 2.0
"""Seconds of these that are reserved for the exit: the termination message, and delays of the kubelet."""


class StopSignal:
    """Request to this process to stop; ``seconds`` from SIGTERM to its kill, None: it is not killed."""

    def __init__(self, *, handover_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Not told yet; after SIGTERM this rank may wait ``handover_seconds`` for a plan that releases it."""
        self.received = False
        self.seconds: float | None = None
        self._handover_seconds, self._clock = handover_seconds, clock
        self._at = 0.0

    def install(
        self,
        *,
        interactive: bool = False,
        seconds: float | None = None,
        overdue: Callable[[str], None] | None = None,
    ) -> None:
        """Listen to SIGTERM from now on.

        Args:
            interactive: listen to the first Ctrl-C too, and to the end of the terminal.
            seconds: how long after SIGTERM the process is killed; None: it is not.
            overdue: called on a separate thread, with the reason as text, a little before that; must end
                the process.
        """
        self.seconds = seconds
        signal.signal(signal.SIGTERM, self._receive)
        os.register_at_fork(after_in_child=self._undo)
        if interactive:
            on_terminal(self._receive)
        # Those that were kept for this moment.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        if seconds is not None and overdue is not None:
            told, self._tell = socket.socketpair()
            self._tell.setblocking(False)
            signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
            arguments = (told, seconds, overdue)
            threading.Thread(target=self._watch, args=arguments, name="stop-deadline", daemon=True).start()

    def votes(self, rank: int, ranks: int, saving_seconds: float) -> int:
        """Votes of this rank in a sum over all: the job stops where that reaches ``ranks``.

        0: it was not told to stop; 1: it was, and can wait for a plan that releases it; ``ranks``: the job
        has to stop now, since rank 0 is never released, or no more than twice the time to save is left.
        """
        if not self.received:
            return 0
        waits = self._handover_seconds
        if self.seconds is not None:
            waits = min(waits, self.seconds - LEAVE_SECONDS - 2 * saving_seconds)
        return ranks if rank == 0 or self._clock() - self._at >= waits else 1

    def last_words_until(self) -> float:
        """Time, by its clock, until which a job that is done says so; after SIGTERM, in half of its time."""
        if not self.received:
            return float("inf")
        return self._at + (0.0 if self.seconds is None else max(0.0, self.seconds - LEAVE_SECONDS) / 2)

    def receive(self) -> None:
        """SIGTERM has come."""
        if not self.received:
            self._at = self._clock()
            self.received = True

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        self.receive()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _undo(self) -> None:
        """A fork, such as of a user's pool, ends by SIGTERM, and this process does not hear of it."""
        if signal.getsignal(signal.SIGTERM) == self._receive:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)

    def _watch(self, told: socket.socket, seconds: float, overdue: Callable[[str], None]) -> None:
        while signal.SIGTERM not in told.recv(64):
            pass
        self.receive()
        usable = max(0.0, seconds - LEAVE_SECONDS)
        time.sleep(usable)
        overdue(
            f"told to stop, but the state is not saved {usable:g} s later: the step or the save is slower, "
            "or another rank does not answer; the newest checkpoint counts. To fix: a longer "
            "terminationGracePeriodSeconds, or a smaller checkpoint.everySteps"
        )


def stop_seconds(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds from SIGTERM to the kill, where the environment has them. Raises ConfigurationError."""
    return seconds_from(environment, STOP_SECONDS_ENV)


def handover_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds after SIGTERM that this process may wait for a plan that releases it; 0: none will come.

    Raises:
        ConfigurationError: the environment has something else than a number of seconds.
    """
    return seconds_from(environment, HANDOVER_ENV) or 0.0
