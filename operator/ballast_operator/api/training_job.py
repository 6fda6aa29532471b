"""``TrainingJob``: what a user asks for.

The one source of its CRD, of its documentation and of what the operator reads.
"""

import enum
from typing import Annotated, Any, Literal

from pydantic import Field

from ballast_operator.api import meta
from ballast_operator.api.base import ApiModel, GpuType, ObjectMeta, Refused, Rule, Step, immutable, schema
from ballast_operator.api.template import PodTemplate
from ballast_operator.api.training_job_status import TrainingJobStatus


class Schedule(enum.StrEnum):
    """Orders of microbatches that the trainer runs."""

    GPIPE = "GPipe"
    """All forwards, then all backwards."""
    ONE_F_ONE_B = "1F1B"
    """Forwards and backwards take turns (PipeDream-Flush): fewer activations in memory."""


class DynamicKind(enum.StrEnum):
    """Kinds of change while training that the trainer carries out."""

    PRUNING = "pruning"
    """Gradual global magnitude pruning; ``target`` is the final sparsity."""
    FREEZING = "freezing"
    """Layers stop learning from the front; ``target`` is the fraction frozen at the end."""


class Model(ApiModel):
    """What the trainer builds."""

    name: Annotated[
        str,
        Field(
            max_length=253,
            pattern=r"^([a-z][a-z0-9-]*|[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*)$",
        ),
    ]
    """A registered model (``gpt``, ``recurrent``), or ``module:callable`` of the trainer's image."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the model's builder."""
    layers: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Layers that the pipeline is cut from. With it the operator refuses more stages than layers."""


class Pipeline(ApiModel):
    """How a step's batch goes through the stages; one stage is one pod with one GPU."""

    RULES = (
        Rule(
            "self.minStages <= self.maxStages",
            "minStages is above maxStages. To fix: lower minStages or raise maxStages",
            field=".minStages",
            holds=lambda pipeline: pipeline.min_stages <= pipeline.max_stages,
        ),
        Rule(
            "self.maxStages <= self.microbatches",
            "maxStages is above microbatches: a pipeline needs at least one microbatch a stage. "
            "To fix: raise microbatches or lower maxStages",
            field=".maxStages",
            holds=lambda pipeline: pipeline.max_stages <= pipeline.microbatches,
        ),
        Rule(
            "self.globalBatchSize % self.microbatches == 0",
            "globalBatchSize is not a multiple of microbatches. To fix: choose a multiple",
            field=".globalBatchSize",
            holds=lambda pipeline: pipeline.global_batch_size % pipeline.microbatches == 0,
        ),
    )

    min_stages: Annotated[int, Field(ge=1, le=1024)] = 1
    """Fewest stages the job may be launched with."""
    max_stages: Annotated[int, Field(ge=1, le=1024)]
    """Most stages the job may be launched with."""
    microbatches: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Pieces that a batch is cut into; at least one a stage."""
    global_batch_size: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        json_schema_extra=schema(immutable("globalBatchSize", "the order of the data follows from it"))
    )
    """Samples of one optimizer step, over all microbatches."""
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """Order of the microbatches."""


class Dynamic(ApiModel):
    """One change of the model while it trains."""

    RULES = (
        Rule(
            "self.startStep <= self.endStep",
            "endStep is before startStep. To fix: raise endStep",
            field=".endStep",
            holds=lambda dynamic: dynamic.start_step <= dynamic.end_step,
        ),
    )

    kind: DynamicKind
    """What changes."""
    start_step: Step = 0
    """First step that changes something."""
    end_step: Step
    """Step at which ``target`` is reached."""
    every_steps: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1
    """Steps between two changes."""
    target: Annotated[float, Field(ge=0, le=1)]
    """What is reached at ``endStep``, 0 to 1: final sparsity, or the fraction of layers frozen."""


class Rebalance(ApiModel):
    """When layers move between the ranks of a job, while it trains."""

    enabled: bool = True
    """Whether layers move at all."""
    every_steps: Annotated[int, Field(ge=1, le=2**31 - 1)] = 20
    """Steps between two looks at the layers' measured times."""
    min_gain: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Move where the predicted step time falls by at least this fraction."""


class Repack(ApiModel):
    """When the job hands GPUs back, while it trains."""

    enabled: bool = False
    """Whether it does."""
    min_stages: Annotated[int, Field(ge=1, le=1024)] = 1
    """Fewest stages that it may shrink to."""
    every_steps: Annotated[int, Field(ge=1, le=2**31 - 1)] = 20
    """Steps between two considerations."""
    max_slowdown: Annotated[float, Field(ge=0, le=100)] = 0.1
    """Shrink where the predicted step time is at most the present one x (1 + maxSlowdown)."""


class Checkpoint(ApiModel):
    """Where and how often the state is saved; the template mounts the volume."""

    path: Annotated[str, Field(min_length=2, max_length=4096, pattern=r"^/.+$")] = Field(
        json_schema_extra=schema(immutable("path", "the job resumes from what it saved there"))
    )
    """Absolute directory that all ranks share, as the pods see it."""
    every_steps: Annotated[int, Field(ge=1, le=2**31 - 1)] = 100
    """Steps between two checkpoints; there is one more at each stop."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Complete checkpoints kept; older ones are removed."""


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
    )
    REFUSED = (
        Refused("entity", "string", "this version has no policy that shares by team. To fix: use weight"),
        Refused("deadline", "string", "this version has no policy that heeds deadlines. To fix: use weight"),
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


TRAINER_FIELDS = ("totalSteps", "model", "pipeline", "dynamics", "rebalance", "repack", "checkpoint")
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
        return {name: spec[name] for name in TRAINER_FIELDS}
