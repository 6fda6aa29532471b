"""A queue of keys: a key waits in it at most once, and is worked on by at most one worker."""

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")


class KeyQueue(Generic[K]):
    """Keys to reconcile, at once or later.

    Level-triggered: adding a key that waits changes nothing but, maybe, makes it earlier; a key that is
    added while it is worked on is worked on once more afterwards.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = itertools.count()
        self._busy: set[K] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: K, after_seconds: float = 0.0) -> None:
        """Work on ``key`` in ``after_seconds``, or earlier where that is planned already."""
        due = self._clock() + after_seconds
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._sequence), key))
        self._changed.set()

    def forget(self, key: K) -> None:
        """Drop the plans for ``key``."""
        self._due.pop(key, None)

    async def take(self) -> K:
        """The next key that is due and not in work; mark it as in work."""
        while True:
            wait = self._next_wait()
            if isinstance(wait, tuple):
                return wait[0]
            self._changed.clear()
            try:
                # Not wait_for: it may swallow a cancellation that comes together with the change.
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: K) -> None:
        """The work on ``key`` has ended."""
        self._busy.discard(key)
        self._changed.set()

    async def work(self, worker: Callable[[K], Awaitable[None]]) -> None:
        """Take keys and work on them until cancelled; ``worker`` handles its own errors."""
        while True:
            key = await self.take()
            try:
                await worker(key)
            finally:
                self.done(key)

    def _next_wait(self) -> tuple[K] | float | None:
        blocked: list[tuple[float, int, K]] = []
        found: tuple[K] | None = None
        wait: float | None = None
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) != due:
                heapq.heappop(self._heap)
                continue
            if due > self._clock():
                wait = due - self._clock()
                break
            entry = heapq.heappop(self._heap)
            if key in self._busy:
                blocked.append(entry)
                continue
            del self._due[key]
            self._busy.add(key)
            found = (key,)
            break
        for entry in blocked:
            heapq.heappush(self._heap, entry)
        return found if found is not None else wait
