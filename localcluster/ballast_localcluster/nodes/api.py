"""The API server, as the node agent needs it: single calls, and a watch that reconnects by itself."""

import asyncio
import base64
import contextlib
import json
import logging
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
_WATCH_SECONDS = 240
_RETRY_SECONDS = 0.5
_LINE_BYTES = 8 * 1024 * 1024

Manifest = dict[str, Any]


class ApiError(Exception):
    """The API server refused a call, with this HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status

    @property
    def is_passing(self) -> bool:
        """True if the same call may well succeed in a moment.

        So may one that its rights do not allow: an API server that has just started has not read them yet.
        """
        by_rights = self.status == 403 and _BY_RIGHTS.search(str(self)) is not None
        return by_rights or self.status in (408, 429) or self.status >= 500


_BY_RIGHTS = re.compile(r"cannot \w+ resource")
"""Text of a refusal for lack of rights, not of one by a quota or an admission plugin."""

UNREACHABLE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""Errors of a call when the API server cannot be reached."""


class Api:
    """One user's connection; an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self.server: str = cluster["server"]
        self.authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._token: str = config["users"][0]["user"]["token"]
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"},
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=self.authority), limit=50),
            read_bufsize=2**18,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Manifest:
        """One call and its decoded answer.

        Raises:
            ApiError: refused.
            aiohttp.ClientError, TimeoutError: not reached (see ``UNREACHABLE``).
        """
        assert self._session is not None
        async with self._session.request(
            method,
            self.server + path,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": content_type},
            params=query,
            timeout=aiohttp.ClientTimeout(total=CALL_SECONDS),
        ) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise ApiError(answer.status, _message(text))
            decoded: Manifest = json.loads(text)
            return decoded

    async def call_until_reached(self, method: str, path: str, body: Any = None, **options: Any) -> Manifest:
        """The same, again while the API server is away or overloaded. Raises ApiError: refused for good."""
        while True:
            try:
                return await self.call(method, path, body, **options)
            except UNREACHABLE as error:
                log.info("%s %s: %s; again in %s s", method, path, error, _RETRY_SECONDS)
            except ApiError as error:
                if not error.is_passing:
                    raise
                log.info("%s %s: %s; again in %s s", method, path, error, _RETRY_SECONDS)
            await asyncio.sleep(_RETRY_SECONDS)

    async def patch(self, path: str, body: Any, strategy: str = "merge") -> Manifest:
        """Patch an object by ``merge`` or ``strategic-merge``, as :meth:`call_until_reached` calls."""
        content_type = f"application/{strategy}-patch+json"
        return await self.call_until_reached("PATCH", path, body, content_type=content_type)

    async def follow(self, path: str, query: Mapping[str, str]) -> AsyncIterator[tuple[bool, Manifest]]:
        """(whether it is there, an object): of all that there is, then of each change, without end.

        After a gap once more of all that there is; of one that has gone meanwhile the name and uid are told.
        """
        names: dict[str, str] = {}
        while True:
            listed = await self.call_until_reached("GET", path, query=query)
            present = {item["metadata"]["uid"] for item in listed["items"]}
            for uid in names.keys() - present:
                yield False, {"metadata": {"uid": uid, "name": names.pop(uid)}}
            for item in listed["items"]:
                names[item["metadata"]["uid"]] = item["metadata"]["name"]
                yield True, item
            version = listed["metadata"]["resourceVersion"]
            while version is not None:
                try:
                    async with contextlib.aclosing(self._watch(path, query, version)) as events:
                        async for event in events:
                            if event["type"] == "ERROR":
                                version = None  # too old: list again
                                break
                            item = event["object"]
                            version = item["metadata"]["resourceVersion"]
                            if event["type"] == "DELETED":
                                names.pop(item["metadata"]["uid"], None)
                                yield False, item
                            elif event["type"] != "BOOKMARK":
                                names[item["metadata"]["uid"]] = item["metadata"]["name"]
                                yield True, item
                except ApiError as error:
                    log.info("watch of %s: %s", path, error)
                    version = None
                except UNREACHABLE as error:
                    log.info("watch of %s broke: %s", path, error)
                    await asyncio.sleep(_RETRY_SECONDS)

    async def _watch(
        self, path: str, query: Mapping[str, str], version: str
    ) -> AsyncGenerator[Manifest, None]:
        assert self._session is not None
        parameters = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_SECONDS, sock_read=_WATCH_SECONDS + 30)
        async with self._session.get(self.server + path, params=parameters, timeout=timeout) as answer:
            if answer.status >= 400:
                raise ApiError(answer.status, _message(await answer.text()))
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _LINE_BYTES:
                    raise aiohttp.ClientPayloadError(f"a watch event of more than {_LINE_BYTES} bytes")
                for line in lines:
                    yield json.loads(line)


def _message(text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["message"])
    return text[:500]
