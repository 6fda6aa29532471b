"""The thread in which rank 0 uses the channel: it polls the plan and sends the training loop's messages.

The loop never waits for the network: a report replaces the one before, proposals and
acknowledgements are sent in the next turn, and a failed call is repeated.
"""

import itertools
import logging
import threading

from ballast_policies.contract import Ack, Plan, Proposal, Report

from ballast_trainer.channel.base import Channel, ChannelError, Messages

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often the plan is read."""
RENEW_SECONDS = 1.0
"""How often the newest report is written at most, and the lease renewed at least."""


class ChannelThread:
    """Runs a channel in a daemon thread."""

    def __init__(self, channel: Channel, plan: Plan) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._plan = plan
        self._outbox = Messages()
        self._urgent = True
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    def plan(self) -> Plan:
        """The newest plan seen."""
        with self._lock:
            return self._plan

    def report(self, report: Report) -> None:
        """Send this report within a second, unless a newer one replaces it."""
        with self._lock:
            self._outbox = self._outbox.replaced_by(Messages(report=report))

    def send(
        self, *, proposal: Proposal | None = None, ack: Ack | None = None, report: Report | None = None
    ) -> None:
        """Send these now."""
        with self._lock:
            self._outbox = self._outbox.replaced_by(Messages(proposal=proposal, ack=ack, report=report))
            self._urgent = True
        self._wake.set()

    def close(self, *, finished_step: int | None = None, timeout_seconds: float = 5.0) -> None:
        """Send the remaining messages, and end the thread."""
        with self._lock:
            self._outbox = self._outbox.replaced_by(Messages(finished_step=finished_step))
            self._urgent = True
            self._closing = True
        self._wake.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        turns_per_renewal = round(RENEW_SECONDS / POLL_SECONDS)
        for turn in itertools.count():
            with self._lock:
                closing = self._closing
                due = self._urgent or turn % turns_per_renewal == 0
            try:
                if due:
                    self._write()
                if not closing:
                    self._read()
            except ChannelError as error:
                logger.warning("channel: %s; trying again", error)
            if closing:
                return
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()

    def _write(self) -> None:
        with self._lock:
            messages, self._outbox, self._urgent = self._outbox, Messages(), False
        try:
            self._channel.write(messages)
        except ChannelError:
            with self._lock:
                # Messages added in the meantime are newer.
                self._outbox = messages.replaced_by(self._outbox)
            raise

    def _read(self) -> None:
        plan = self._channel.read_plan()
        if plan is not None:
            with self._lock:
                self._plan = plan
