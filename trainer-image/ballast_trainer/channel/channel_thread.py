"""The thread in which rank 0 uses the channel: it polls the plan and sends the training loop's messages.

The loop never waits for the network. Acknowledgements, proposals and reports that tell of an event are sent
at once. Progress alone waits for the next renewal of the Lease, and each report replaces the one before. A
call that failed is repeated.
"""

import logging
import threading
from time import monotonic

from ballast_client.api_server import ChannelError
from ballast_policies.contract.messages import RENEW_SECONDS, Report
from ballast_policies.contract.plan import Plan

from ballast_trainer.channel.base import Channel, Messages
from ballast_trainer.distributed.stopping import StopSignal

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Seconds between reads of the plan."""

CLOSE_SECONDS, FINISH_SECONDS = 5.0, 120.0
"""Seconds to try the last messages; those that the job is done, longer. While no operator can read them,
nobody else would get the GPUs; without them, the job would be launched again.
"""

EVENTS_PER_RENEWAL = 4
"""Reports of events that may be written between two renewals: a job that saves after every step writes this
many times as often as one that only trains."""


class ChannelThread:
    """Runs a channel in a daemon thread.

    Args:
        channel: to the operator.
        plan: of the launch.
        renew_seconds: between two writes while there is nothing to tell but progress.
        stop: once it is received, a job that is done has less time to tell so.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        *,
        renew_seconds: float = RENEW_SECONDS,
        stop: StopSignal | None = None,
    ) -> None:
        self._channel, self._renew_seconds = channel, renew_seconds
        self._stop = stop or StopSignal()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._until: tuple[float, float] | None = None
        self._plan = plan
        self._outbox = Messages()
        self._urgent = True
        self._reported: tuple[int | None, ...] | None = None
        self._written = self._tried = float("-inf")
        self._pause = 0.0
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    def plan(self) -> Plan:
        """The newest plan seen."""
        with self._lock:
            return self._plan

    def send(self, messages: Messages, *, now: bool = True) -> None:
        """Send these ``now``, or with the next renewal, sooner if they tell of an event; newer ones count."""
        with self._lock:
            self._outbox = self._outbox.replaced_by(messages)
            self._urgent = self._urgent or now
        if now:
            self._wake.set()

    def close(
        self,
        *,
        finished_step: int | None = None,
        end_reason: str | None = None,
        closing: bool = True,
    ) -> None:
        """Send the remaining messages, give the Lease up (``closing``), and end the thread."""
        last = Messages(finished_step=finished_step, end_reason=end_reason, closing=closing or None)
        seconds = CLOSE_SECONDS if finished_step is None else FINISH_SECONDS
        with self._lock:
            self._outbox = self._outbox.replaced_by(last)
            self._until = until = monotonic() + CLOSE_SECONDS, monotonic() + seconds
        self._wake.set()
        self._thread.join(POLL_SECONDS)
        while self._thread.is_alive() and self._has_time(until):
            self._thread.join(POLL_SECONDS)

    def _has_time(self, until: tuple[float, float]) -> bool:
        least, most = until
        return monotonic() < min(most, max(least, self._stop.last_words_until()))

    def _run(self) -> None:
        away = False
        while True:
            with self._lock:
                until = self._until
            try:
                if until is not None or self._due():
                    self._write()
                if until is not None:
                    return
                self._read()
                away = False
            except Exception as error:  # whatever it is, a job whose Lease is not renewed counts as hung
                again = until is None or self._has_time(until)
                if not away or not again:
                    known = isinstance(error, ChannelError)
                    then = "again" if again else "no longer"
                    logger.warning("channel: %s; trying %s", error, then, exc_info=not known)
                away = True
                if not again:
                    return
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()

    def _due(self) -> bool:
        now = monotonic()
        with self._lock:
            if now - self._tried < self._pause:
                return False
            report, since = self._outbox.report, now - self._written
            event = self._outbox.proposal is not None or (
                report is not None and _events(report) != self._reported
            )
            return (
                self._urgent
                or since >= self._renew_seconds
                or (event and since >= self._renew_seconds / EVENTS_PER_RENEWAL)
            )

    def _write(self) -> None:
        with self._lock:
            messages, self._outbox = self._outbox, Messages()
            urgent, self._urgent = self._urgent, False
            self._tried = monotonic()
        try:
            self._channel.write(messages)
        except Exception:
            with self._lock:
                # Messages added in the meantime are newer.
                self._outbox = messages.replaced_by(self._outbox)
                self._urgent = self._urgent or urgent
                self._pause = min(
                    max(POLL_SECONDS, 2 * self._pause), self._renew_seconds / EVENTS_PER_RENEWAL
                )
            raise
        self._written, self._pause = self._tried, 0.0
        if messages.report is not None:
            self._reported = _events(messages.report)

    def _read(self) -> None:
        plan = self._channel.read_plan()
        if plan is None:
            return
        with self._lock:
            # A watch that begins again may tell of an older one first.
            news = plan.epoch > self._plan.epoch
            if not news and plan.epoch == self._plan.epoch:  # the rate changes within an epoch
                plan = self._plan.replace(failures_per_hour=plan.failures_per_hour)
                news = plan != self._plan
            self._plan = plan if news else self._plan
        if news:
            logger.info("read plan %d: %s", plan.epoch, plan.directive)


def _events(report: Report) -> tuple[int | None, ...]:
    """Fields of a report that are more than progress."""
    return (
        report.epoch,
        report.rebalances,
        report.last_rebalance_step,
        report.checkpoint_step,
        report.resumed_from_step,
    )
