"""``/healthz`` and ``/metrics`` over HTTP.

``/healthz`` does not only say that the process lives: it fails where a watch stream has been behind the
API server for too long (a zombie stream), or where this replica leads but cannot renew.
"""

import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ballast_operator.kube.caches import Caches
from ballast_operator.metrics import Metrics


def stale_streams(caches: Caches, *, stale_seconds: float, now: float) -> list[str]:
    """Kinds whose watch has been behind for longer than ``stale_seconds``, in words."""
    return [
        f"the watch of {kind.plural} has been behind for {now - since:.0f} s"
        for kind, since in caches.lagging_since.items()
        if now - since > stale_seconds
    ]


async def serve(
    *, host: str, port: int, metrics: Metrics, problems: Callable[[], list[str]]
) -> tuple[web.AppRunner, int]:
    """Serve both pages; returns the runner (to clean up) and the port (chosen free where ``port`` is 0).

    Raises:
        OSError: the port is taken.
    """

    async def healthz(_request: web.Request) -> web.Response:
        found = problems()
        return web.Response(status=503 if found else 200, text="\n".join(found) or "ok")

    async def show_metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    application = web.Application()
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/metrics", show_metrics)
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, int(runner.addresses[0][1])


def monotonic() -> float:
    """The clock of stream ages."""
    return time.monotonic()
