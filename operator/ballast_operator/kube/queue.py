"""A queue of keys: a key waits in it at most once, and is worked on by at most one worker."""

import asyncio
import enum
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")

TURNS = 16
"""Of this many keys taken, one comes from the least urgent lane, so that it is never starved."""


class Lane(enum.IntEnum):
    """Urgency of a key among those that are due."""

    URGENT = 0
    """GPUs wait for it: a launch, a stop, an answer to a trainer."""
    ORDINARY = 1
    """A change of a job that trains."""
    BACKGROUND = 2
    """Something to tell people: why a job waits, how far it is."""


class _Plan(NamedTuple):
    due: float
    lane: Lane
    number: int


class KeyQueue(Generic[K]):
    """Keys to reconcile, at once or later, the urgent ones first.

    Level-triggered: adding a key that waits changes nothing but, maybe, makes it earlier or more urgent; a
    key that is added while it is worked on is worked on once more afterwards.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._plans: dict[K, _Plan] = {}
        self._later: list[tuple[float, int, K]] = []
        self._ready: dict[Lane, deque[tuple[int, K]]] = {lane: deque() for lane in Lane}
        self._numbers = itertools.count()
        self._taken = itertools.count(1)
        self._busy: set[K] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._plans)

    def due(self) -> int:
        """Number of keys that could be worked on now; from any thread."""
        now = self._clock()
        return sum(plan.due <= now for plan in tuple(self._plans.values())) + len(self._busy)

    def busy(self, key: K) -> bool:
        """True if a worker has the key."""
        return key in self._busy

    def add(self, key: K, after_seconds: float = 0.0, lane: Lane = Lane.ORDINARY) -> None:
        """Work on ``key`` in ``after_seconds``, or earlier or more urgently where that is planned already."""
        due, known = self._clock() + after_seconds, self._plans.get(key)
        if known is not None:
            if known.due <= due and known.lane <= lane:
                return
            due, lane = min(due, known.due), min(lane, known.lane)
        plan = self._plans[key] = _Plan(due, lane, next(self._numbers))
        heapq.heappush(self._later, (due, plan.number, key))
        self._tell()

    def forget(self, key: K) -> None:
        """Drop the plans for ``key``."""
        self._plans.pop(key, None)

    async def take(self, least: Lane = Lane.BACKGROUND, most: Lane = Lane.URGENT) -> K:
        """The most urgent key that is due and not in work; it is in work from now on.

        Keys that are less urgent than ``least``, or more than ``most``, are left to others.
        """
        while True:
            self._sort_due()
            found = self._next(least, most)
            if found is not None:
                return found[0]
            changed = self._changed
            wait = max(0.0, self._later[0][0] - self._clock()) if self._later else None
            try:
                # Not wait_for: it may swallow a cancellation that comes together with the change.
                async with asyncio.timeout(wait):
                    await changed.wait()
            except TimeoutError:
                continue

    def done(self, key: K) -> None:
        """The work on ``key`` has ended."""
        self._busy.discard(key)
        plan = self._plans.get(key)
        if plan is not None:  # it may have been passed over meanwhile
            heapq.heappush(self._later, (plan.due, plan.number, key))
        self._tell()

    async def work(
        self,
        worker: Callable[[K], Awaitable[None]],
        least: Lane = Lane.BACKGROUND,
        most: Lane = Lane.URGENT,
    ) -> None:
        """Take keys and work on them until cancelled; ``worker`` handles its own errors.

        Between two keys everything else on the event loop has its turn: a pass that writes nothing waits for
        nothing, and thousands of them would hold up a launch under way.
        """
        while True:
            key = await self.take(least, most)
            try:
                await worker(key)
            finally:
                self.done(key)
            await asyncio.sleep(0)

    def _sort_due(self) -> None:
        """Move what is due to its lane; entries that a later plan has replaced are dropped."""
        now = self._clock()
        while self._later:
            due, number, key = self._later[0]
            plan = self._plans.get(key)
            if plan is None or plan.number != number:
                heapq.heappop(self._later)
            elif due > now:
                return
            else:
                heapq.heappop(self._later)
                self._ready[plan.lane].append((number, key))

    def _tell(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _next(self, least: Lane, most: Lane) -> tuple[K] | None:
        lanes = [lane for lane in Lane if most <= lane <= least and self._ready[lane]]
        if lanes and next(self._taken) % TURNS == 0:
            lanes.reverse()
        for lane in lanes:
            ready = self._ready[lane]
            while ready:
                number, key = ready.popleft()
                plan = self._plans.get(key)
                if plan is None or plan.number != number or key in self._busy:
                    continue  # done() brings a busy one back
                del self._plans[key]
                self._busy.add(key)
                return (key,)
        return None
