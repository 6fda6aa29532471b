"""One stay of a job on rented machines: start-up, training with checkpoints, and its end."""

import dataclasses
import math
from typing import Literal

Cause = Literal["finished", "preempted", "moved"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RentalEnd:
    """State of a stay after some time.

    Attributes:
        at: when it ended, or was looked at.
        steps: that the job still has to do.
        cause: why it ended; None: it continues.
        lost_steps: done, and to be done again.
    """

    at: float
    steps: float
    cause: Cause | None
    lost_steps: float = 0.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Rental:
    """Machines from their grant on; times in seconds since 1970.

    Attributes:
        option, offer: indices, of the job's options and of all offers.
        reason: why it was chosen.
        gpu_type, gpus: held.
        granted: from when on it is paid.
        trains_from: after the start-up.
        lost_at: when the machines are taken away.
        steps_per_second: while it trains, checkpoints not counted.
        interval: seconds of work between checkpoints.
        notice_seconds: how long before the loss it is known.
        trained_until: up to when the job's steps are counted.
    """

    option: int
    offer: int
    reason: str
    gpu_type: str
    gpus: int
    granted: float
    trains_from: float
    lost_at: float
    steps_per_second: float
    interval: float
    checkpoint_seconds: float
    notice_seconds: float
    trained_until: float = -math.inf

    @property
    def rate(self) -> float:
        """Steps/s with the time for checkpoints."""
        return self.steps_per_second * self.interval / (self.interval + self.checkpoint_seconds)

    def _trained(self, until: float) -> float:
        since = max(self.trained_until, self.trains_from)
        return max(0.0, until - since) * self.rate

    def left(self, now: float, steps: float) -> RentalEnd:
        """Saves and leaves by choice: the save is paid, and no step is lost."""
        at = min(now + self.checkpoint_seconds, self.lost_at)
        return RentalEnd(at=at, steps=max(steps - self._trained(now), 0.0), cause="moved")


def run_until(rental: Rental, until: float, steps: float) -> RentalEnd:
    """The job on these machines until a moment, its end, or their loss, whichever is first."""
    since = max(rental.trained_until, rental.trains_from)
    needs = steps / rental.rate
    noticed = rental.notice_seconds >= rental.checkpoint_seconds
    stops = rental.lost_at - (rental.checkpoint_seconds if noticed else 0.0)
    if since + needs <= min(until, stops):
        return RentalEnd(at=since + needs, steps=0.0, cause="finished")
    if rental.lost_at > until:
        # Steps trained after ``stops`` would be counted twice: the save at the notice comes first.
        moment = min(until, max(stops, since))
        left = steps - rental._trained(moment)
        rental.trained_until = max(rental.trained_until, moment)
        return RentalEnd(at=until, steps=left, cause=None)
    left = steps - rental._trained(max(stops, since))
    if noticed:
        return RentalEnd(at=rental.lost_at, steps=left, cause="preempted")
    cycle = rental.interval + rental.checkpoint_seconds
    unsaved = max(0.0, rental.lost_at - rental.trains_from) % cycle
    lost = (
        min(unsaved, rental.interval) * rental.steps_per_second
        if rental.lost_at > rental.trains_from
        else 0.0
    )
    return RentalEnd(at=rental.lost_at, steps=left + lost, cause="preempted", lost_steps=lost)
