"""The gain of a gang's next GPU, by the policy, and what one division of GPUs wins over another."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from ballast_policies.allocation.instance import DEFAULT_SECONDS
from ballast_policies.allocation.policy import Surplus
from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.gangs import ElasticGang

LEAST_SIZE_GAIN = 0.05
"""Gangs change size for one another, or their pool, where that wins at least this fraction."""

LEAST_GROWTH = 0.02
"""A gang takes more GPUs that are free where it becomes faster by at least this fraction."""

AS_CHEAP = 0.99
"""A step is no dearer on more GPUs where the speed a GPU is at least this part of what it was."""

AFTER_OTHERS = 1e6
"""Factor by which gangs whose deadline no size of theirs keeps grow later, where cost decides."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeCandidate:
    """A gang that may have more GPUs than its least size.

    Attributes:
        job: as the policy sees it.
        index: by arrival.
        unit: steps/s on its part by weight of the GPUs of the type that suits it best.
    """

    job: Job
    gang: ElasticGang
    index: int
    gpu_type: str
    unit: float

    def speed(self, gpus: int) -> float:
        """Steps/s with this number of GPUs."""
        return self.gang.speed(self.gpu_type, gpus)

    def seconds(self, speed: float) -> float:
        """Seconds until its end at this speed."""
        return self._steps / speed if speed > 0 else math.inf

    @property
    def _steps(self) -> float:
        steps = self.job.steps_remaining
        return max(DEFAULT_SECONDS * self.fastest if steps is None else steps, 1e-9)

    @property
    def fastest(self) -> float:
        """Steps/s with the best of its sizes."""
        return max(max(by_size.values()) for by_size in self.gang.speeds.values())

    def is_late(self, speed: float) -> bool:
        """True if it misses a deadline that has not passed, at this speed."""
        deadline = self.job.deadline
        return deadline is not None and 0 < deadline < self.seconds(speed)

    def delay(self, speed: float) -> float:
        """Themis's rho, isolated on its part of the GPUs (dissertation section 5.4.2)."""
        alone = self.job.isolated_elapsed + self.seconds(self.unit)
        return (self.job.elapsed + self.seconds(speed)) / max(alone, 1e-9)


def partition_speed(gang: ElasticGang, capacity: Mapping[str, int], part: float) -> float:
    """Steps/s on ``part`` (0 to 1) of all GPUs of the type that suits the gang best."""
    return max(
        (gang.partition_speed(gpu_type, part * capacity.get(gpu_type, 0)) for gpu_type in gang.speeds),
        default=0.0,
    )


def urgency(surplus: Surplus, one: SizeCandidate, now: int, more: int) -> float:
    """The lower the sooner the gang grows from ``now`` to ``more`` GPUs; infinite: not at all."""
    slow, fast = one.speed(now), one.speed(more)
    match surplus:
        case Surplus.ARRIVAL:
            return one.index
        case Surplus.SHORTEST:
            # Between Smith's rule (over the length), right for jobs that scale well, and equal parts.
            most = one.fastest * (more - now)
            return -(fast - slow) / most / math.sqrt(one.seconds(one.fastest))
        case Surplus.LONGEST:
            return -one.seconds(slow)
        case Surplus.FINISH_TIME:
            return -one.delay(slow)
        case Surplus.THROUGHPUT:
            return -(fast - slow) / (more - now)
        case Surplus.COMPLETION_TIME:
            seconds = one.seconds(slow)
            return (
                -1.0 / (1.0 + seconds) if one.gang.wanted is not None and more <= one.gang.wanted else seconds
            )
        case Surplus.COST:
            chosen = one.gang.wanted is not None and more <= one.gang.wanted
            as_cheap = fast / more >= AS_CHEAP * slow / now
            if chosen or as_cheap or one.is_late(slow):
                return one.index + (AFTER_OTHERS if one.is_late(one.fastest) else 0)
            return math.inf
    return slow / one.unit if one.unit > 0 else slow


Speeds = Sequence[tuple[SizeCandidate, float, float]]
"""Gangs whose speed differs: (gang, steps/s of one division, of another)."""


def gain(surplus: Surplus, changed: Speeds) -> float:
    """Gain of the second division over the first, as a fraction, in the sense of the policy."""
    if not changed:
        return 0.0
    return _GAINS.get(surplus, _of_levels)(changed)


def _of_levels(changed: Speeds) -> float:
    logs = [math.log(max(after, 1e-12) / max(before, 1e-12)) for _, before, after in changed]
    return math.exp(sum(logs) / len(logs)) - 1.0


def _of_the_first(changed: Speeds) -> float:
    _, before, after = min(changed, key=lambda entry: entry[0].index)
    return after / max(before, 1e-12) - 1.0


def _of_sums(changed: Speeds) -> float:
    before, after = sum(entry[1] for entry in changed), sum(entry[2] for entry in changed)
    return after / max(before, 1e-12) - 1.0


def _of_times(
    total: Callable[[list[float]], float], time: Callable[[SizeCandidate, float], float], changed: Speeds
) -> float:
    before = total([time(one, speed) for one, speed, _ in changed])
    after = total([time(one, speed) for one, _, speed in changed])
    return before / after - 1.0 if 0 < after < math.inf else 0.0


_GAINS: Mapping[Surplus, Callable[[Speeds], float]] = {
    Surplus.ARRIVAL: _of_the_first,
    Surplus.THROUGHPUT: _of_sums,
    Surplus.COMPLETION_TIME: functools.partial(_of_times, sum, SizeCandidate.seconds),
    Surplus.LONGEST: functools.partial(_of_times, max, SizeCandidate.seconds),
    Surplus.FINISH_TIME: functools.partial(_of_times, max, SizeCandidate.delay),
}
