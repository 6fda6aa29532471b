"""What watches bring goes into the caches as it is read from their connections.

Kopf opens the watches, renews them, and knows from which version each continues. To hand an event to a
handler it has a queue and a task for each object, and starts these one after the other, several turns of the
event loop each. While thousands of jobs arrive, a turn is long, and what kopf handed on was seconds old. So
events are taken from the stream, and kopf is left bookmarks: where its watch is.

Whatever else comes makes kopf list that kind anew, after a pause: an error, a page of a load balancer, an
object of another kind. To kopf most of it would be fatal, for the watches of all kinds.
"""

import asyncio
import collections
import http.client
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from ballast_operator.kube.caches import WATCHED, Caches
from ballast_operator.kube.kinds import VERSION, Kind, Object, check
from ballast_operator.kube.nesting import ShallowResponse

SLICE_SECONDS = 0.02
"""How long events are taken in before the rest of the event loop has its turn."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""After a watch that ended at once or was refused; doubles with each of them."""

SHORT_SECONDS = 5.0
"""A watch that lasted longer ended in good order: the API server ends each after minutes."""

TRIES = 4
"""Of a watch that an overloaded API server refuses, before everything is listed anew instead."""

CHANGES = ("ADDED", "MODIFIED", "DELETED")

_UNAUTHORIZED = 401
_OVERLOADED = (408, 429)
_ANEW = b'{"type": "ERROR", "object": {"kind": "Status", "code": 410}}\n'
"""What makes kopf list and watch afresh."""

_TOO_OLD = "the version is too old"
"""It happens in good order, and is not logged."""

_COLLECTIONS = {
    kind: re.compile(re.escape(kind.path().removesuffix(kind.plural)) + f"(namespaces/[^/]+/)?{kind.plural}$")
    for kind in WATCHED
}

logger = logging.getLogger(__name__)

Take = Callable[[str | None, Object], None]
"""Takes an event's type, None for one of the first list, and its object."""


def feeding(caches: Caches) -> type[ShallowResponse]:
    """Answers to kopf's requests; lists and events of the kinds that are watched go into ``caches``."""
    pauses = _Pauses()
    pages: collections.defaultdict[Kind, list[Object]] = collections.defaultdict(list)

    class Feeding(ShallowResponse):
        """See :func:`feeding`."""

        async def start(self, connection: Connection) -> Self:
            """Read the headers.

            Raises:
                aiohttp.ClientConnectionError: a list was refused; kopf tries again.
            """
            await super().start(connection)
            kind = watched_kind(self.url)
            if kind is None:
                return self
            if self.status == _UNAUTHORIZED:  # kopf logs in anew, at once
                await pauses.pause(kind)
                return self
            if "watch" not in self.url.query:
                if self.status >= 400:
                    raise aiohttp.ClientConnectionError(f"listing {kind.plural}: HTTP {self.status}")
                return self
            if self.status >= 400:
                self.content = _Refused(self.content, self.status, kind, pauses)  # type: ignore[assignment]
                self.status = 200
            else:
                self.content = _Events(self.content, _take(caches, kind), kind, pauses)  # type: ignore[assignment]
            return self

        async def json(self, **named: Any) -> Any:
            """The decoded body; of a list, without its items.

            Raises:
                aiohttp.ClientPayloadError: what should be a list is none.
            """
            kind = watched_kind(self.url)
            if kind is None or self.status >= 400:
                return await super().json(**named)
            try:
                found = await super().json(**named)
                items, version = found["items"], found["metadata"]["resourceVersion"]
                told = [item for item in items if _is_one(kind, item)]
                if not isinstance(items, list) or not VERSION.fullmatch(version):
                    raise ValueError(f"items: a {type(items).__name__}; resourceVersion: {version!r}")
            except (ValueError, TypeError, LookupError) as error:
                logger.warning("what was answered as the list of %s is none: %s", kind.plural, error)
                await pauses.pause(kind)
                raise aiohttp.ClientPayloadError(f"no list of {kind.plural}") from error
            pace, take = _Pace(), _take(caches, kind)
            for item in told:
                take(None, {**item, "apiVersion": kind.api_version, "kind": kind.kind})
                await pace.turn()
            if "continue" not in self.url.query:
                pages[kind] = []
            pages[kind] += [{"metadata": {"uid": item["metadata"]["uid"]}} for item in told]
            if not found["metadata"].get("continue") and len(told) == len(items):
                caches.left_out(kind, pages.pop(kind), int(version))
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


class _Pauses:
    """Between the watches of a kind, of which kopf opens the next as soon as one ends."""

    _sleep = staticmethod(asyncio.sleep)

    def __init__(self) -> None:
        self._failures: collections.Counter[Kind] = collections.Counter()

    def failures(self, kind: Kind) -> int:
        """How many in succession have been of no use."""
        return self._failures[kind]

    def served(self, kind: Kind) -> None:
        """A watch was of use."""
        self._failures[kind] = 0

    async def pause(self, kind: Kind) -> None:
        """After one that was not, or that ended at once."""
        seconds = min(FIRST_PAUSE_SECONDS * 2 ** min(self._failures[kind], 10), LONGEST_PAUSE_SECONDS)
        self._failures[kind] += 1
        await self._sleep(seconds)


class _Refused:
    """In place of a watch that the API server answers by an error."""

    def __init__(self, lines: Any, status: int, kind: Kind, pauses: _Pauses) -> None:
        self._lines, self._status, self._kind, self._pauses = lines, status, kind, pauses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lines, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Nothing: the watch is tried again where it was; or a line that makes kopf list anew."""
        overloaded = self._status >= 500 or self._status in _OVERLOADED
        same = overloaded and self._pauses.failures(self._kind) % (TRIES + 1) < TRIES
        logger.warning(
            "the watch of %s was answered by HTTP %d; %s",
            self._kind.plural,
            self._status,
            "it is tried again" if same else "they are listed anew",
        )
        await self._pauses.pause(self._kind)
        if not same:
            yield _ANEW


class _Events:
    """A stream of events of which ``iter_chunked`` gives bookmarks, and an error where it has to end."""

    def __init__(self, lines: Any, take: Take, kind: Kind, pauses: _Pauses) -> None:
        self._lines = lines
        self._take = take
        self._kind = kind
        self._pauses = pauses
        self._what = f"the watch of {kind.plural}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lines, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """One or more lines at a time.

        Raises:
            aiohttp.ClientError: the connection was lost; kopf watches from the last bookmark.
        """
        began = time.monotonic()
        try:
            async for data in self._lines.iter_chunked(size):
                version, pace = "", _Pace()
                *lines, _torn = data.split(b"\n")  # after a torn line the connection is at its end
                for line in filter(None, lines):
                    try:
                        taken = self._taken(line)
                    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                        if str(error) != _TOO_OLD:
                            logger.warning("%s: %s in %.200r; listed anew", self._what, error, line)
                        await self._pauses.pause(self._kind)
                        yield _ANEW
                        return
                    if taken is None:
                        yield self._bookmark(version) + line + b"\n"
                    version = taken or ""
                    await pace.turn()
                yield self._bookmark(version)
        except aiohttp.ClientError:
            await self._rest(began)
            raise
        except RuntimeError as error:  # kopf has logged in anew for another watch, and closed this session
            raise aiohttp.ClientConnectionError(str(error)) from error
        await self._rest(began)

    async def _rest(self, began: float) -> None:
        if time.monotonic() - began < SHORT_SECONDS:
            await self._pauses.pause(self._kind)

    def _taken(self, line: bytes) -> str | None:
        """The version of the object that the line tells of; None: it is for kopf.

        Raises:
            ValueError, LookupError, TypeError, AttributeError, RecursionError: it is no event of this kind.
        """
        event = json.loads(line)
        what, item = event["type"], event["object"]
        if what == "ERROR":
            raise ValueError(_TOO_OLD if item["code"] == http.client.GONE else "an error")
        version = item["metadata"]["resourceVersion"]
        if not VERSION.fullmatch(version):
            raise ValueError("no resourceVersion")
        if what == "BOOKMARK":
            self._pauses.served(self._kind)
            return None
        if what not in CHANGES:
            raise ValueError("another type")
        check(self._kind, item)
        self._pauses.served(self._kind)
        self._take(what, item)
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


def _is_one(kind: Kind, item: Object) -> bool:
    """Whether an item of a list is an object of the kind; one that is not is logged."""
    try:
        check(kind, item)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        logger.warning("a list of %s has what is none: %s in %.200r", kind.plural, error, item)
        return False
    return True
