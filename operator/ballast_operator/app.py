"""The operator as a whole: what is started, in which order, and how it ends.

Lead first, then list, then watch and work: a follower holds a connection and nothing else.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import kopf
from ballast_policies.contract import JOB_LABEL

from ballast_operator.allocator.allocator import Allocator
from ballast_operator.allocator.saved_state import StateStore
from ballast_operator.allocator.solving.solver import Solver
from ballast_operator.errors import Forbidden, OperatorError, Unavailable
from ballast_operator.health import serve, stale_streams
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.client import Cluster, connect
from ballast_operator.kube.kinds import JOB, LEASE, NODE, POD, POLICY, Key, Kind, Object, key_of
from ballast_operator.kube.leadership import Leadership
from ballast_operator.kube.queue import KeyQueue
from ballast_operator.kube.streams import first_sync, resync_periodically, watch_registry, watch_settings
from ballast_operator.metrics import Metrics
from ballast_operator.observer import Observer
from ballast_operator.reconciler import Reconciler, ReconcileWorker
from ballast_operator.settings import Settings
from ballast_operator.tasks import keep_running
from ballast_operator.views.assignment import AssignmentBoard
from ballast_operator.views.nodes import NodeView, is_ours, read_node
from ballast_operator.waits import WaitReason, Waits

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line gives.

    Attributes:
        kubeconfig: None: ``$KUBECONFIG``, the pod's account, or ``~/.kube/config``.
        namespace: watch this namespace's jobs only; empty: all.
        lease_namespace: where the leader's Lease is.
        health_host, health_port: where ``/healthz`` and ``/metrics`` are served; port 0: one that is free.
    """

    kubeconfig: str | None = None
    namespace: str = ""
    lease_namespace: str = "ballast-system"
    health_host: str = "0.0.0.0"
    health_port: int = 8080


class Operator:
    """One replica."""

    def __init__(self, options: Options, settings: Settings) -> None:
        self._options = options
        self._settings = settings
        self._metrics = Metrics()
        self._waits = Waits()
        for reason in WaitReason:
            waited = functools.partial(self._waits.seconds, reason)
            self._metrics.waiting_seconds.labels(reason).set_function(waited)
        self._caches = Caches()
        self._queue: KeyQueue[Key] = KeyQueue(time.monotonic)
        self._nodes: dict[str, NodeView] = {}
        self._policies: dict[str, tuple[str, int]] = {}
        self._writes: deque[float] = deque(maxlen=100_000)
        self._allocator: Allocator | None = None
        self._stop = asyncio.Event()

    def _take_signals(self) -> None:
        """SIGTERM and SIGINT end this operator gracefully."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """End gracefully: finish what is under way, give the lease back."""
        self._stop.set()

    async def run(self) -> None:
        """Run until :meth:`stop`, SIGTERM or SIGINT; call it in the main thread.

        Raises:
            NotLeader: the lease was lost; the process should exit and restart.
        """
        self._take_signals()
        identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        limit = self._settings.api.request_seconds
        async with (
            await connect(self._options.kubeconfig, request_seconds=limit) as cluster,
            await connect(
                self._options.kubeconfig, request_seconds=self._settings.leader.renew_seconds
            ) as own,
            Solver(self._settings.solver) as solver,
        ):
            leadership = Leadership(
                own,
                namespace=self._options.lease_namespace,
                identity=identity,
                settings=self._settings.leader,
                waits=self._waits,
            )
            cluster.fence = leadership.check
            cluster.on_write = self._wrote
            cluster.on_answer = own.on_answer = self._answered
            self._answered("get", LEASE, Unavailable("no request has been answered yet"))
            runner, port = await serve(
                host=self._options.health_host,
                port=self._options.health_port,
                metrics=self._metrics,
                problems=self._problems,
                waits=self._waits,
            )
            logger.info("serving /healthz, /readyz and /metrics on port %d", port)
            logging_waits = asyncio.create_task(self._waits.run())
            try:
                await self._lead(cluster, leadership, solver)
            finally:
                logging_waits.cancel()
                await leadership.release()
                await runner.cleanup()

    async def _lead(self, cluster: Cluster, leadership: Leadership, solver: Solver) -> None:
        if not await self._unless_stopped(leadership.acquire()):
            return
        self._metrics.leader.set(1)
        holding = asyncio.create_task(leadership.hold())
        self._caches.listeners.append(self._changed)
        try:
            synced = first_sync(self._caches, cluster, self._options.namespace, self._waits)
            if await self._unless_stopped(synced, holding):
                await self._work(cluster, holding, solver)
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    async def _work(self, cluster: Cluster, holding: asyncio.Task[None], solver: Solver) -> None:
        observer = Observer(self._caches)
        board = AssignmentBoard()
        reconciler = Reconciler(
            cluster,
            observer,
            board,
            settings=self._settings.job,
            metrics=self._metrics,
            allocate=self._allocate,
        )
        self._allocator = Allocator(
            cluster,
            observer,
            board,
            solver,
            settings=self._settings.solver,
            metrics=self._metrics,
            enqueue=self._queue.add,
            waits=self._waits,
            store=StateStore(cluster, self._options.lease_namespace),
        )
        worker = ReconcileWorker(reconciler, metrics=self._metrics, again=self._queue.add)
        self._allocate()
        every = self._settings.api.resync_seconds
        parts: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("allocator", self._allocator.run),
            (
                "resync",
                lambda: resync_periodically(
                    self._caches, cluster, self._options.namespace, self._waits, every_seconds=every
                ),
            ),
            ("gauges", lambda: self._gauges(observer)),
            *[("worker", lambda: self._queue.work(worker))] * self._settings.workers,
            # kopf ends every task of the loop that is younger than itself, so it is started last.
            ("watch", lambda: self._watch(cluster)),
        ]
        warming = asyncio.create_task(solver.warm_up())
        tasks = [asyncio.create_task(keep_running(name, part, metrics=self._metrics)) for name, part in parts]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, holding, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            self._stop.set()
            for task in [*tasks, warming, stopped]:
                task.cancel()
            await asyncio.gather(*tasks, warming, stopped, return_exceptions=True)
            with contextlib.suppress(OperatorError):
                await self._allocator.save()

    async def _watch(self, cluster: Cluster) -> None:
        namespace = self._options.namespace
        older = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=watch_registry(self._caches, cluster),
            settings=watch_settings(request_seconds=self._settings.api.request_seconds),
            clusterwide=not namespace,
            namespaces=[namespace] if namespace else [],
            standalone=True,
        )
        self._take_signals()  # kopf has just taken them
        await kopf.run_tasks(tasks, ignored=older)

    async def _unless_stopped(self, wait: Coroutine[Any, Any, None], *others: asyncio.Task[None]) -> bool:
        """Await ``wait``; returns whether it ended before a stop was asked, raises what ``others`` raise."""
        task = asyncio.create_task(wait)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([task, stopped, *others], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        ended = task.done()
        if not ended:
            task.cancel()
        await asyncio.gather(stopped, *([] if ended else [task]), return_exceptions=True)
        for other in others:
            if other.done():
                other.result()
        if ended:
            task.result()
        return ended

    def _changed(self, kind: Kind, item: Object) -> None:
        """Who has to look at a change; nothing is decided here."""
        metadata = item["metadata"]
        if kind is JOB:
            self._queue.add(key_of(item))
            self._allocate()
        elif kind is POLICY:
            self._policy_changed(item)
        elif kind is NODE:
            self._node_changed(item)
        else:
            job = (metadata.get("labels") or {}).get(JOB_LABEL)
            if job:
                self._queue.add((metadata.get("namespace", ""), job))
            if kind is POD and (not is_ours(item) or metadata.get("deletionTimestamp")):
                self._allocate()

    def _policy_changed(self, item: Object) -> None:
        """Its status is the allocator's own writing and no news."""
        name = item["metadata"]["name"]
        version = (item["metadata"]["uid"], item["metadata"].get("generation", 0))
        if self._caches[POLICY].get(("", name)) is None:
            self._policies.pop(name, None)
        elif self._policies.get(name) == version:
            return
        else:
            self._policies[name] = version
        self._allocate()

    def _node_changed(self, item: Object) -> None:
        """Nodes report often; only what matters to placement is a change."""
        name = item["metadata"]["name"]
        known = self._caches[NODE].get(("", name)) is not None
        view = read_node(item) if known else None
        if view is not None and self._nodes.get(name) == view:
            return
        if view is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = view
        self._allocate()
        for pod in self._caches[POD]:
            if is_ours(pod) and (pod.get("spec") or {}).get("nodeName") == name:
                job = pod["metadata"]["labels"][JOB_LABEL]
                self._queue.add((pod["metadata"].get("namespace", ""), job))

    def _allocate(self) -> None:
        if self._allocator is not None:
            self._allocator.trigger()

    def _wrote(self, verb: str, kind: Kind) -> None:
        self._metrics.api_writes.labels(verb, kind.kind).inc()
        self._writes.append(time.monotonic())

    def _answered(self, verb: str, kind: Kind, error: OperatorError | None) -> None:
        """Keep the record of an API server that does not answer, and of missing rights."""
        subject = f"{verb} {kind.plural}"
        if isinstance(error, Unavailable):
            self._waits.begin(
                WaitReason.API_SERVER,
                f"the API server does not answer: {error}",
                to_fix="see that it runs, and that the address and the credentials are right",
            )
            return
        self._waits.end(WaitReason.API_SERVER)
        if isinstance(error, Forbidden):
            self._waits.begin(
                WaitReason.PERMISSION,
                str(error),
                to_fix="grant the operator's account the rules of the Helm chart's ClusterRole",
                subject=subject,
            )
        else:
            self._waits.end(WaitReason.PERMISSION, subject)

    def _problems(self) -> list[str]:
        return stale_streams(
            self._caches, stale_seconds=self._settings.api.stale_seconds, now=time.monotonic()
        )

    async def _gauges(self, observer: Observer) -> None:
        """Figures that are counted, not caught: once in five seconds."""
        while True:
            moment = time.monotonic()
            self._metrics.jobs.clear()
            unfinished = 0
            for view in observer.jobs():
                self._metrics.jobs.labels(view.status.summary_state).inc()
                unfinished += not view.status.finished
            recent = sum(1 for at in self._writes if moment - at < 60)
            self._metrics.writes_per_job.set(recent / unfinished if unfinished else 0)
            for kind in self._caches.stores:
                since = self._caches.lagging_since.get(kind)
                self._metrics.watch_age_seconds.labels(kind.kind).set(0 if since is None else moment - since)
            await asyncio.sleep(5)
