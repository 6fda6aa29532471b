"""A term of leadership: what is started, in which order, and how it ends.

The caches are brought up to date, then work begins. What was decided belongs to the term and ends with it.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from ballast_operator.allocator.allocator import Allocator, DecisionThrottle
from ballast_operator.allocator.costs.price_feeds import CloudPrices, PriceFeeds
from ballast_operator.allocator.gauges import set_job_gauges
from ballast_operator.allocator.policy_status import PolicyReporter
from ballast_operator.allocator.saved_state import StateStore
from ballast_operator.allocator.solver import Solver
from ballast_operator.errors import OperatorError
from ballast_operator.history.writer import HistoryWriter
from ballast_operator.kube.caches import WATCHED
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.informers import Informers
from ballast_operator.kube.kinds import (
    EVENT,
    JOB,
    NODE,
    POD_GROUP,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Kind,
)
from ballast_operator.observation.decoded import DecodedJobs
from ballast_operator.observation.events import Recorder
from ballast_operator.observation.observer import Observer
from ballast_operator.reconcile.changes import Changes, KeyQueue, Lane, ReconcileWorker
from ballast_operator.reconcile.reconciler import Reconciler
from ballast_operator.settings import Settings
from ballast_operator.tasks import keep_running
from ballast_operator.views.clock import now

logger = logging.getLogger(__name__)

GAUGE_SECONDS = 5.0
"""Seconds between counts of figures that are not caught as they happen."""


class LeaderTerm:
    """The work of a leader, from its election until it stops or loses the lease.

    ``cluster`` is fenced: it writes only while this replica leads. ``lease_namespace``: where the leader's
    saved state and the price feeds are. ``history``: where decisions are kept; None: nowhere.
    """

    def __init__(
        self,
        cluster: Cluster,
        informers: Informers,
        decoded: DecodedJobs,
        solver: Solver,
        *,
        lease_namespace: str,
        settings: Settings,
        history: HistoryWriter | None = None,
    ) -> None:
        self._informers = informers
        self._caches = informers.caches
        self._decoded = decoded
        self._observer = Observer(self._caches, decoded)
        self._settings = settings
        self._metrics = metrics = informers.metrics
        self._queue = KeyQueue(time.monotonic)
        for kind in {*WATCHED, EVENT, POD_GROUP, ROLE, ROLE_BINDING, SERVICE_ACCOUNT} - {NODE}:
            metrics.writes_refused.labels(kind.kind)
        self._writes: deque[float] = deque(maxlen=100_000)
        self._throttle = throttle = DecisionThrottle(settings.solver.debounce_seconds)
        self._events = Recorder(cluster)
        self._changes = Changes(
            self._observer,
            self._queue,
            settings=settings.job,
            allocate=throttle.request,
            arrived=throttle.arrived,
        )
        self._reporter = PolicyReporter(
            cluster,
            self._caches,
            self._events,
            clock=now,
            history=history,
            waits=informers.waits,
        )
        self._feeds = PriceFeeds(cluster, lease_namespace, CloudPrices(changed=throttle.request))
        self._allocator = Allocator(
            self._observer,
            solver,
            settings=settings.solver,
            metrics=metrics,
            enqueue=self._changes.again,
            enqueue_in_turn=self._changes.again_in_turn,
            waits=informers.waits,
            store=StateStore(cluster, lease_namespace),
            feeds=self._feeds,
            reporter=self._reporter,
            throttle=throttle,
        )
        self._cluster, self._history = cluster, history
        self._reconciler = Reconciler(
            cluster,
            self._observer,
            settings=settings.job,
            metrics=metrics,
            allocate=throttle.request,
            recorder=self._events,
        )
        self._worker = ReconcileWorker(self._reconciler, metrics=metrics, again=self._changes.again)

    async def run(self) -> None:
        """Run until cancelled. Raises NotLeader: a write was refused by the fence."""
        self._informers.leads = True
        await self._informers.refresh()
        if self._history is not None:
            self._history.compare(self._caches[JOB], self._informers.namespace)
        self._reconciler.has_pod_groups = await self._cluster.serves(POD_GROUP)
        await self._decoded.catch_up()  # what listens now asks for all of them in one turn
        self._caches.listen(self._changes.changed)
        self._decoded.listeners.append(self._changes.planned)
        self._throttle.request()
        parts: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("allocator", self._allocator.run),
            ("gauges", self._gauges),
            ("prices", self._feeds.clouds.run),
            ("events", self._events.run),
            ("reports", self._reporter.run),
            *[("worker", lambda: self._queue.work(self._worker))] * self._settings.workers,
            # Write why jobs wait: of the API server's time each request under way gets an equal part.
            *[("background worker", lambda: self._queue.work(self._worker, most=Lane.BACKGROUND))]
            * self._settings.background_workers,
            # Launch, stop and answer, whatever else is due.
            *[("urgent worker", lambda: self._queue.work(self._worker, Lane.URGENT))]
            * self._settings.urgent_workers,
        ]
        tasks = [asyncio.create_task(keep_running(name, part, metrics=self._metrics)) for name, part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def end(self, running: "asyncio.Task[None]") -> None:
        """End :meth:`run`, and keep what the next leader should know where this one still may write."""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        with contextlib.suppress(OperatorError):
            await self._allocator.save()

    def refused(self, kind: Kind) -> None:
        """Count a write whose content the API server refused."""
        self._metrics.writes_refused.labels(kind.kind).inc()

    def wrote(self, verb: str, kind: Kind) -> None:
        """Count a write that landed."""
        self._metrics.api_writes.labels(verb, kind.kind).inc()
        self._writes.append(time.monotonic())

    async def _gauges(self) -> None:
        while True:
            moment = time.monotonic()
            unfinished = set_job_gauges(self._metrics, self._observer.jobs())
            contested = self._observer.findings.all_contested()
            self._metrics.jobs_failing.set(self._worker.failing + contested)
            recent = sum(1 for at in self._writes if moment - at < 60)
            self._metrics.writes_per_job.set(recent / unfinished if unfinished else 0)
            self._metrics.queue_due.set(self._queue.due())
            for kind in self._caches.stores:
                since = self._caches.lagging_since.get(kind)
                self._metrics.watch_age_seconds.labels(kind.kind).set(0 if since is None else moment - since)
            await asyncio.sleep(GAUGE_SECONDS)
