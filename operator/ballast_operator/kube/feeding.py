"""What watches bring goes into the caches as it is read from their connections.

Kopf opens the watches, renews them, and knows from which version each continues. To hand an event to a
handler it has a queue and a task for each object, and starts these one after the other, several turns of the
event loop each. While thousands of jobs arrive, a turn is long, and what kopf handed on was seconds old. So
events are taken from the stream, and kopf is left bookmarks: where its watch is.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from aiohttp.connector import Connection
from yarl import URL

from ballast_operator.kube.caches import WATCHED, Caches
from ballast_operator.kube.kinds import Kind, Object
from ballast_operator.kube.nesting import ShallowResponse

SLICE_SECONDS = 0.02
"""How long events are taken in before the rest of the event loop has its turn."""

CHANGES = ("ADDED", "MODIFIED", "DELETED")

_COLLECTIONS = {
    kind: re.compile(re.escape(kind.path().removesuffix(kind.plural)) + f"(namespaces/[^/]+/)?{kind.plural}$")
    for kind in WATCHED
}

logger = logging.getLogger(__name__)

Take = Callable[[str | None, Object], None]
"""Takes an event's type, None for one of the first list, and its object."""


def feeding(caches: Caches) -> type[ShallowResponse]:
    """Answers to kopf's requests; lists and events of the kinds that are watched go into ``caches``."""

    class Feeding(ShallowResponse):
        """See :func:`feeding`."""

        async def start(self, connection: Connection) -> Self:
            """Read the headers."""
            await super().start(connection)
            kind = watched_kind(self.url)
            if kind is not None and "watch" in self.url.query:
                self.content = _Events(self.content, _take(caches, kind), kind)  # type: ignore[assignment]
            return self

        async def json(self, **named: Any) -> Any:
            """The decoded body; of a list, without its items."""
            found = await super().json(**named)
            kind = watched_kind(self.url)
            if kind is None or not isinstance(found, dict) or not isinstance(found.get("items"), list):
                return found
            pace, take = _Pace(), _take(caches, kind)
            for item in found["items"]:
                take(None, {**item, "apiVersion": kind.api_version, "kind": kind.kind})
                await pace.turn()
            return {**found, "items": []}

    return Feeding


def watched_kind(url: URL) -> Kind | None:
    """The kind whose collection this is, if it is watched."""
    return next((kind for kind, collection in _COLLECTIONS.items() if collection.search(url.path)), None)


def _take(caches: Caches, kind: Kind) -> Take:
    def take(event: str | None, item: Object) -> None:
        try:
            caches.watched(kind, event, item)
        except Exception:  # one object must not keep the others from being heard of
            logger.exception("an event of a %s was not understood", kind.kind)

    return take


class _Pace:
    """Gives others their turn after each slice of work."""

    def __init__(self) -> None:
        self._until = time.monotonic() + SLICE_SECONDS

    async def turn(self) -> None:
        if time.monotonic() >= self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + SLICE_SECONDS


class _Events:
    """A stream of events of which ``iter_chunked`` gives bookmarks, errors, and what is no event."""

    def __init__(self, lines: Any, take: Take, kind: Kind) -> None:
        self._lines = lines
        self._take = take
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lines, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """One or more lines at a time."""
        async for data in self._lines.iter_chunked(size):
            version, pace = "", _Pace()
            for line in data.split(b"\n"):
                taken = self._taken(line) if line else version
                if taken is None:
                    yield self._bookmark(version) + line + b"\n"
                    version = ""
                else:
                    version = taken
                await pace.turn()
            yield self._bookmark(version)

    def _taken(self, line: bytes) -> str | None:
        """The version of the object that the line tells of; None: it is for kopf."""
        try:
            event = json.loads(line)
            version = event["object"]["metadata"]["resourceVersion"]
        except (ValueError, LookupError, TypeError):
            return None
        if event.get("type") not in CHANGES:
            return None
        self._take(event["type"], event["object"])
        return str(version)

    def _bookmark(self, version: str) -> bytes:
        """A line that says where the watch is; nothing where it has not moved."""
        if not version:
            return b""
        item = {
            "apiVersion": self._kind.api_version,
            "kind": self._kind.kind,
            "metadata": {"resourceVersion": version},
        }
        return json.dumps({"type": "BOOKMARK", "object": item}).encode() + b"\n"
