"""The part of ``TrainingJob.spec`` that the operator acts on, as a value."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ballast_operator.views.clock import Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job's wishes.

    Attributes:
        config: the trainer's share of the spec, verbatim.
        total_steps: steps to train.
        layers: layers the model is cut into; None: only the trainer knows.
        min_stages, max_stages: allowed sizes of the gang, one GPU a stage.
        repack_enabled, repack_min_stages, repack_max_slowdown: which shrinks are accepted.
        gpu_types: allowed types; empty: any.
        throughput: steps/s by GPU type and number of stages.
        grow: it may take more GPUs while it trains.
        entity: the team; None: none.
        deadline: when it should be done; None: no deadline.
        checkpoint_path: where checkpoints go, as the pods see it.
        template: PodTemplateSpec.
    """

    config: Mapping[str, Any]
    total_steps: int
    layers: int | None
    min_stages: int
    max_stages: int
    repack_enabled: bool
    repack_min_stages: int
    repack_max_slowdown: float
    gpu_types: tuple[str, ...]
    throughput: Mapping[str, Mapping[int, float]]
    weight: float
    suspend: bool
    backoff_limit: int
    ttl_seconds: int | None
    checkpoint_path: str
    template: Mapping[str, Any]
    grow: bool = False
    entity: str | None = None
    deadline: Time | None = None
