"""Speeds as they are known so far: where each was measured, and how sure it is.

A speed in one place is never taken for one elsewhere. The logarithm of a rate is tracked by a scalar Kalman
filter, from a prior. At first its gain is large and each report counts as its own; then the gain settles at
ALPHA, where it is the exponential moving average with which Gavel follows measured throughputs (section 5.6),
so that a job whose layers get cheaper is followed too.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

ALPHA = 0.5
"""Weight of a new measurement against what is known, in the long run."""

MEASUREMENT_DEVIATION = 0.05
"""Relative standard deviation of one report of steps/s."""

# The drift per report at which the filter's gain settles at ALPHA: q = s^2 alpha^2 / (1 - alpha).
DRIFT_VARIANCE = MEASUREMENT_DEVIATION**2 * ALPHA**2 / (1.0 - ALPHA)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A throughput with what is not known about it.

    Attributes:
        steps_per_second: of the whole gang; 0: it does not fit.
        deviation: relative standard deviation; 0.3: one time in three it is off by more than about 30 %.
        source: ``measured``, ``prior`` (a job type that was profiled), ``completed`` (by matrix
            completion) or ``unknown``.
        reports: how many measurements are in it.
    """

    steps_per_second: float
    deviation: float
    source: str
    reports: int = 0

    def measured(self, steps_per_second: float) -> "Estimate":
        """The estimate after one more measurement.

        Raises:
            ValueError: the measurement is not positive and finite.
        """
        if not (steps_per_second > 0 and math.isfinite(steps_per_second)):
            raise ValueError(
                f"a measured throughput of {steps_per_second} steps/s is not positive and finite"
            )
        if self.steps_per_second <= 0 or not math.isfinite(self.deviation):
            return Estimate(
                steps_per_second=steps_per_second,
                deviation=MEASUREMENT_DEVIATION,
                source="measured",
                reports=self.reports + 1,
            )
        variance = self.deviation**2 + (DRIFT_VARIANCE if self.reports else 0.0)
        gain = variance / (variance + MEASUREMENT_DEVIATION**2)
        log_rate = math.log(self.steps_per_second)
        log_rate += gain * (math.log(steps_per_second) - log_rate)
        return Estimate(
            steps_per_second=math.exp(log_rate),
            deviation=math.sqrt((1.0 - gain) * variance),
            source="measured",
            reports=self.reports + 1,
        )


_OVER, _NODES, _WITH, _TIMES, _AND = " over ", " nodes", " with ", " x ", " + "


class SpeedKey(NamedTuple):
    """GPUs that a gang was on.

    Attributes:
        gpus: (GPU type, how many of it), by type.
        nodes: that they were on; None: the gang was in several pools.
        partner: kind of the job that had its GPU as well; empty: none did.
    """

    gpus: tuple[tuple[str, int], ...]
    nodes: int | None = 1
    partner: str = ""

    @classmethod
    def of(cls, gpu_type: str, gpus: int, nodes: int = 1) -> "SpeedKey":
        """A gang in one pool."""
        return cls(((gpu_type, gpus),), max(1, nodes))

    @classmethod
    def of_types(cls, counts: Iterable[tuple[str, int]]) -> "SpeedKey":
        """A gang in several pools, by its numbers of GPUs of each type, whatever pools these are."""
        total: Counter[str] = Counter()
        for gpu_type, count in counts:
            total[gpu_type] += count
        return cls(tuple(sorted(total.items())), nodes=None)

    @classmethod
    def read(cls, text: str, gpus: int) -> "SpeedKey":
        """Key from its text (:meth:`__str__`) and the number of its GPUs, as both are saved.

        Raises:
            ValueError: it is none.
        """
        if _TIMES in text:
            parts = (part.partition(_TIMES) for part in text.split(_AND))
            return cls.of_types((gpu_type, int(count)) for count, _, gpu_type in parts)
        name, _, partner = text.partition(_WITH)
        gpu_type, _, rest = name.partition(_OVER)
        nodes = rest.removesuffix(_NODES)
        at = cls.of(gpu_type, gpus, int(nodes)) if nodes.isdecimal() else cls.of(name, gpus)
        return at._replace(partner=partner)

    @property
    def total(self) -> int:
        """GPUs in all."""
        return sum(count for _, count in self.gpus)

    @property
    def alone_in_pool(self) -> tuple[str, int] | None:
        """(GPU type, GPUs) of a gang in one pool that shared no GPU; None: it was another."""
        return self.gpus[0] if self.nodes is not None and not self.partner else None

    def __str__(self) -> str:
        """Text for people: ``v100``, ``v100 over 2 nodes``, ``v100 with KIND``, ``2 x k80 + 2 x v100``."""
        if self.nodes is None:
            return _AND.join(f"{count}{_TIMES}{gpu_type}" for gpu_type, count in self.gpus)
        over = f"{_OVER}{self.nodes}{_NODES}" if self.nodes > 1 else ""
        return self.gpus[0][0] + over + (f"{_WITH}{self.partner}" if self.partner else "")


Speeds = Mapping[SpeedKey, Estimate]
"""Place -> speed that is known there."""
