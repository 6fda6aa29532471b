"""A proxy in front of the API server that answers errors, loses answers, is slow, and stalls watches.

A program of its own: ``proxy.py SERVER CERTIFICATES PORT WEATHER``. What is wrong is read from a file,
whenever that has changed.
"""

import asyncio
import contextlib
import dataclasses
import json
import ssl
import sys
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
    """What is wrong with the connection, each until a moment of the machine's ``time.monotonic``.

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

    def write(self, path: Path) -> None:
        """For the proxy to read."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(dataclasses.asdict(self)))
        fresh.replace(path)


class FaultyProxy:
    """HTTPS on the loopback address, with the API server's own certificate.

    Args:
        server: URL of the API server.
        certificates: folder with ``ca.crt``, ``api-server.crt`` and ``api-server.key``.
        weather: file of a :class:`Weather`.
    """

    def __init__(self, server: str, certificates: Path, weather: Path) -> None:
        self.weather = Weather()
        self._server, self._certificates, self._file = server, certificates, weather
        self._requests = 0

    async def serve(self, port: int) -> None:
        """Until the process ends."""
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
            runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, HOST, port, ssl_context=inward).start()
            await self._follow_weather()

    async def _follow_weather(self) -> None:
        seen = 0
        while True:
            with contextlib.suppress(FileNotFoundError):
                changed = self._file.stat().st_mtime_ns
                if changed != seen:
                    seen, values = changed, json.loads(self._file.read_text())
                    for name, value in values.items():
                        setattr(self.weather, name, value)
            await asyncio.sleep(_POLL_SECONDS)

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


if __name__ == "__main__":
    proxied, pki, own_port, state = sys.argv[1:]
    asyncio.run(FaultyProxy(proxied, Path(pki), Path(state)).serve(int(own_port)))
