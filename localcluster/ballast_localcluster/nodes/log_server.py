"""What `kubectl logs` talks to: the part of kubelet's HTTPS API that process nodes have."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from ballast_localcluster.nodes.pod import Pod
from ballast_localcluster.nodes.runner import ContainerRunner

log = logging.getLogger(__name__)

_FOLLOW_SECONDS = 0.2
_CHUNK_BYTES = 64 * 1024

FindPod = Callable[[str, str], Pod | None]


class LogServer:
    """Serves the logs of an agent's pods to the API server alone, which shows its client certificate.

    Args:
        find: pod by namespace and name.
    """

    def __init__(self, find: FindPod, certificates: Path, host: str) -> None:
        self._find = find
        self._host = host
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.crt"))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificates / "node-agent.crt", certificates / "node-agent.key")
        self._context = context
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port (``port``)."""
        application = web.Application()
        application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        application.router.add_get("/healthz", self._healthy)
        application.router.add_route("*", "/{rest:.*}", self._refuse)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0, ssl_context=self._context, shutdown_timeout=0.1)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop to listen."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _refuse(self, request: web.Request) -> web.Response:
        return web.Response(
            status=501, text=f"process nodes have no {request.path.split('/')[1]}; only logs\n"
        )

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        where = request.match_info
        pod = self._find(where["namespace"], where["pod"])
        runner = next((r for r in pod.runners if r.name == where["container"]), None) if pod else None
        if pod is None or runner is None:
            return web.Response(status=404, text=f"no container {where['container']} in {where['pod']}\n")
        query = request.query
        for option in ("sinceSeconds", "sinceTime"):
            if option in query:
                return web.Response(
                    status=400, text=f"process nodes do not keep the time of a line: no {option}\n"
                )
        if query.get("timestamps") == "true":
            return web.Response(status=400, text="process nodes do not keep the time of a line\n")
        previous = query.get("previous") == "true"
        run = runner.previous_run if previous else runner.restarts
        path = pod.log_folder / runner.name / f"{run}.log"
        if not path.is_file():
            text = f"container {runner.name} has no {'previous ' if previous else ''}log\n"
            return web.Response(status=400, text=text)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        left = int(query["limitBytes"]) if "limitBytes" in query else None
        with path.open("rb") as handle:
            if "tailLines" in query:
                handle.seek(_tail_offset(path, int(query["tailLines"])))
            while left is None or left > 0:
                chunk = handle.read(_CHUNK_BYTES if left is None else min(left, _CHUNK_BYTES))
                if chunk:
                    await response.write(chunk)
                    left = None if left is None else left - len(chunk)
                elif query.get("follow") == "true" and _runs(runner, run):
                    await asyncio.sleep(_FOLLOW_SECONDS)
                elif not (rest := handle.read(_CHUNK_BYTES)):  # what came between the read and the end
                    break
                else:
                    await response.write(rest)
        await response.write_eof()
        return response


def _runs(runner: ContainerRunner, run: int) -> bool:
    return runner.pid is not None and runner.restarts == run


def _tail_offset(path: Path, lines: int) -> int:
    """Where the last ``lines`` lines begin."""
    data = path.read_bytes()
    position = len(data) - 1 if data.endswith(b"\n") else len(data)
    if lines == 0:
        return len(data)
    for _ in range(lines):
        position = data.rfind(b"\n", 0, position)
        if position < 0:
            return 0
    return position + 1
