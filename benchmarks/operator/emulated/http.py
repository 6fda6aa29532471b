"""Requests and watches of the API server with little CPU of our own: the machine is shared with it."""

import asyncio
import contextlib
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
from ballast_operator.kube.client import connect
from ballast_operator.kube.kinds import Kind


class Http:
    """One connection pool to the API server of a kubeconfig."""

    def __init__(self, kubeconfig: Path, *, at_once: int = 20) -> None:
        self._kubeconfig = kubeconfig
        self._at_once = asyncio.Semaphore(at_once)

    async def __aenter__(self) -> Self:
        async with await connect(str(self._kubeconfig)) as cluster:
            configuration = cluster.configuration
            header = await configuration.get_api_key_with_prefix("BearerToken") or ""

        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        self._session = aiohttp.ClientSession(
            base_url=configuration.host,
            headers={"Authorization": header} if header else {},
            connector=aiohttp.TCPConnector(ssl=context, limit=100),
            timeout=aiohttp.ClientTimeout(total=120),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(
        self, verb: str, path: str, body: Any = None, *, sent: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """One request; a server that is too busy is asked again. ``sent`` is called just before it.

        Raises:
            RuntimeError: the API server refuses it.
        """
        content = "application/merge-patch+json" if verb == "patch" else "application/json"
        data = None if body is None else json.dumps(body)
        while True:
            async with self._at_once:
                sent()
                headers = {"Content-Type": content}
                async with self._session.request(verb, path, data=data, headers=headers) as answer:
                    text = await answer.read()
                    if answer.status < 300:
                        return dict(json.loads(text))
                    if answer.status not in (429, 500, 503, 504):
                        raise RuntimeError(f"{verb} {path}: {answer.status} {text[:300]!r}")
            await asyncio.sleep(0.2)

    async def writes(self) -> float:
        """All writes that the API server has answered so far, for all clients, by its own count."""
        return await self._sum(re.compile(r'apiserver_request_total\{.*verb="(POST|PUT|PATCH|APPLY|DELETE)"'))

    async def cpu_seconds(self) -> float:
        """CPU seconds of the API server, so far."""
        return await self._sum(re.compile("process_cpu_seconds_total "))

    async def _sum(self, series: re.Pattern[str]) -> float:
        async with self._session.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if series.match(line))

    async def watch(self, kind: Kind, *, query: str = "") -> AsyncIterator[tuple[float, str, dict[str, Any]]]:
        """(time on the monotonic clock, type, object) of every event from now on; broken watches continue."""
        version = (await self.send("get", f"{kind.path()}?limit=1{query}"))["metadata"]["resourceVersion"]
        while True:
            path = f"{kind.path()}?watch=1&resourceVersion={version}&timeoutSeconds=600{query}"
            timeout = aiohttp.ClientTimeout(total=None)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(path, timeout=timeout) as answer:
                    rest = b""
                    async for chunk in answer.content.iter_any():
                        *lines, rest = (rest + chunk).split(b"\n")
                        now = time.monotonic()
                        for line in lines:
                            event = json.loads(line)
                            if event["type"] == "ERROR":
                                raise RuntimeError(f"watch of {kind.plural}: {event['object']}")
                            version = event["object"]["metadata"]["resourceVersion"]
                            yield now, event["type"], event["object"]
