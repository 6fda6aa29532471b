"""The part of ``TrainingJob.spec`` that the operator acts on, as a value."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract import Stage
from ballast_policies.planning.schedules import SCHEDULES
from ballast_policies.planning.stages import first_stages, stage_placement

from ballast_operator.api.read import InvalidObject, read_training_job
from ballast_operator.api.training_job import TrainingJobSpec
from ballast_operator.kube.kinds import Object
from ballast_operator.views.clock import Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a job asks for.

    Attributes:
        config: the trainer's share of the spec, verbatim.
        total_steps: steps to train.
        layers: layers the model is cut into; None: only the trainer knows.
        min_stages, max_stages: allowed positions of the pipeline, each of ``ranks_per_position`` GPUs.
        schedule, microbatches: order and number of the pieces that a batch is cut into.
        stages_per_rank: stages of the model that a rank holds, where there are several ranks.
        repack_enabled, repack_min_stages, repack_target_stages, repack_max_slowdown: which shrinks are
            accepted; no target: any number of pods that is not below the fewest.
        gpu_types: allowed types; empty: any.
        throughput: steps/s by GPU type and number of GPUs.
        ranks_per_position: tensor- and data-parallel ranks at each position of the pipeline.
        data_parallel: replicas of the pipeline among them, which share the microbatches.
        replicas: by stage, how many ranks hold it; empty: one each. They fix the size of the gang.
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
    ranks_per_position: int = 1
    data_parallel: int = 1
    replicas: tuple[int, ...] = ()

    @property
    def largest_gang(self) -> int:
        """Most ranks: ``max_stages`` positions, or as many as have the layers for their stages."""
        if self.replicas:
            return sum(self.replicas)
        positions = self.max_stages
        if self.layers is not None:
            # A position alone has the whole model as one stage.
            positions = min(positions, max(1, self.layers // self.stages_per_rank))
        return positions * self.ranks_per_position

    @property
    def smallest_gang(self) -> int:
        """Fewest ranks that the job may be launched with."""
        return sum(self.replicas) or self.min_stages * self.ranks_per_position

    @property
    def tolerations(self) -> tuple[Mapping[str, Any], ...]:
        """Of the template's pods."""
        return tuple((self.template.get("spec") or {}).get("tolerations") or ())

    def first_stages(self, ranks: int) -> tuple[Stage, ...]:
        """The stages of a launch; empty leaves them to the trainer.

        That is where the number of layers is not known, or is below the number of stages.
        """
        placement = stage_placement(
            self.schedule,
            ranks=ranks // self.ranks_per_position,
            stages_per_rank=self.stages_per_rank,
            replicas=self.replicas,
        )
        if self.layers is None or self.layers < len(placement):
            return ()
        return first_stages(self.layers, placement, self.replicas)

    def suits(self, ranks: int) -> bool:
        """Whether a gang may have this many ranks.

        They fill whole positions of the pipeline, and some schedules take their microbatches in equal rounds.
        """
        if self.replicas:
            return ranks == sum(self.replicas)
        positions, rest = divmod(ranks, self.ranks_per_position)
        return not rest and SCHEDULES[self.schedule].suits(positions, self.microbatches // self.data_parallel)


def read_spec(item: Object) -> tuple[JobSpec | None, str]:
    """(spec, why it cannot be used): exactly one of them says something."""
    try:
        job = read_training_job({**item, "status": {}})
    except InvalidObject as error:
        return None, str(error)
    return _spec(job.spec), ""


def _spec(spec: TrainingJobSpec) -> JobSpec:
    config = spec.config
    pipeline, parallelism, repack = config.pipeline, config.parallelism, config.repack
    # Both are required in a TrainingJob.
    assert pipeline.max_stages is not None and config.checkpoint.path is not None
    throughput: dict[str, dict[int, float]] = {}
    for known in spec.throughput:
        gpus = sum(pipeline.used_replicas) or known.stages * parallelism.ranks_per_position
        throughput.setdefault(known.gpu_type, {})[gpus] = known.steps_per_second
    return JobSpec(
        config=config.to_dict(),
        total_steps=config.total_steps,
        layers=config.model.layers,
        min_stages=pipeline.min_stages,
        max_stages=pipeline.max_stages,
        schedule=pipeline.schedule,
        microbatches=pipeline.microbatches,
        stages_per_rank=SCHEDULES[pipeline.schedule].stages_on_a_rank(pipeline.stages_per_rank),
        ranks_per_position=parallelism.ranks_per_position,
        data_parallel=parallelism.data,
        replicas=pipeline.used_replicas,
        repack_enabled=repack.enabled,
        repack_min_stages=repack.min_stages,
        repack_target_stages=repack.target_stages,
        repack_max_slowdown=repack.max_slowdown,
        gpu_types=spec.gpu_types,
        throughput=throughput,
        weight=spec.weight,
        suspend=spec.suspend,
        grow=spec.grow,
        backoff_limit=spec.backoff_limit,
        ttl_seconds=spec.ttl_seconds_after_finished,
        checkpoint_path=config.checkpoint.path,
        template=spec.template.as_object(),
        entity=spec.entity,
        deadline=spec.deadline,
    )
