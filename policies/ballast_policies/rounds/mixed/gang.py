"""What is known of a gang that may run in several pools, and how fast it would be there."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ballast_policies.planning.launch.unlike_ranks import LaunchedPipeline, RankGpu, step_seconds
from ballast_policies.rounds.values import Placement, PoolPart, mixed_name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedGang:
    """A gang that may run in several pools at once.

    Attributes:
        pipeline: what its stages are cut from.
        sizes: numbers of GPUs that it may have, fewest first.
        speeds: GPU type -> steps/s of ``base`` GPUs of it, of the types that it may use.
        base: number of GPUs.
        fits_one_pool: whether some pool has the GPUs and the memory for its least size.
        mixtures: divisions of its least size over the pools of an empty cluster.
        measured: "2 x k80 + 2 x v100" (:func:`mixed_name`) -> steps/s, as it has reported itself.
        memory: pool -> bytes of each GPU, where that is known.
        barred: groups of nodes (``Node.group``) on which it must not be started.
        per_pod: GPUs of each pod, which are on one node.
        min_gain: part by which several pools must be faster than one.
        may_move: it runs, and may be stopped and started elsewhere now.
        restart_seconds: from its stop to its first step elsewhere.
    """

    pipeline: LaunchedPipeline
    sizes: tuple[int, ...]
    speeds: Mapping[str, float]
    base: int
    fits_one_pool: bool = True
    mixtures: tuple[tuple[PoolPart, ...], ...] = ()
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    barred: frozenset[str] = frozenset()
    per_pod: int = 1
    min_gain: float = 0.05
    may_move: bool = False
    restart_seconds: float = 30.0

    def relative(self, gpu_type: str) -> float:
        """Speed of a GPU relative to the fastest type's; 0: it may not use the type."""
        fastest = max(self.speeds.values(), default=0.0)
        return self.speeds.get(gpu_type, 0.0) / fastest if fastest > 0 else 0.0

    def speed(self, parts: Sequence[PoolPart]) -> float:
        """Steps/s of the gang in ``parts``, in this order: as measured, else as predicted; 0: it cannot.

        The prediction scales the speed of ``base`` GPUs of the fastest type by the steps that the pipeline's
        model gives both, each with its best stages.
        """
        if len(parts) > 1 and (known := self.measured.get(mixed_name(parts))) is not None:
            return known if self._seconds(parts) is not None else 0.0
        here = self._seconds(parts)
        at_base = step_seconds(self.pipeline, (RankGpu(speed=1.0),) * self.base)
        if here is None or at_base is None or here <= 0:
            return 0.0
        return max(self.speeds.values()) * at_base / here

    def speed_at(self, placement: Placement) -> float:
        """As :meth:`speed`, where it is placed."""
        return self.speed(placement.by_pool)

    def _seconds(self, parts: Sequence[PoolPart]) -> float | None:
        ranks: list[RankGpu] = []
        for part in parts:
            relative = self.relative(part.gpu_type)
            if relative <= 0:
                return None
            has = self.memory.get(part.pool, math.inf)
            ranks += [RankGpu(speed=relative, memory=has)] * part.gpus
        return step_seconds(self.pipeline, tuple(ranks))
