"""Times of decisions: soon where GPUs may wait for it, later where it can only say who waits."""

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable, Mapping

from ballast_policies.rounds.values import Round

from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.views.job import JobView

LONGEST_REST_SECONDS = 2.0
"""Between two decisions of which the second was asked for."""


class Cooldown(enum.Enum):
    """Pause after a decision, as a fraction of the time that it took: time for what it has decided."""

    NONE = 0.0
    """A new job may fit in GPUs that are free."""
    USUAL = 0.5
    LONG = 1.0
    """A new job can only be told why it waits; with thousands of them, decisions take half of the time."""


class DecisionThrottle:
    """Collects what asks for a decision, until it is time for one.

    What asks within ``gather_seconds`` of each other shares one decision. ``clock``: seconds that never go
    back.
    """

    def __init__(self, gather_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._gather_seconds = gather_seconds
        self._clock = clock
        self._asked = asyncio.Event()
        self._gathered_at: float | None = None
        self._rest = Cooldown.LONG
        self._ended_at = clock()
        self._took_seconds = 0.0
        self._free: Mapping[str, int] = {}

    def request(self, rest: Cooldown = Cooldown.USUAL) -> None:
        """Something has changed; the shortest rest of all that ask counts."""
        if self._gathered_at is None:
            self._gathered_at = self._clock() + self._gather_seconds
        self._rest = min(self._rest, rest, key=lambda each: each.value)
        self._asked.set()

    def arrived(self, view: JobView) -> None:
        """A new job has come."""
        self.request(Cooldown.NONE if self._may_fit(view) else Cooldown.LONG)

    def decided(self, took_seconds: float, snapshot: Snapshot, round_: Round | None) -> None:
        """A decision on ``snapshot`` has ended."""
        self._ended_at, self._took_seconds = self._clock(), took_seconds
        free = {node.name: node.gpus for node in snapshot.capacity.nodes if not node.closed}
        for placement in round_.placements.values() if round_ is not None else ():
            for name in placement.nodes:
                if name in free:
                    free[name] -= 1
        by_type: Counter[str] = Counter()
        for node in snapshot.capacity.nodes:
            by_type[node.gpu_type] += max(0, free.get(node.name, 0))
        self._free = by_type

    async def wait(self, longest_seconds: float | None) -> None:
        """Until a decision that was asked for is due, or time is over; what asks later asks for the next."""
        at = None if longest_seconds is None else self._clock() + longest_seconds
        while (due := self._due(at)) is None or due > self._clock():
            self._asked.clear()
            try:
                # Not wait_for: it may swallow a cancellation that comes together with the event.
                async with asyncio.timeout(None if due is None else due - self._clock()):
                    await self._asked.wait()
            except TimeoutError:
                pass
        self._asked.clear()
        self._gathered_at, self._rest = None, Cooldown.LONG

    def _due(self, at: float | None) -> float | None:
        if self._gathered_at is None:
            return at
        rested = self._ended_at + min(LONGEST_REST_SECONDS, self._rest.value * self._took_seconds)
        due = max(self._gathered_at, rested)
        return due if at is None else min(at, due)

    def _may_fit(self, view: JobView) -> bool:
        """Whether a GPU type that the job may use had as many GPUs left as its smallest gang takes."""
        if view.spec is None:
            return False
        needed, allowed = view.spec.smallest_gang, view.spec.gpu_types
        return any(
            free >= needed for gpu_type, free in self._free.items() if not allowed or gpu_type in allowed
        )
