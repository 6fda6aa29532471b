"""Reports of the ranks of a tensor group, and their seconds between collectives."""

import statistics
import time

import torch
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.tensor_parallel.product import GemmTimer
from tensor_group.shape import BASE_SLOWDOWN, RANKS

TIMED_STEPS, SETTLED = 14, 6


class Recorder:
    """Keeps what the trainer reports."""

    def __init__(self):
        self.steps, self.events = [], []

    def step(self, **fields):
        """A step line."""
        self.steps.append(fields)

    def event(self, name, **fields):
        """An event."""
        self.events.append({"event": name, **fields})


class Segments:
    """Emulated seconds of this rank between collectives of its tensor group, by step.

    Attributes:
        counts: the group's seconds are counted, for :meth:`passed`, at the price of a collective for each.
    """

    def __init__(self):
        self.steps = []
        self.counts, self._passed = False, 0.0
        self._clock, self._mark = None, 0.0

    def watch(self):
        """Let the trainer's clocks and collectives tell; this process does nothing else."""
        start_step, all_reduce, broadcast = GemmTimer.start_step, Axis.all_reduce, Axis.broadcast

        def starting(clock):
            start_step(clock)
            if clock.running:
                self._clock, self._mark = clock, self._seconds(clock)
                self.steps.append([])

        def before(collective):
            def counted(axis, *arguments, **named):
                if self.steps and axis.size > 1 and axis.ranks == tuple(range(RANKS)):
                    now = self._seconds(self._clock)
                    self.steps[-1].append(now - self._mark)
                    if self.counts:
                        passed = torch.tensor([self._passed + now - self._mark], dtype=torch.float64)
                        self._passed = float(all_reduce(axis, passed, largest=True))
                result = collective(axis, *arguments, **named)
                if self.steps:
                    self._mark = self._seconds(self._clock)
                return result

            return counted

        GemmTimer.start_step = starting
        Axis.all_reduce, Axis.broadcast = before(all_reduce), before(broadcast)

    def passed(self):
        """Counted seconds of the group, of which each rank waits for the slowest at each collective."""
        return self._passed + self._seconds(self._clock) - self._mark

    @staticmethod
    def _seconds(clock):
        return BASE_SLOWDOWN * time.thread_time() + clock.extra


def slowest_between_collectives(rows):
    """Median seconds of a step from all ranks' segments: each lasts as long as its slowest rank."""
    totals = []
    for step in range(SETTLED, min(len(row) for row in rows)):
        segments = [row[step] for row in rows]
        if len({len(segment) for segment in segments}) == 1:
            totals.append(sum(max(each) for each in zip(*segments, strict=True)))
    return statistics.median(totals)
