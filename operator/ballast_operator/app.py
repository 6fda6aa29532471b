"""The operator as a process: one replica that stands by, leads, and ends.

A follower watches and decodes what the leader works on, so that a takeover only lists once more what it knows
already, reads the saved state and decides (:mod:`ballast_operator.term`). The Lease is renewed and the pages
are served on a loop of their own.
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
from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ballast_operator.allocator.solver import Solver
from ballast_operator.api.conditions import some_of
from ballast_operator.errors import Forbidden, LeaseLapsed, NotLeader, OperatorError, Unavailable
from ballast_operator.history.recent import Recent
from ballast_operator.history.writer import HistoryWriter, Keep
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.client import Cluster, connect
from ballast_operator.kube.informers import INSTALL_DEFINITIONS, Informers
from ballast_operator.kube.kinds import LEASE, Kind
from ballast_operator.kube.leadership import Leadership
from ballast_operator.listening import listen
from ballast_operator.metrics import Metrics
from ballast_operator.observation.decoded import DecodedJobs
from ballast_operator.settings import Settings
from ballast_operator.tasks import LoopThread, keep_running
from ballast_operator.term import LeaderTerm
from ballast_operator.views.clock import epoch, heard
from ballast_operator.views.spec import JobSpec, read_spec_text
from ballast_operator.waits import WaitReason, Waits

logger = logging.getLogger(__name__)

SET_BACK = "the API server's storage was set back"
"""Reason that a term ends: what was worked out in it is of another past."""

BEAT_SECONDS = 0.5
"""Seconds between signs that the main loop turns."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line.

    Attributes:
        kubeconfig: None: ``$KUBECONFIG``, the pod's account, or ``~/.kube/config``.
        namespace: watch this namespace's jobs only; empty: all.
        lease_namespace: where the leader's Lease is.
        health_host, health_port: where ``/healthz`` and ``/metrics`` are served; empty: at every address;
            0: at a free port.
        page_port: where the page is served, on the same address; None: nowhere.
        history: database in which it is kept what jobs did; None: nowhere.
        keep: how much of it.
    """

    kubeconfig: str | None = None
    namespace: str = ""
    lease_namespace: str = "ballast-system"
    health_host: str = ""
    health_port: int = 8080
    page_port: int | None = None
    history: str | None = dataclasses.field(default=None, repr=False)  # a password may be in it
    keep: Keep = dataclasses.field(default_factory=Keep)


class Operator:
    """A replica of the operator; ``waits``: what it waits for."""

    def __init__(self, options: Options, settings: Settings) -> None:
        self._options = options
        self._settings = settings
        self._metrics = Metrics()
        self.waits = Waits()
        for reason in WaitReason:
            waited = functools.partial(self.waits.seconds, reason)
            self._metrics.waiting_seconds.labels(reason).set_function(waited)
        self._informers: Informers | None = None
        self._history: HistoryWriter | None = None
        self._beaten = time.monotonic()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """End gracefully: finish what is under way, give the lease back. From any thread."""
        if self._loop is None:
            self._stop.set()
        else:
            self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self, *, signals: bool = True) -> None:
        """Run until :meth:`stop`, or until SIGTERM or SIGINT if ``signals``: then in the main thread.

        Raises:
            LeaseLapsed: the lease is lost, and nobody was seen to hold it, or the API server's storage was
                set back; the process should start afresh.
            NotLeader: another replica has taken the lease over; the process should exit and restart.
        """
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT) if signals else ():
            self._loop.add_signal_handler(number, self.stop)
        limit = self._settings.api.request_seconds
        async with (
            LoopThread("lease-and-pages") as side,
            await connect(self._options.kubeconfig, request_seconds=limit) as cluster,
            Solver(self._settings.solver) as solver,
            Solver(self._settings.solver) as planner,  # what users state must not delay an allocation
        ):
            own = await side.run(connect(self._options.kubeconfig, request_seconds=limit))
            leadership = self._leadership(own)
            self._metrics.leader.set_function(lambda: leadership.leads)
            cluster.fence = leadership.check
            cluster.on_answer = own.on_answer = self._answered
            cluster.on_dropped = self._dropped
            own.on_date = heard
            self._answered("get", LEASE, Unavailable("no request has been answered yet"))
            runner, port = await side.run(
                serve(
                    host=self._options.health_host,
                    port=self._options.health_port,
                    metrics=self._metrics,
                    problems=self.problems,
                    waits=self.waits,
                )
            )
            logger.info("serving /healthz, /readyz and /metrics on port %d", port)
            informers = self._informers = Informers(
                cluster,
                namespace=self._options.namespace,
                settings=self._settings.api,
                metrics=self._metrics,
                waits=self.waits,
            )
            page = contextlib.AsyncExitStack()
            await self._remember(page, informers.caches, lambda: leadership.leads)
            decoded = DecodedJobs(informers.caches, lambda name, text: self._plan(planner, name, text))
            decoding = keep_running("decoding", decoded.run, metrics=self._metrics)
            planning = keep_running("planning", decoded.plan, metrics=self._metrics)
            parts = (self.waits.run(), self._beat(), decoding, planning, solver.warm_up())
            background = [asyncio.create_task(part) for part in parts]
            try:
                await self._lead(cluster, leadership, informers, decoded, solver, side)
            finally:
                if self._history is not None:
                    self._history.hand_over()
                await side.run(leadership.release())
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, informers.stop(), return_exceptions=True)
                await page.aclose()
                await side.run(runner.cleanup())
                await side.run(own.close())

    async def _remember(
        self, within: contextlib.AsyncExitStack, caches: Caches, leads: Callable[[], bool]
    ) -> None:
        """Serve the page, and keep what jobs did, where asked for. Raises OSError: its port is taken."""
        options = self._options
        if options.page_port is None and options.history is None:
            return
        recent, history = Recent(caches, clock=epoch), None
        if options.history is not None:
            from ballast_operator.history.store import History

            history, alone = History(options.history), options.page_port is None
            writer = HistoryWriter(
                History(options.history),
                recent,
                self._metrics,
                keep=options.keep,
                leads=leads,
                work_out=alone,
            )
            logger.info("history is kept in %s", history)
            writer.start()
            self._history = writer
            within.push_async_callback(asyncio.to_thread, writer.stop)
        if options.page_port is not None:
            from ballast_operator.page.server import beside_the_operator

            page = beside_the_operator(
                recent,
                history=history,
                connected=connect(options.kubeconfig, request_seconds=self._settings.api.request_seconds),
                on_answer=self._answered,
                host=options.health_host,
                port=options.page_port,
            )
            logger.info("serving the page on port %d", await within.enter_async_context(page))

    async def _plan(self, planner: Solver, name: str, text: str) -> tuple[JobSpec | None, str]:
        """A spec with degrees, made in another process, once it started. Raises as ``Solver.answer``."""
        starts = True
        try:
            return await planner.answer(read_spec_text, (name, text))
        except OSError as error:
            starts = isinstance(error, (TimeoutError, ConnectionError))
            if not starts:
                what = f"degrees of jobs cannot be planned: {error}"
                self.waits.begin(WaitReason.PLANNER, what, to_fix="see the memory limit of the operator")
            raise
        finally:
            if starts:
                self.waits.end(WaitReason.PLANNER)

    def _leadership(self, own: Cluster) -> Leadership:
        return Leadership(
            own,
            namespace=self._options.lease_namespace,
            identity=f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}",
            settings=self._settings.leader,
            waits=self.waits,
            alive=lambda: self._still_seconds() < self._settings.leader.stuck_seconds,
            epoch=epoch,
        )

    async def _lead(
        self,
        cluster: Cluster,
        leadership: Leadership,
        informers: Informers,
        decoded: DecodedJobs,
        solver: Solver,
        side: LoopThread,
    ) -> None:
        """Stand by, then lead for one term.

        Raises:
            LeaseLapsed: the lease is lost, and no other replica was seen to hold it; or the storage was set
                back, and what this replica has worked out is of another past.
            NotLeader: another replica leads now.
        """
        if not await side.run(leadership.attempt()):
            informers.start()  # a replica that leads at once lists afterwards, and once
            if not await self._before_stop(side.start(leadership.acquire())):
                return
        holding = side.start(leadership.hold())
        cluster.fence = fence_of_term(leadership, informers.caches)
        term = LeaderTerm(
            cluster,
            informers,
            decoded,
            solver,
            lease_namespace=self._options.lease_namespace,
            settings=self._settings,
            history=self._history,
        )
        cluster.on_write, cluster.on_refused = term.wrote, term.refused
        working = asyncio.create_task(term.run())
        set_back = asyncio.create_task(informers.caches.set_back.wait())
        try:
            await self._before_stop(working, holding, set_back)
            if set_back.done() and not self._stop.is_set():
                raise LeaseLapsed(SET_BACK)
        except LeaseLapsed:
            raise
        except NotLeader as error:
            if leadership.replaced:
                raise
            raise LeaseLapsed(f"{error}: the lease is lost") from error
        finally:
            await term.end(working)
            holding.cancel()
            set_back.cancel()
            await asyncio.gather(holding, set_back, return_exceptions=True)

    async def _before_stop(self, *awaited: asyncio.Future[Any]) -> bool:
        """Wait until one of ``awaited`` ends or a stop is asked; returns whether it was the former.

        An error of any of them is raised; of the others, the first is cancelled.
        """
        stopped = asyncio.create_task(self._stop.wait())
        waited: list[asyncio.Future[Any]] = [stopped, *awaited]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        ended = [future for future in awaited if future.done()]
        for future in ended:
            future.result()
        if not ended:
            awaited[0].cancel()
            await asyncio.gather(awaited[0], return_exceptions=True)
        return bool(ended)

    async def _beat(self) -> None:
        while True:
            self._beaten = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)

    def _still_seconds(self) -> float:
        """Seconds for which the main loop has not turned; from any thread."""
        return time.monotonic() - self._beaten

    def _answered(self, verb: str, kind: Kind, error: OperatorError | None) -> None:
        """Keep the record of an API server that does not answer, and of missing rights."""
        subject = f"{verb} {kind.plural}"
        if isinstance(error, Unavailable):
            self.waits.begin(
                WaitReason.API_SERVER,
                f"the API server does not answer: {error}",
                to_fix="see that it runs, and that the address and the credentials are right",
            )
            return
        self.waits.end(WaitReason.API_SERVER)
        if isinstance(error, Forbidden):
            self.waits.begin(
                WaitReason.PERMISSION,
                str(error),
                to_fix="grant the operator's account the rules of the Helm chart's ClusterRole",
                subject=subject,
            )
        else:
            self.waits.end(WaitReason.PERMISSION, subject)

    def _dropped(self, kind: Kind, fields: list[str]) -> None:
        """Keep the record of a definition of another release: what is decided there is forgotten."""
        if not fields:
            self.waits.end(WaitReason.DEFINITIONS, f"{kind.plural} status")
            return
        what = (
            f"the API server keeps no {some_of(fields)} of {kind.plural}: their definition is older or newer"
        )
        self.waits.begin(
            WaitReason.DEFINITIONS, what, to_fix=INSTALL_DEFINITIONS, subject=f"{kind.plural} status"
        )

    def problems(self) -> list[str]:
        """Problems that a restart may help against; asked by the pages' thread."""
        still, informers = self._still_seconds(), self._informers
        found = []
        if still > self._settings.leader.stuck_seconds:
            found.append(f"the main loop has not turned for {still:.0f} s")
        if informers is not None:
            stale = self._settings.api.stale_seconds
            found += stale_streams(informers.caches, stale_seconds=stale, now=time.monotonic())
        return found


def fence_of_term(leadership: Leadership, caches: Caches) -> Callable[[], None]:
    """Check before every write of the term that begins now.

    It raises what ``Leadership.check`` raises, and LeaseLapsed from the moment on in which a backup of the
    storage is believed: plans, costs and accounts of the time after it would be written over the restored.
    """
    past = caches.past

    def check() -> None:
        if caches.past != past:
            raise LeaseLapsed(SET_BACK)
        leadership.check()

    return check


def stale_streams(caches: Caches, *, stale_seconds: float, now: float) -> list[str]:
    """Lines, one for each kind whose watch has been behind for longer than ``stale_seconds``."""
    return [
        f"the watch of {kind.plural} has been behind for {now - since:.0f} s"
        for kind, since in tuple(caches.lagging_since.items())
        if now - since > stale_seconds
    ]


async def serve(
    *, host: str, port: int, metrics: Metrics, problems: Callable[[], list[str]], waits: Waits
) -> tuple[web.AppRunner, int]:
    """Serve ``/healthz``, ``/readyz`` and ``/metrics``; returns the runner, to clean up, and the port.

    It is a free one where ``port`` is 0. ``/healthz`` (liveness) fails where a restart may help: a watch has
    been behind the API server for too long, or decisions fail. ``/readyz`` fails where this replica cannot do
    its work. Both list what is waited for.

    Raises:
        OSError: the port is taken.
    """

    def page(found: list[str], *, ok: bool) -> web.Response:
        return web.Response(status=200 if ok else 503, text="\n".join([*(["ok"] if ok else []), *found]))

    async def healthz(_request: web.Request) -> web.Response:
        found = problems()
        return page(found + waits.lines(), ok=not found and not waits.broken)

    async def readyz(_request: web.Request) -> web.Response:
        found = problems()
        return page(found + waits.lines(), ok=not found and waits.ready)

    async def show_metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    application = web.Application()
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    application.router.add_get("/metrics", show_metrics)
    return await listen(application, host, port)
