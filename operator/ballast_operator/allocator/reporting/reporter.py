"""Writes what was decided into the ClusterPolicies' statuses; no decision and no launch waits for it."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable

from ballast_operator.allocator.reporting.policy_status import (
    PolicyReport,
    decided,
    least_status,
    policy_status,
)
from ballast_operator.errors import Conflict, NotFound, Rejected, Unavailable, for_good
from ballast_operator.history.store import HistoryWriter
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import POLICY, Object
from ballast_operator.observation.events import Recorder
from ballast_operator.views.clock import Time
from ballast_operator.waits import WaitReason, Waits

PAUSE_SECONDS = 1.0
"""Between two writes: while jobs arrive, each decision has something new to report."""

FAILURES_TOLD = 2
"""So many decisions in a row fail before the ClusterPolicy and ``/healthz`` say it."""

logger = logging.getLogger(__name__)


class PolicyReporter:
    """Brings statuses up to the newest report.

    ``in_background``: :meth:`report` only takes note, and :meth:`run` writes the newest.
    ``history`` is told of decisions, and knows how far their replay is off; None: none is kept.
    """

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        recorder: Recorder,
        *,
        clock: Callable[[], Time],
        in_background: bool = False,
        history: HistoryWriter | None = None,
    ) -> None:
        self._cluster = cluster
        self._caches = caches
        self._recorder = recorder
        self._clock = clock
        self._in_background = in_background
        self.history = history
        self._waiting: dict[str, tuple[str, PolicyReport]] = {}
        self._arrived = asyncio.Event()

    async def report(self, item: Object, report: PolicyReport) -> None:
        """Write ``report`` on the ClusterPolicy ``item``; one that waits is replaced."""
        if self.history is not None and report.snapshot is not None:
            self.history.decided(decided(report))
            report = dataclasses.replace(report, twin=self.history.twin)
        if not self._in_background:
            await self._write(item, report)
            return
        self._waiting[item["metadata"]["name"]] = (item["metadata"]["uid"], report)
        self._arrived.set()

    async def run(self) -> None:
        """Write what waits, until cancelled.

        Raises:
            NotLeader: another replica leads.
        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            for name in tuple(self._waiting):
                await self._write_newest(name)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _write_newest(self, name: str) -> None:
        uid, report = self._waiting.pop(name)
        item = self._caches[POLICY].get(("", name))
        if item is None or item["metadata"]["uid"] != uid:
            return
        try:
            await self._write(item, report)
        except (Conflict, NotFound, Unavailable) as error:
            logger.info("report on ClusterPolicy %s repeated: %s", name, error)
            self._waiting.setdefault(name, (uid, report))
            self._arrived.set()
        except Rejected as error:
            logger.error("round not reported on ClusterPolicy %s: %s", name, error)

    async def _write(self, item: Object, report: PolicyReport) -> None:
        body, notices = await asyncio.to_thread(policy_status, item, report, now=self._clock())
        if body is None:
            return
        try:
            written = await self._cluster.write_status(POLICY, body)
        except Rejected as error:
            if not for_good(error):
                raise
            logger.error("status of ClusterPolicy %s refused: %s", item["metadata"]["name"], error)
            body = {**body, "status": least_status(item.get("status") or {}, body["status"], str(error))}
            written = await self._cluster.write_status(POLICY, body)
        self._caches.wrote(POLICY, written)
        metadata = item["metadata"]
        await self._recorder.post(POLICY, "", metadata["name"], metadata["uid"], notices)


class Failures:
    """Decisions that fail, one after the other: told by the ClusterPolicy, the log and ``/healthz``."""

    def __init__(self, reporter: PolicyReporter, waits: Waits) -> None:
        self._reporter = reporter
        self._waits = waits
        self._in_a_row = 0

    def end(self) -> None:
        """A decision has succeeded."""
        self._in_a_row = 0
        self._waits.end(WaitReason.DECISIONS)

    async def tell(self, error: Exception, item: Object | None) -> None:
        """A decision has failed; ``item``: the ClusterPolicy by which it was to be made."""
        self._in_a_row += 1
        if self._in_a_row < FAILURES_TOLD:
            return
        what = (
            f"the last {self._in_a_row} decisions failed; jobs that run continue, and none starts: "
            f"{type(error).__name__}: {error}"
        )[:1000]
        self._waits.begin(WaitReason.DECISIONS, what, to_fix="report it, with the operator's log")
        if item is not None:
            with contextlib.suppress(Conflict, NotFound, Rejected, Unavailable):
                await self._reporter.report(item, PolicyReport(failed=what))
