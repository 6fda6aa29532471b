"""A small HTTP server in the API server's place: it lists and watches, or does what a test says instead."""

import asyncio
import contextlib
import copy
import json
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web
from ballast_operator.kube.caches import WATCHED
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import Kind
from kubernetes.aio import client

from tests.support.servers import served

Act = Callable[["Stream"], Awaitable[None]]
"""What happens to one watch instead of events; then its stream ends."""

GONE = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 410}


class Stream:
    """One watch that a test has in hand.

    Attributes:
        since: the version from which it was asked for.
    """

    def __init__(self, server: "EnemyServer", kind: Kind, request: web.Request) -> None:
        self.since = int(request.query.get("resourceVersion") or 0)
        self.server, self.kind, self._request = server, kind, request
        self.answer: web.StreamResponse | None = None

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        if self.answer is None:
            self.answer = web.StreamResponse(headers={"Content-Type": "application/json"})
            await self.answer.prepare(self._request)
        await self.answer.write(data)

    async def refuse(self, status: int, text: str = "", headers: dict[str, str] | None = None) -> None:
        """Answer the request by an error."""
        self.answer = web.Response(status=status, text=text, headers=headers, content_type="application/json")

    async def event(self, event: Any, item: Any) -> None:
        """Send one event."""
        await self.send(json.dumps({"type": event, "object": item}).encode() + b"\n")

    async def reset(self) -> None:
        """End the connection without a word."""
        transport = self._request.transport
        assert transport is not None
        transport.abort()  # type: ignore[attr-defined]

    async def honest(self) -> None:
        """The events since the version, in order, for as long as the connection lasts."""
        await self.send(b"")
        position = self.since
        while True:
            for version, event, item in self.server.history[self.kind]:
                if version > position:
                    await self.event(event, item)
                    position = version
            await self.server.changed()


class EnemyServer:
    """Objects, their history, and how watches are answered. A context manager.

    Attributes:
        acts: kind -> what happens to its next watches; those after them are honest.
        watches: how often each kind was watched.
        lists: how often each kind was listed.
        version: of the last change.
    """

    def __init__(self) -> None:
        self.acts: defaultdict[Kind, deque[Act]] = defaultdict(deque)
        self.list_acts: defaultdict[Kind, deque[web.Response]] = defaultdict(deque)
        self.watches, self.lists = Counter[Kind](), Counter[Kind]()
        self.missing: set[Kind] = set()
        self.version = 100
        self.history: defaultdict[Kind, list[tuple[int, str, Any]]] = defaultdict(list)
        self._objects: defaultdict[Kind, dict[tuple[str, str], Any]] = defaultdict(dict)
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._left = contextlib.AsyncExitStack()
        address = await self._left.enter_async_context(served(self._answer, shutdown_timeout=0.1))
        api = client.ApiClient(client.Configuration(host=address))
        self.cluster = await self._left.enter_async_context(Cluster(api, request_seconds=20.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._left.aclose()

    def put(self, kind: Kind, name: str, **more: Any) -> Any:
        """Create or change an object; those who watch are told."""
        return self._put(kind, name, None, more)

    def tell(self, kind: Kind, event: str, item: Any) -> None:
        """Tell those who watch of an event as it is, whatever the objects are."""
        self.history[kind].append((self.version, event, item))
        self._wake()

    def backup(self) -> Callable[[], None]:
        """What sets everything back to now, as an administrator does with etcd's storage."""
        version, objects, history = self.version, copy.deepcopy(self._objects), copy.deepcopy(self.history)

        def restore() -> None:
            self.version, self._objects, self.history = version, objects, history

        return restore

    def delete(self, kind: Kind, name: str) -> None:
        """Delete an object; those who watch are told."""
        self.version += 1
        item = self._objects[kind].pop(("ns" if kind.namespaced else "", name))
        metadata = {**item["metadata"], "resourceVersion": str(self.version)}
        self.tell(kind, "DELETED", {**item, "metadata": metadata})

    def names(self, kind: Kind) -> dict[str, str]:
        """Name -> version of what there is."""
        return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in self.items(kind)}

    def items(self, kind: Kind) -> list[Any]:
        """What there is."""
        return list(self._objects[kind].values())

    async def changed(self) -> None:
        """Wait for the next event."""
        await self._changed.wait()

    def _put(self, kind: Kind, name: str, uid: str | None, more: dict[str, Any]) -> Any:
        namespace = "ns" if kind.namespaced else ""
        self.version += 1
        known = self._objects[kind].get((namespace, name))
        metadata = {
            "name": name,
            "uid": known["metadata"]["uid"] if known else uid or f"uid-{name}-{self.version}",
            "resourceVersion": str(self.version),
            **({"namespace": namespace} if namespace else {}),
            **more.pop("metadata", {}),
        }
        item = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **more}
        self._objects[kind][namespace, name] = item
        self.tell(kind, "MODIFIED" if known else "ADDED", item)
        return item

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/").split("/")
        kind = next((kind for kind in WATCHED if kind.path().strip("/") == "/".join(path)), None)
        if kind is None or kind in self.missing:
            return web.Response(status=404, text="404 page not found")
        if "watch" in request.query:
            return await self._watch(kind, request)
        self.lists[kind] += 1
        return self.list_acts[kind].popleft() if self.list_acts[kind] else self.list_of(kind)

    def list_of(self, kind: Kind) -> web.Response:
        """The answer to a list of what there is now."""
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response(
            {"kind": f"{kind.kind}List", "metadata": metadata, "items": self.items(kind)}
        )

    async def _watch(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        self.watches[kind] += 1
        stream = Stream(self, kind, request)
        act: Act = self.acts[kind].popleft() if self.acts[kind] else Stream.honest
        with contextlib.suppress(ConnectionError):
            await act(stream)
        return stream.answer or web.Response()
