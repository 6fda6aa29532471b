"""Layers as a trainer has measured them, and what the memory of a pipeline depends on besides."""

import dataclasses
from typing import TYPE_CHECKING, Self

from ballast_policies.planning.schedules.registry import SCHEDULES

if TYPE_CHECKING:  # the contract knows balancers, which know the bytes of layers
    from ballast_policies.contract.job.job import JobConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class MeasuredLayers:
    """Layers as a trainer has measured them; tuples of shape (L,), or empty: not measured.

    Attributes:
        seconds: of a step, in any unit.
        held_bytes: parameters, gradients and optimizer state, on one rank that holds the layer.
        activation_bytes: kept for the backward, of one microbatch.
        output_bytes, gradient_bytes, repeated_bytes: as of :class:`.rank_bytes.LayerSums`.
        weight_bytes: the parameters alone.
    """

    seconds: tuple[float, ...] = ()
    held_bytes: tuple[int, ...] = ()
    activation_bytes: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    repeated_bytes: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()

    @property
    def largest(self) -> tuple[int, float]:
        """(number of the layer that takes most with one microbatch in flight, its bytes)."""
        kept = self.activation_bytes or (0,) * len(self.held_bytes)
        sizes = [held + activation for held, activation in zip(self.held_bytes, kept, strict=True)]
        layer = max(range(len(sizes)), key=sizes.__getitem__)
        return layer, float(sizes[layer])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineForm:
    """Properties of a pipeline that its memory depends on, besides its layers.

    Attributes:
        schedule: a name of ``planning.schedules.SCHEDULES``.
        positions: of the pipeline; of one with replicas, its stages.
        microbatches: of a step, in each replica of the pipeline.
        stages_per_rank: stages on each rank, where there are several positions.
        replicas: by stage, how many ranks hold it; empty: one each.
        averaged: gradients are averaged over replicas of the pipeline.
        gradient_shares: how many of these have a part each of a layer's gradients (ZeRO-2); 1: all have all.
        weights_shared: they have a part each of its weights, too (ZeRO-3).
    """

    schedule: str
    positions: int
    microbatches: int
    stages_per_rank: int = 1
    replicas: tuple[int, ...] = ()
    averaged: bool = False
    gradient_shares: int = 1
    weights_shared: bool = False

    @classmethod
    def of(cls, config: "JobConfig", positions: int) -> Self:
        """The pipeline of a job over so many positions."""
        pipeline, parallelism = config.pipeline, config.parallelism
        return cls(
            schedule=pipeline.schedule,
            positions=positions,
            microbatches=max(1, pipeline.microbatches // parallelism.data),
            stages_per_rank=SCHEDULES[pipeline.schedule].stages_on_a_rank(pipeline.stages_per_rank),
            replicas=pipeline.used_replicas,
            averaged=parallelism.data > 1,
            gradient_shares=parallelism.gradient_shares,
            weights_shared=parallelism.weight_shares > 1,
        )
