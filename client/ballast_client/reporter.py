"""Rank 0's thread: renews the Lease with the newest figures, and looks for the order to save and stop."""

import logging
import threading
from collections.abc import Callable
from time import monotonic

from ballast_client import messages
from ballast_client.api_server import ChannelError
from ballast_client.channels import Channel

logger = logging.getLogger("ballast_client")

POLL_SECONDS = 1.0
"""Seconds between reads of the plan."""
RENEW_SECONDS = 20.0
"""Seconds between renewals of the Lease, unless the environment has others; the operator takes a job for hung
after 60 s without it."""
EVENTS_PER_RENEWAL = 4
"""Checkpoints that may be reported between two renewals."""
RETRY_SECONDS = 20.0
"""Pause between two tries to find a last step, where not all ranks have answered."""
CLOSE_SECONDS, FINISH_SECONDS = 5.0, 120.0
"""Seconds to try the last messages; that the job is done, longer: unheard, it would be launched again."""
WINDOW_SECONDS = 30.0
"""The speed is that of the last steps, over at least this long."""


class Reporter:
    """Starts its thread at once.

    Args:
        channel: to the operator.
        pod: this process's own; a plan that does not name it is one of another launch. Empty: any plan.
        stop: finds the last step with all ranks; False: not now.
        hang_seconds: after this long without a step the Lease is not renewed; None: it always is.
        renew_seconds: between two renewals without news; None: :data:`RENEW_SECONDS`.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        pod: str,
        stop: Callable[[str], bool],
        hang_seconds: float | None,
        renew_seconds: float | None = None,
    ) -> None:
        self.loss: float | None = None
        self._channel = channel
        self._pod = pod
        self._stop = stop
        self._hang_seconds = hang_seconds
        self._renew_seconds = RENEW_SECONDS if renew_seconds is None else renew_seconds
        self._told: tuple[bool, int | None] = (False, None)
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._epoch = 0
        self._stop_epoch = 0
        self._step: int | None = None
        self._stepped = monotonic()
        self._window: list[tuple[float, int]] = []
        self._saved: int | None = None
        self._resumed: int | None = None
        self._stop_reason = ""
        self._stopping = False
        self._until: float | None = None
        self._left_at: int | None = None
        self._finished: int | None = None
        self._acknowledged = 0
        self._thread = threading.Thread(target=self._run, name="ballast-report", daemon=True)
        self._thread.start()

    def resumed(self, step: int) -> None:
        """The loop begins after ``step`` steps, which a checkpoint holds."""
        with self._lock:
            self._step = step
            self._resumed = self._saved = step or None
            self._stepped = monotonic()
            self._window.clear()

    def step(self, step: int) -> None:
        """``step`` steps are done."""
        now = monotonic()
        with self._lock:
            self._step, self._stepped = step, now
            self._window.append((now, step))
            # The two oldest span more than the window needs: the first of them is not needed any more.
            while len(self._window) > 2 and now - self._window[1][0] >= WINDOW_SECONDS:
                del self._window[0]
            if len(self._window) > 1000:
                del self._window[1:-1:2]

    def saved(self, step: int) -> None:
        """A checkpoint of ``step`` is complete."""
        with self._lock:
            self._saved = step

    def stop_now(self, why: str) -> None:
        """This process, or another rank's, has been told to end."""
        with self._lock:
            if self._stop_reason:
                return
            self._stop_reason = why
        self._wake.set()

    def close(self, *, left_at: int | None = None, finished: int | None = None) -> None:
        """Send what is left, give up the Lease, end the thread."""
        with self._lock:
            if self._until is not None:
                return
            seconds = CLOSE_SECONDS if finished is None else FINISH_SECONDS
            self._left_at, self._finished, self._until = left_at, finished, monotonic() + seconds
        self._wake.set()
        self._thread.join(timeout=seconds)

    def _run(self) -> None:
        renewed = tried = float("-inf")
        away = False
        while True:
            with self._lock:
                until, why = self._until, self._stop_reason
            now = monotonic()
            try:
                if until is not None:
                    self._write(release=True)
                    return
                # The ranks need no operator to agree on it.
                if why and not self._stopping and now - tried >= RETRY_SECONDS:
                    tried = now
                    self._stopping = self._stop(why)
                self._read_plan()
                due = self._acknowledged != self._epoch or now - renewed >= self._pause()
                hangs = self._hang_seconds is not None and now - self._stepped >= self._hang_seconds
                if self._epoch and due and not hangs:
                    self._write()
                    renewed = now
                away = False
            except Exception as error:  # whatever it is, a job whose Lease is not renewed counts as hung
                again = until is None or monotonic() < until
                if not away or not again:
                    known = isinstance(error, ChannelError)
                    logger.warning("the operator cannot be reached now: %s", error, exc_info=not known)
                away = True
                if not again:
                    return
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()

    def _pause(self) -> float:
        """Seconds until the next renewal; fewer where the first step or a checkpoint is not reported yet."""
        news = (self._step is not None, self._saved) != self._told
        return self._renew_seconds / EVENTS_PER_RENEWAL if news else self._renew_seconds

    def _read_plan(self) -> None:
        text = self._channel.read(messages.PLAN_KEY)
        if not text:
            return
        try:
            plan = messages.read_plan(text)
        except ValueError as error:
            raise ChannelError(str(error)) from error
        if self._pod and self._pod not in plan.pods:
            return
        if plan.stops:
            self._stop_epoch = plan.epoch  # acknowledged by leaving
            self.stop_now(plan.reason or "the operator asks for it")
        else:
            self._epoch = plan.epoch

    def _write(self, *, release: bool = False) -> None:
        with self._lock:
            step = self._step or 0
            sent = {}
            left = self._left_at is not None
            if self._epoch:
                sent[messages.ACK_ANNOTATION] = messages.ack(
                    epoch=max(self._epoch, self._stop_epoch if left else 0),
                    step=step,
                    saved=self._saved if left else None,
                )
            if self._epoch and self._step is not None:
                sent[messages.REPORT_ANNOTATION] = messages.report(
                    epoch=self._epoch,
                    step=step,
                    loss=self.loss,
                    rate=self._rate(),
                    saved=self._saved,
                    resumed=self._resumed,
                )
            if self._finished is not None:
                sent[messages.FINISHED_ANNOTATION] = str(self._finished)
            epoch, told = self._epoch, (self._step is not None, self._saved)
        self._channel.write(sent, release=release)
        self._acknowledged, self._told = epoch, told

    def _rate(self) -> float | None:
        """Steps/s from the first to the last step of the window; None: not known yet."""
        if len(self._window) < 2:
            return None
        (begun, first), (ended, last) = self._window[0], self._window[-1]
        seconds = ended - begun
        return (last - first) / seconds if seconds > 0 else None
