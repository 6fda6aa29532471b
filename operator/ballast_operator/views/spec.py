"""The part of ``TrainingJob.spec`` that the operator acts on, as a value."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract import Stage
from ballast_policies.planning.schedules import SCHEDULES
from ballast_policies.planning.stages import first_stages, stage_placement

from ballast_operator.api.read import InvalidObject, read_training_job
from ballast_operator.api.training_job import TrainingJob, TrainingJobSpec
from ballast_operator.kube.kinds import Object
from ballast_operator.views.clock import Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a job asks for.

    Attributes:
        config: the trainer's share of the spec, verbatim.
        total_steps: steps to train.
        layers: layers the model is cut into; None: only the trainer knows.
        min_stages, max_stages: allowed sizes of the gang, one GPU a stage.
        schedule, microbatches: order and number of the pieces that a batch is cut into.
        stages_per_rank: stages of the model that a rank holds, where there are several ranks.
        repack_enabled, repack_min_stages, repack_target_stages, repack_max_slowdown: which shrinks are
            accepted; no target: any number of pods that is not below the fewest.
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
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    microbatches: int = 8
    repack_target_stages: int | None = None

    @property
    def largest_gang(self) -> int:
        """Most ranks that each have the layers for their stages, up to ``max_stages``."""
        if self.layers is None:
            return self.max_stages
        # A rank alone has the whole model as one stage.
        return min(self.max_stages, max(1, self.layers // self.stages_per_rank))

    @property
    def tolerations(self) -> tuple[Mapping[str, Any], ...]:
        """Of the template's pods."""
        return tuple((self.template.get("spec") or {}).get("tolerations") or ())

    def first_stages(self, ranks: int) -> tuple[Stage, ...]:
        """The stages of a launch; empty leaves them to the trainer.

        That is where the number of layers is not known, or is below the number of stages.
        """
        placement = stage_placement(self.schedule, ranks=ranks, stages_per_rank=self.stages_per_rank)
        if self.layers is None or self.layers < len(placement):
            return ()
        return first_stages(self.layers, placement)

    def suits(self, ranks: int) -> bool:
        """Whether the schedule exists for this many ranks: some take their microbatches in equal rounds."""
        return SCHEDULES[self.schedule].suits(ranks, self.microbatches)


def read_spec(item: Object) -> tuple[JobSpec | None, str]:
    """(spec, why it cannot be used): exactly one of them says something."""
    try:
        job = read_training_job({**item, "status": {}})
    except InvalidObject as error:
        return None, str(error)
    return _spec(job, job.spec), ""


def _spec(job: TrainingJob, spec: TrainingJobSpec) -> JobSpec:
    throughput: dict[str, dict[int, float]] = {}
    for known in spec.throughput:
        throughput.setdefault(known.gpu_type, {})[known.stages] = known.steps_per_second
    return JobSpec(
        config=job.trainer_config(),
        total_steps=spec.total_steps,
        layers=spec.model.layers,
        min_stages=spec.pipeline.min_stages,
        max_stages=spec.pipeline.max_stages,
        schedule=spec.pipeline.schedule,
        microbatches=spec.pipeline.microbatches,
        stages_per_rank=spec.pipeline.parts_per_rank,
        repack_enabled=spec.repack.enabled,
        repack_min_stages=spec.repack.min_stages,
        repack_target_stages=spec.repack.target_stages,
        repack_max_slowdown=spec.repack.max_slowdown,
        gpu_types=spec.gpu_types,
        throughput=throughput,
        weight=spec.weight,
        suspend=spec.suspend,
        grow=spec.grow,
        backoff_limit=spec.backoff_limit,
        ttl_seconds=spec.ttl_seconds_after_finished,
        checkpoint_path=spec.checkpoint.path,
        template=spec.template.as_object(),
        entity=spec.entity,
        deadline=spec.deadline,
    )
