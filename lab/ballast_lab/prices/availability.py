"""Availability of spot machines: when a pool's machine ran, and when it was taken away."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One life of a machine.

    Attributes:
        start: when it was granted.
        end: when it was taken away, or last seen running.
        preempted: whether it was taken away; else the log ends.
    """

    start: float
    end: float
    preempted: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AvailabilityLog:
    """One pool's machine that was always asked for again.

    Attributes:
        start, end: of the observation.
        spans: in order of time, without overlap.
    """

    start: float
    end: float
    spans: tuple[Span, ...]

    @property
    def preemptions(self) -> int:
        """Number of times that a machine was taken away."""
        return sum(span.preempted for span in self.spans)

    @property
    def up_seconds(self) -> float:
        """Time in which a machine ran."""
        return math.fsum(span.end - span.start for span in self.spans)

    def replayed(self, start: float, end: float) -> list[Span]:
        """The spans from ``start`` to ``end``.

        Inside of the observation as they were; where the time asked for is longer or another one, the
        observation is repeated end to end. A machine that ran when the observation ended is not taken away
        there, unless the repetition begins without one.
        """
        length = self.end - self.start
        if length <= 0 or not self.spans:
            return []
        first = math.floor((start - self.start) / length)
        last = math.floor((end - self.start) / length)
        found: list[Span] = []
        for turn in range(first, last + 1):
            shift = turn * length
            for span in self.spans:
                moved = Span(start=span.start + shift, end=span.end + shift, preempted=span.preempted)
                if moved.end <= start or moved.start >= end:
                    continue
                if found and not found[-1].preempted and moved.start - found[-1].end < _SAME_MACHINE:
                    moved = dataclasses.replace(moved, start=found.pop().start)
                found.append(moved)
        return found


_SAME_MACHINE = 1800.0
"""Seconds between a machine that was not taken away and one granted at which they count as one."""


def pooled(logs: Sequence[AvailabilityLog]) -> tuple[int, float]:
    """(preemptions, machine seconds) of several logs."""
    return sum(log.preemptions for log in logs), math.fsum(log.up_seconds for log in logs)
