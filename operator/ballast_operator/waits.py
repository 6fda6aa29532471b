"""Waits of the operator: one record, read by the log, the metric, ``/healthz`` and ``/readyz``.

A caller that has to wait calls :meth:`Waits.begin` with what it waits for and how to end the wait, any
number of times, and :meth:`Waits.end` when the wait is over. A wait that lasts is logged after ten seconds,
again each time it has lasted twice as long, at least every five minutes, and once when it ends.
"""

import asyncio
import dataclasses
import datetime
import enum
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

LOGGED_AFTER_SECONDS = 10.0
"""A shorter wait is not logged."""

LOGGED_EVERY_SECONDS = 300.0
"""Longest pause between two log lines about one wait."""

FORGOTTEN_AFTER_SECONDS = 600.0
"""A right or a definition that was lacking and has not been needed for this long is no longer waited for."""


class WaitReason(enum.StrEnum):
    """Reason that the operator waits; the label ``reason`` of ``ballast_operator_waiting_seconds``."""

    API_SERVER = "ApiServer"
    """The API server does not answer."""
    NAMESPACE = "Namespace"
    """The namespace of the leader's Lease, or that of `--namespace`, does not exist."""
    PERMISSION = "Permission"
    """The operator's account lacks a right."""
    DEFINITIONS = "Definitions"
    """The API server does not know Ballast's kinds, or drops what is in them."""
    LEADER = "Leader"
    """Another replica leads. This is a standby's ordinary state."""
    CACHES = "Caches"
    """This replica has not listed the cluster's objects yet."""
    POLICY = "Policy"
    """There is no usable ClusterPolicy."""
    PLANNER = "Planner"
    """No process starts in which jobs' degrees are planned."""
    DECISIONS = "Decisions"
    """The last decisions of the allocator failed."""

    @property
    def ready(self) -> bool:
        """True if a replica that waits for this does all it can: ``/readyz`` stays ok."""
        return self in (WaitReason.LEADER, WaitReason.POLICY)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait of the operator.

    Attributes:
        subject: tells waits of one reason apart, e.g. the resource that may not be listed.
        what: what is waited for, with names.
        to_fix: what ends the wait; empty: nothing has to be done.
        since, renewed: when it began and was last confirmed, on the clock of the :class:`Waits`.
    """

    reason: WaitReason
    subject: str
    what: str
    to_fix: str
    since: float
    renewed: float


class Waits:
    """Waits of an operator, from any thread. ``clock`` counts seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits: dict[tuple[WaitReason, str], Wait] = {}
        self._logged: dict[tuple[WaitReason, str], float] = {}

    def begin(self, reason: WaitReason, what: str, *, to_fix: str = "", subject: str = "") -> None:
        """The operator waits for ``what``; of a wait that is known only the text changes."""
        known = self._waits.get((reason, subject))
        self._waits[reason, subject] = Wait(
            reason=reason,
            subject=subject,
            what=what,
            to_fix=to_fix,
            since=self._clock() if known is None else known.since,
            renewed=self._clock(),
        )

    def end(self, reason: WaitReason, subject: str = "") -> None:
        """The wait is over; harmless where there was none."""
        wait = self._waits.pop((reason, subject), None)
        if wait is not None and self._logged.pop((reason, subject), None) is not None:
            logger.info("no longer waiting after %.0f s: %s", self._clock() - wait.since, wait.what)

    def seconds(self, reason: WaitReason) -> float:
        """Seconds that the longest wait for ``reason`` has lasted; 0 where there is none."""
        now = self._clock()
        return max(
            (now - wait.since for wait in tuple(self._waits.values()) if wait.reason is reason), default=0.0
        )

    def told(self, reason: WaitReason) -> list[str]:
        """Text of each wait for ``reason``, with what to do."""
        found = [wait for wait in tuple(self._waits.values()) if wait.reason is reason]
        return sorted(f"{wait.what}. To fix: {wait.to_fix}" for wait in found)

    def lines(self) -> list[str]:
        """The waits as lines, the longest first."""
        return [self._text(wait) for wait in sorted(self._waits.values(), key=lambda wait: wait.since)]

    @property
    def ready(self) -> bool:
        """True if no wait keeps this replica from its work."""
        return all(wait.reason.ready for wait in tuple(self._waits.values()))

    @property
    def broken(self) -> bool:
        """True if a restart may help: ``/healthz`` fails."""
        return any(wait.reason is WaitReason.DECISIONS for wait in tuple(self._waits.values()))

    def log_due(self) -> None:
        """Log the waits that have lasted long enough since they began or were last logged."""
        now = self._clock()
        for key, wait in list(self._waits.items()):
            by_use = wait.reason in (WaitReason.PERMISSION, WaitReason.DEFINITIONS)
            if by_use and now - wait.renewed > FORGOTTEN_AFTER_SECONDS:
                self.end(*key)
                continue
            lasted = now - wait.since
            if lasted < self._logged.get(key, LOGGED_AFTER_SECONDS):
                continue
            self._logged[key] = lasted + min(lasted, LOGGED_EVERY_SECONDS)
            logger.log(logging.WARNING if wait.to_fix else logging.INFO, "%s", self._text(wait))

    async def run(self) -> None:
        """Log what is due, once a second, until cancelled."""
        while True:
            self.log_due()
            await asyncio.sleep(1.0)

    def _text(self, wait: Wait) -> str:
        lasted = self._clock() - wait.since
        began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=lasted)
        fix = f". To fix: {wait.to_fix}" if wait.to_fix else ""
        return f"waiting ({wait.reason}) since {began:%H:%M:%SZ}, {lasted:.0f} s: {wait.what}{fix}"
