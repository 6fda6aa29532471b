"""The server of `kubectl logs`: the part of kubelet's HTTPS API that process nodes have."""

import asyncio
import dataclasses
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from ballast_localcluster.nodes.containers.runner import ContainerRunner
from ballast_localcluster.nodes.pod import Pod

log = logging.getLogger(__name__)

_FOLLOW_SECONDS = 0.2
_CHUNK_BYTES = 64 * 1024

FindPod = Callable[[str, str], Pod | None]


class LogServer:
    """Serves the pods' logs to the API server, by its client certificate; ``find``: a pod by its names."""

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
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _refuse(self, request: web.Request) -> web.Response:
        return web.Response(
            status=501, text=f"process nodes have no {request.path.split('/')[1]}; only logs\n"
        )

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        log_request = self._read(request)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        async for chunk in log_request.chunks():
            await response.write(chunk)
        await response.write_eof()
        return response

    def _read(self, request: web.Request) -> "_LogRequest":
        """Log that a request asks for. Raises web.HTTPError: no such container, log, or option."""
        where, query = request.match_info, request.query
        pod = self._find(where["namespace"], where["pod"])
        runner = next((r for r in pod.runners if r.name == where["container"]), None) if pod else None
        if pod is None or runner is None:
            raise web.HTTPNotFound(text=f"no container {where['container']} in {where['pod']}\n")
        if refused := [option for option in ("sinceSeconds", "sinceTime") if option in query]:
            raise web.HTTPBadRequest(text=f"process nodes do not keep the time of a line: no {refused[0]}\n")
        if query.get("timestamps") == "true":
            raise web.HTTPBadRequest(text="process nodes do not keep the time of a line\n")
        previous = query.get("previous") == "true"
        run = runner.previous_run if previous else runner.view.restarts
        path = pod.log_folder / runner.name / f"{run}.log"
        if run is None or not path.is_file():
            text = f"container {runner.name} has no {'previous ' if previous else ''}log\n"
            raise web.HTTPBadRequest(text=text)
        return _LogRequest(
            runner=runner,
            run=run,
            path=path,
            tail_lines=int(query["tailLines"]) if "tailLines" in query else None,
            limit_bytes=int(query["limitBytes"]) if "limitBytes" in query else None,
            follow=query.get("follow") == "true",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LogRequest:
    """One container's log, and how much of it to send."""

    runner: ContainerRunner
    run: int
    path: Path
    tail_lines: int | None
    limit_bytes: int | None
    follow: bool

    async def chunks(self) -> AsyncIterator[bytes]:
        """The log in pieces; with ``follow`` until the run has ended."""
        left = self.limit_bytes
        with self.path.open("rb") as handle:
            if self.tail_lines is not None:
                handle.seek(_tail_offset(self.path, self.tail_lines))
            while left is None or left > 0:
                runs = self.follow and self._runs()  # before reading: what is written until then is read
                chunk = handle.read(_CHUNK_BYTES if left is None else min(left, _CHUNK_BYTES))
                if chunk:
                    yield chunk
                    left = None if left is None else left - len(chunk)
                elif runs:
                    await asyncio.sleep(_FOLLOW_SECONDS)
                else:
                    return

    def _runs(self) -> bool:
        return self.runner.pid is not None and self.runner.view.restarts == self.run


def _tail_offset(path: Path, lines: int) -> int:
    """Offset of the last ``lines`` lines."""
    data = path.read_bytes()
    position = len(data) - 1 if data.endswith(b"\n") else len(data)
    if lines == 0:
        return len(data)
    for _ in range(lines):
        position = data.rfind(b"\n", 0, position)
        if position < 0:
            return 0
    return position + 1
