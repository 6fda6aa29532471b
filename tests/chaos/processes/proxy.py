"""A proxy in front of the API server that answers errors, loses answers, is slow, and stalls watches."""

import asyncio
import contextlib
import dataclasses
import json
import ssl
import threading
import time
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

HOST = "127.0.0.1"
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade", "te"})
_POLL_SECONDS = 0.05
_GONE = json.dumps(
    {
        "type": "ERROR",
        "object": {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": "Expired",
            "message": "too old resource version",
            "code": 410,
        },
    }
)


@dataclasses.dataclass
class Weather:
    """What is wrong with the connection, each until a moment of ``time.monotonic``; written by any thread.

    Attributes:
        status: HTTP status of the answers to every second request, until ``refused``.
        refused, lost, slow, silent, away: requests are answered by ``status``; reach the API server and their
            answers are lost; take ``delay`` seconds more; are never answered; are not let in.
        stalled: watches tell nothing.
        broken: watches that began before this moment end, with an event of 410 where ``gone`` is later.
    """

    status: int = 500
    refused: float = 0.0
    lost: float = 0.0
    slow: float = 0.0
    delay: float = 0.0
    silent: float = 0.0
    away: float = 0.0
    stalled: float = 0.0
    broken: float = 0.0
    gone: float = 0.0

    def clear(self) -> None:
        """Nothing is wrong any more; watches begin afresh."""
        self.refused = self.lost = self.slow = self.silent = self.away = self.stalled = 0.0
        self.broken = time.monotonic()


class FaultyProxy:
    """HTTPS on a free port of the loopback address, with the API server's own certificate.

    Args:
        server: URL of the API server.
        certificates: folder with ``ca.crt``, ``api-server.crt`` and ``api-server.key``.
    """

    def __init__(self, server: str, certificates: Path) -> None:
        self.weather = Weather()
        self.port = 0
        self._server, self._certificates = server, certificates
        self._requests = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        """What the operator's kubeconfig names."""
        return f"https://{HOST}:{self.port}"

    def __enter__(self) -> "FaultyProxy":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        folder = self._certificates
        inward = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        inward.load_cert_chain(folder / "api-server.crt", folder / "api-server.key")
        outward = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        connector = TCPConnector(ssl=outward, limit=0)
        async with ClientSession(connector=connector, auto_decompress=False) as session:
            application = web.Application(client_max_size=16 * 2**20)

            async def answer(request: web.Request) -> web.StreamResponse:
                return await self._answer(request, session)

            application.router.add_route("*", "/{path:.*}", answer)
            runner = web.AppRunner(
                application,
                access_log=None,
                handle_signals=False,
                shutdown_timeout=0.2,
                handler_cancellation=True,
            )
            await runner.setup()
            await web.TCPSite(runner, HOST, 0, ssl_context=inward).start()
            self.port = int(runner.addresses[0][1])
            self._ready.set()
            await self._ended.wait()
            await runner.cleanup()

    async def _answer(self, request: web.Request, session: ClientSession) -> web.StreamResponse:
        weather, body = self.weather, await request.read()
        self._requests += 1
        await asyncio.sleep(max(0.0, weather.silent - time.monotonic()))
        if time.monotonic() < weather.away:
            return _cut(request)
        watches = request.query.get("watch") in ("true", "1")
        if time.monotonic() < weather.refused and self._requests % 2 and not watches:
            return _status(weather.status)
        if time.monotonic() < weather.slow:
            await asyncio.sleep(weather.delay)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url = self._server + request.raw_path
        try:
            async with session.request(
                request.method,
                url,
                data=body or None,
                headers=headers,
                timeout=ClientTimeout(total=None if watches else 60),
                allow_redirects=False,
            ) as found:
                if time.monotonic() < weather.lost and not watches:
                    await found.read()
                    return _cut(request)
                kept = {name: value for name, value in found.headers.items() if name.lower() not in _HOP}
                answer = web.StreamResponse(status=found.status, headers=kept)
                await answer.prepare(request)
                if watches:
                    await self._pass_on(found.content, answer)
                else:
                    async for part in found.content.iter_any():
                        await answer.write(part)
                await answer.write_eof()
                return answer
        except (ClientError, ConnectionError, TimeoutError):
            return _cut(request)

    async def _pass_on(self, content: asyncio.StreamReader, answer: web.StreamResponse) -> None:
        """A watch, until it ends or is broken; while it is stalled its events are kept back."""
        began, weather, kept = time.monotonic(), self.weather, b""
        reading: asyncio.Task[bytes] | None = None
        try:
            while True:
                if began < weather.broken:
                    if began < weather.gone:
                        await answer.write(_GONE.encode() + b"\n")
                    return
                reading = reading or asyncio.create_task(content.readany())
                done, _ = await asyncio.wait([reading], timeout=_POLL_SECONDS * 4)
                if done:
                    part, reading = reading.result(), None
                    if not part:
                        return
                    kept += part
                if kept and time.monotonic() >= weather.stalled:
                    await answer.write(kept)
                    kept = b""
        finally:
            if reading is not None:
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, ClientError):
                    await reading


def _cut(request: web.Request) -> web.StreamResponse:
    """End the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


def _status(code: int) -> web.Response:
    """An error as the API server has it."""
    headers = {"Retry-After": "1"} if code == 429 else {}
    reasons = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": reasons.get(code, "Unknown"),
        "message": f"planted: HTTP {code}",
        "code": code,
    }
    return web.json_response(body, status=code, headers=headers)
