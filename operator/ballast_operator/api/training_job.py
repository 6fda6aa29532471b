"""``TrainingJob``: what a user asks for.

The one source of its CRD, of its documentation and of what the operator reads.
"""

from typing import Annotated, Any, Literal

from ballast_policies.planning.schedules import SCHEDULES, trained_schedules
from pydantic import Field

from ballast_operator.api import meta
from ballast_operator.api.base import (
    ApiModel,
    GpuType,
    ObjectMeta,
    Refused,
    Rule,
    Time,
    cel_list,
    immutable,
    schema,
)
from ballast_operator.api.reshaping import Balancer, Rebalance, Repack
from ballast_operator.api.template import PodTemplate
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.api.training_recipe import (
    Checkpoint,
    Data,
    Decay,
    Dynamic,
    Model,
    Pipeline,
    Training,
)


class KnownThroughput(ApiModel):
    """A speed that is known before the job has run; the trainer's reports replace it."""

    gpu_type: GpuType
    """The GPU type."""
    stages: Annotated[int, Field(ge=1, le=1024)]
    """Number of stages."""
    steps_per_second: Annotated[float, Field(ge=0, le=1e9)]
    """Optimizer steps per second of the whole gang; 0: it cannot run there."""


class TrainingJobSpec(ApiModel):
    """What to train, and on what it may run."""

    RULES = (
        Rule(
            "!has(self.model.layers) || self.pipeline.maxStages <= self.model.layers",
            "maxStages is above model.layers: a stage needs at least one layer. To fix: lower maxStages",
            field=".pipeline.maxStages",
            holds=lambda spec: spec.model.layers is None or spec.pipeline.max_stages <= spec.model.layers,
        ),
        Rule(
            "!has(self.repack) || !has(self.repack.minStages) || "
            "self.repack.minStages <= self.pipeline.maxStages",
            "repack.minStages is above pipeline.maxStages: the job could never shrink so far. "
            "To fix: lower repack.minStages",
            field=".repack.minStages",
            holds=lambda spec: spec.repack.min_stages <= spec.pipeline.max_stages,
        ),
        Rule(
            "!has(self.repack) || !has(self.repack.targetStages) || "
            "(self.pipeline.minStages <= self.repack.targetStages && "
            "self.repack.targetStages <= self.pipeline.maxStages)",
            "repack.targetStages is below pipeline.minStages or above pipeline.maxStages: the job could "
            "never shrink to it. To fix: choose one between them",
            field=".repack.targetStages",
            holds=lambda spec: (
                spec.repack.target_stages is None
                or spec.pipeline.min_stages <= spec.repack.target_stages <= spec.pipeline.max_stages
            ),
        ),
        Rule(
            "!has(self.model.layers) || !has(self.pipeline.stagesPerRank) || self.pipeline.maxStages == 1 || "
            "self.pipeline.maxStages * self.pipeline.stagesPerRank <= self.model.layers",
            "maxStages x stagesPerRank is above model.layers: each needs at least one layer. "
            "To fix: lower stagesPerRank or maxStages",
            field=".pipeline.stagesPerRank",
            holds=lambda spec: (
                spec.model.layers is None
                or spec.pipeline.stages_per_rank is None
                or spec.pipeline.max_stages == 1
                or spec.pipeline.max_stages * spec.pipeline.stages_per_rank <= spec.model.layers
            ),
        ),
        Rule(
            "!has(self.rebalance) || !has(self.rebalance.balancer) || "
            "self.rebalance.balancer != 'network' || self.pipeline.schedule == '1F1B'",
            "balancer network knows the period of 1F1B with one stage a rank alone. "
            "To fix: pipeline.schedule: 1F1B, or balancer: exact",
            field=".rebalance.balancer",
            holds=lambda spec: (
                spec.rebalance.balancer is not Balancer.NETWORK or spec.pipeline.schedule == "1F1B"
            ),
        ),
        Rule(
            f"!(self.pipeline.schedule in {cel_list(trained_schedules(asynchronous=True))}) || "
            "!has(self.training) || !has(self.training.clipNorm)",
            "training.clipNorm needs a schedule with a flush: without one no stage knows the norm over all. "
            "To fix: leave it out, or choose e.g. 1F1B",
            field=".training.clipNorm",
            holds=lambda spec: (
                spec.training.clip_norm is None or not SCHEDULES[spec.pipeline.schedule].asynchronous
            ),
        ),
        Rule(
            "!has(self.training) || self.training.decay == 'constant' || has(self.training.decaySteps) || "
            "self.training.warmupSteps < self.totalSteps",
            "training.warmupSteps leaves no step to the decay. To fix: lower it",
            field=".training.warmupSteps",
            holds=lambda spec: (
                spec.training.decay is Decay.CONSTANT
                or spec.training.decay_steps is not None
                or spec.training.warmup_steps < spec.total_steps
            ),
        ),
    )
    REFUSED = (
        Refused("budget", "number", "this version does not stop a job by its cost. To fix: leave it out"),
    )

    total_steps: Annotated[int, Field(ge=1, le=2**53)]
    """Optimizer steps until the job has succeeded."""
    model: Model = Field(
        json_schema_extra=schema(immutable("model", "the checkpoint holds the weights of this one"))
    )
    """What the trainer builds."""
    pipeline: Pipeline
    """How a step's batch goes through the stages. Changes take effect at the next launch."""
    dynamics: Annotated[
        tuple[Dynamic, ...],
        Field(max_length=16, json_schema_extra=schema(list_type="map", list_map_keys=["kind"])),
    ] = ()
    """How the model changes while it trains, each kind once."""
    rebalance: Rebalance = Rebalance()
    """When layers move between ranks."""
    repack: Repack = Repack()
    """When GPUs are handed back."""
    training: Training = Training()
    """How the weights are learnt. Changes take effect at the next launch."""
    data: Data | None = Field(
        default=None, json_schema_extra=schema(immutable("data", "the step says which samples come next"))
    )
    """What to learn from. Absent: the model's own data."""
    gpu_types: Annotated[
        tuple[GpuType, ...], Field(max_length=64, json_schema_extra=schema(list_type="set"))
    ] = ()
    """GPU types that it may run on; empty: any."""
    throughput: Annotated[
        tuple[KnownThroughput, ...],
        Field(max_length=512, json_schema_extra=schema(list_type="map", list_map_keys=["gpuType", "stages"])),
    ] = ()
    """Speeds that are known before the job has run."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share relative to other jobs."""
    entity: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """The team it belongs to, one of the ClusterPolicy's ``objective.entities``; read by ``hierarchical``."""
    deadline: Time | None = None
    """When it should be done, as 2030-01-31T12:00:00Z; kept, where it can be, by ``min-cost-slo``."""
    grow: bool = False
    """Whether it takes more GPUs of its pool while it trains, up to ``pipeline.maxStages``, when no other job
    can use them."""
    checkpoint: Checkpoint
    """Where and how often the state is saved."""
    suspend: bool = False
    """Save a checkpoint, stop and hold no GPUs until it is false again."""
    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 3
    """Failures by its own doing before the job has failed; lost pods and nodes do not count."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds after its end until the job is deleted; absent: it is kept."""
    template: PodTemplate
    """The pods. Changes take effect at the next launch."""


TRAINER_FIELDS = (
    "totalSteps",
    "model",
    "pipeline",
    "dynamics",
    "rebalance",
    "repack",
    "checkpoint",
    "training",
    "data",
)
"""Fields of the spec that the trainer gets, verbatim, as ``config.json``."""


class TrainingJob(ApiModel):
    """A pipeline of stages that Ballast places on the GPUs that suit it, and reshapes as it trains."""

    RULES = (
        Rule(
            f"size(self.metadata.name) <= {meta.JOB_NAME_LIMIT} && "
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            f"metadata.name is part of host names: at most {meta.JOB_NAME_LIMIT} lower case letters, digits "
            "and hyphens, a letter first and no hyphen last. To fix: rename the job",
            holds=lambda job: meta.is_job_name(job.metadata.name),
        ),
    )

    api_version: Literal["ballast.dev/v1alpha1"] = meta.API_VERSION
    """Group and version."""
    kind: Literal["TrainingJob"] = meta.TRAINING_JOB_KIND
    """Kind."""
    metadata: ObjectMeta
    """Name and namespace."""
    spec: TrainingJobSpec
    """What to train, and on what it may run."""
    status: TrainingJobStatus = TrainingJobStatus()
    """What has become of it."""

    def trainer_config(self) -> dict[str, Any]:
        """``config.json``: the fields that the trainer acts on, with defaults filled in."""
        spec = self.spec.to_dict()
        return {name: spec[name] for name in TRAINER_FIELDS if name in spec}
