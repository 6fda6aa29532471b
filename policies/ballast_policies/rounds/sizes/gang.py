"""What sizes are decided from: the gangs that may have several, and how a policy weighs them."""

import dataclasses
import itertools
from collections.abc import Mapping

from ballast_policies.allocation.policy import Surplus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticGang:
    """A gang that may have one of several sizes.

    Attributes:
        speeds: GPU type -> number of GPUs -> steps/s, for the sizes that the gang may have, fewest first.
        together: ranks that stay or leave together: whole positions of the pipeline, in whole pods.
        per_pod: GPUs of each pod, which are on one node; ``together`` is a multiple.
        may_shrink: it runs and can give GPUs back now; of a gang that does not run it is not read.
        may_grow: it can take more GPUs now.
        may_move: it may be stopped and started in another pool now.
        pause_seconds: how long training stands still when the gang shrinks or grows.
        restart_seconds: from its stop to its first step elsewhere.
    """

    speeds: Mapping[str, Mapping[int, float]]
    together: int = 1
    per_pod: int = 1
    may_shrink: bool = True
    may_grow: bool = True
    may_move: bool = True
    pause_seconds: float = 1.0
    restart_seconds: float = 30.0

    @property
    def least(self) -> int:
        """The smallest size."""
        return min(min(by_size) for by_size in self.speeds.values())

    @property
    def most(self) -> int:
        """The largest size."""
        return max(max(by_size) for by_size in self.speeds.values())

    def speed(self, gpu_type: str, gpus: int) -> float:
        """Steps/s; of a size that is not listed, that of the next smaller one; 0 below the least."""
        by_size = self.speeds.get(gpu_type, {})
        known = by_size.get(gpus)
        if known is not None:
            return known
        return next((by_size[size] for size in sorted(by_size, reverse=True) if size <= gpus), 0.0)

    def partition_speed(self, gpu_type: str, gpus: float) -> float:
        """Steps/s on a part of ``gpus`` GPUs, shared in time between the two sizes around it."""
        by_size = sorted(self.speeds.get(gpu_type, {}).items())
        if not by_size:
            return 0.0
        least, slowest = by_size[0]
        if gpus <= least:
            return slowest * gpus / least
        for (low, slow), (high, fast) in itertools.pairwise(by_size):
            if gpus < high:
                return slow + (fast - slow) * (gpus - low) / (high - low)
        return by_size[-1][1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeSettings:
    """How sizes are decided.

    Attributes:
        surplus: which gang comes first.
        least_gain: gangs change size for one another where that wins at least this fraction.
        least_growth: a gang takes more GPUs that are free where it becomes faster by at least this fraction.
        stay_rounds: rounds that a size is expected to last; the pause of a change is spread over them. A
            restart is spread over the time that the gang has been where it is, if that is longer.
    """

    surplus: Surplus = Surplus.LEVEL
    least_gain: float = 0.05
    least_growth: float = 0.02
    stay_rounds: float = 1.0
