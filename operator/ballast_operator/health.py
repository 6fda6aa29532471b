"""``/healthz``, ``/readyz`` and ``/metrics`` over HTTP.

``/healthz`` (liveness) fails where a restart may help: a watch stream has been behind the API server for too
long, or decisions fail. ``/readyz`` fails where this replica cannot do its work. Both list what the operator
waits for.
"""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ballast_operator.kube.caches import Caches
from ballast_operator.metrics import Metrics
from ballast_operator.waits import Waits


def stale_streams(caches: Caches, *, stale_seconds: float, now: float) -> list[str]:
    """One line for each kind whose watch has been behind for longer than ``stale_seconds``."""
    return [
        f"the watch of {kind.plural} has been behind for {now - since:.0f} s"
        for kind, since in tuple(caches.lagging_since.items())
        if now - since > stale_seconds
    ]


async def serve(
    *, host: str, port: int, metrics: Metrics, problems: Callable[[], list[str]], waits: Waits
) -> tuple[web.AppRunner, int]:
    """Serve the pages; returns the runner (to clean up) and the port (chosen free where ``port`` is 0).

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
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, int(runner.addresses[0][1])
