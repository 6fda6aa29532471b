"""Objects of a kind in the caches, by list and watch, as client-go's reflector keeps them.

List, watch from the version of the list, and watch on from the last event or bookmark when a connection ends.
A version that is too old, an error, or what is no event of the kind makes it list anew, after a pause: an
object of another kind, a page of a load balancer. Whatever one watch brings, the others do not notice.
"""

import asyncio
import http.client
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypedDict

from ballast_operator.errors import Expired, OperatorError, Unavailable, Unreachable
from ballast_operator.kube.caches import SELECTORS, Caches
from ballast_operator.kube.client import Cluster, read_json
from ballast_operator.kube.kinds import POD, VERSION, Kind, Object, check

SLICE_SECONDS = 0.02
"""Seconds for which events are taken in before the rest of the event loop has its turn."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
"""Pauses after a watch that ended at once or was refused, or a list that was; doubled with each of them."""

SHORT_SECONDS = 5.0
"""A watch that lasted longer ended in good order: the API server ends each after minutes."""

TRIES = 4
"""Tries of a watch that an overloaded API server refuses, before everything is listed anew instead."""

CHANGES = ("ADDED", "MODIFIED", "DELETED")

NOT_THIS = (ValueError, LookupError, TypeError, AttributeError)
"""Errors of reading a value that has not the shape that the API server gives it."""

_IDENTITY = ("namespace", "name", "uid", "resourceVersion")

logger = logging.getLogger(__name__)


class Where(TypedDict):
    """Selection of the objects of a kind that are kept, as arguments of a list or a watch."""

    namespace: str
    label_selector: str


def where(kind: Kind, namespace: str) -> Where:
    """Objects of a namespace, or of all where it is empty; pods of all take GPUs."""
    own = kind.namespaced and kind is not POD
    return {"namespace": namespace if own else "", "label_selector": SELECTORS.get(kind, "")}


class Reflector:
    """The list and the watch of one kind; ``namespace``: empty: all; ``sleep``: how to pause, seconds."""

    def __init__(
        self,
        caches: Caches,
        cluster: Cluster,
        kind: Kind,
        namespace: str,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._caches = caches
        self._cluster = cluster
        self._kind = kind
        self._where = where(kind, namespace)
        self._sleep = sleep
        self._version: str | None = None
        self._failures = 0

    async def run(self) -> None:
        """Keep the caches up to date, from the last list that they took in on; for ever."""
        listed = self._caches.listed_at.get(self._kind)
        self._version = None if listed is None else str(listed)
        while True:
            began, watching = time.monotonic(), self._version is not None
            try:
                await (self._watch() if watching else self._list())
            except (Unreachable, Expired) as error:
                if isinstance(error, Expired):
                    self._version = None
            except Unavailable as error:
                if self._failures % (TRIES + 1) == TRIES:
                    self._version = None
                self._log(error)
            except (OperatorError, *NOT_THIS) as error:
                self._version = None
                self._log(error)
            else:
                watching = watching and time.monotonic() - began < SHORT_SECONDS
                if not watching:
                    continue
            pause = FIRST_PAUSE_SECONDS * 2 ** min(self._failures, 10)
            self._failures += 1
            await self._sleep(min(pause, LONGEST_PAUSE_SECONDS))

    def _log(self, error: Exception) -> None:
        then = "it is watched on" if self._version else "they are listed anew"
        logger.warning("%s: %s; %s", self._kind.plural, error, then)

    async def _list(self) -> None:
        """Take in a list. Of one with what is no object of the kind, the others; nothing is gone then.

        Raises:
            OperatorError: it was refused, or is not believed yet (:meth:`Caches.doubt`).
            Expired: it contradicts what was known, which is forgotten now: it is to be read anew.
        """
        present: list[Object] = []
        known = self._caches[self._kind].known()
        whole, version, pace = True, "", Pace()
        async for items, read_at in self._cluster.pages(self._kind, **self._where):
            version = read_at
            for item in items:
                try:
                    check(self._kind, item)
                except NOT_THIS as error:
                    logger.warning("a list of %s has %.200r: %s", self._kind.plural, item, error)
                    whole = False
                    continue
                self._take(None, item)
                present.append({"metadata": {k: v for k, v in item["metadata"].items() if k in _IDENTITY}})
                await pace.turn()
        if whole:
            if self._caches.doubt(self._kind, known, present, int(version)):
                raise Expired("the storage was set back")
            self._caches.left_out(self._kind, present, int(version))
        self._version = version

    async def _watch(self) -> None:
        """Take in events until the connection ends.

        Raises:
            OperatorError: the watch was refused, or its connection lost.
            Expired: its version is too old.
            ValueError: what came is no event of the kind.
        """
        pace = Pace()
        async for line in self._cluster.watch(self._kind, self._version or "", **self._where):
            try:
                self._version = self._taken(line)
            except Expired:
                raise
            except NOT_THIS as error:
                raise ValueError(f"{error} in {line[:200]!r}") from error
            self._failures = 0
            await pace.turn()

    def _taken(self, line: bytes) -> str:
        """Take in one event; returns the version that it tells of."""
        event = read_json(line)
        what, item = event["type"], event["object"]
        if what == "ERROR":
            raise Expired("too old") if item["code"] == http.client.GONE else ValueError("an error")
        version = item["metadata"]["resourceVersion"]
        if not VERSION.fullmatch(version):
            raise ValueError("no resourceVersion")
        if what in CHANGES:
            check(self._kind, item)
            self._take(what, item)
        elif what != "BOOKMARK":
            raise ValueError("another type")
        return str(version)

    def _take(self, event: str | None, item: Object) -> None:
        try:
            self._caches.watched(self._kind, event, item)
        except Exception:  # one object must not keep the others from being heard of
            logger.exception("an event of a %s was not understood", self._kind.kind)


class Pace:
    """Gives others their turn after each slice of work."""

    def __init__(self) -> None:
        self._until = time.monotonic() + SLICE_SECONDS

    async def turn(self) -> None:
        """Let the event loop turn where the slice is over."""
        if time.monotonic() >= self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + SLICE_SECONDS
