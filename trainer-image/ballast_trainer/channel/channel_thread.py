"""Rank 0's thread on the channel: it polls the plan and sends what the training loop hands it.

The loop never waits for the network: reports overwrite one another, proposals and
acknowledgements are sent in the next turn, and a failed call is made again.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract import Ack, Plan, Proposal, Report

from ballast_trainer.channel.base import Channel, ChannelError

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
        self._outbox: dict[str, Any] = {}
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
            self._outbox["report"] = report

    def send(
        self, *, proposal: Proposal | None = None, ack: Ack | None = None, report: Report | None = None
    ) -> None:
        """Send these now."""
        messages = {"proposal": proposal, "ack": ack, "report": report}
        with self._lock:
            self._outbox.update({name: message for name, message in messages.items() if message is not None})
            self._urgent = True
        self._wake.set()

    def close(self, *, finished_step: int | None = None, timeout_seconds: float = 5.0) -> None:
        """Send what is left, and end the thread."""
        with self._lock:
            if finished_step is not None:
                self._outbox["finished_step"] = finished_step
            self._urgent = True
            self._closing = True
        self._wake.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        turns_per_renewal = round(RENEW_SECONDS / POLL_SECONDS)
        turn = 0
        while True:
            with self._lock:
                closing = self._closing
                due = self._urgent or turn % turns_per_renewal == 0
                outbox: Mapping[str, Any] = dict(self._outbox) if due else {}
                if due:
                    self._outbox.clear()
                    self._urgent = False
            try:
                if due:
                    self._channel.write(**outbox)
                if not closing:
                    plan = self._channel.read_plan()
                    if plan is not None:
                        with self._lock:
                            self._plan = plan
            except ChannelError as error:
                logger.warning("channel: %s; trying again", error)
                with self._lock:
                    self._outbox = {**outbox, **self._outbox}
            if closing:
                return
            turn += 1
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
