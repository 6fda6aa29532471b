"""The part of a TrainingJob that the trainer acts on: it gets these fields, verbatim, as ``config.json``."""

import enum
from typing import Annotated, Any

from ballast_policies.planning.schedules import DEFAULT_SCHEDULE, SCHEDULES, trained_schedules
from ballast_policies.registry import RegistryError
from pydantic import Field, field_validator

from ballast_operator.api.base import ApiModel, Rule, Step, cel_list, immutable, registered, schema

_Steps = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _stages_rule() -> Rule:
    """``stagesPerRank`` is left out, or what the schedule has."""
    fixed: dict[int, list[str]] = {}
    for name in trained_schedules():
        count = SCHEDULES[name].stages_per_rank
        if count is not None:
            fixed.setdefault(count, []).append(name)
    free = [name for name in trained_schedules() if SCHEDULES[name].stages_per_rank is None]
    allowed = " && ".join(
        f"(!(self.schedule in {cel_list(names)}) || self.stagesPerRank == {count})"
        for count, names in sorted(fixed.items())
    )
    counts = "; ".join(f"{', '.join(names)}: {count}" for count, names in sorted(fixed.items()))
    return Rule(
        f"!has(self.stagesPerRank) || ({allowed})",
        f"this schedule's stages a rank are fixed ({counts}). "
        f"To fix: leave stagesPerRank out, or take one of {', '.join(free)}",
        field=".stagesPerRank",
        holds=lambda pipeline: (
            pipeline.stages_per_rank is None
            or SCHEDULES[pipeline.schedule].stages_per_rank in (None, pipeline.stages_per_rank)
        ),
    )


class DynamicKind(enum.StrEnum):
    """Kinds of change while training that the trainer carries out."""

    PRUNING = "pruning"
    """Gradual global magnitude pruning; ``target`` is the final sparsity."""
    FREEZING = "freezing"
    """Layers stop learning from the front; ``target`` is the fraction frozen at the end."""
    SPARSE_ATTENTION = "sparseAttention"
    """Deeper blocks attend to fewer key blocks; ``target`` is the fraction that the last layer leaves out."""
    EARLY_EXIT = "earlyExit"
    """Settled positions skip the layers that follow; ``target`` is the fraction out before the last layer."""
    MIXTURE_OF_DEPTHS = "mixtureOfDepths"
    """Every other block computes its router's picks only; ``target`` is the fraction that passes it by."""
    MIXTURE_OF_EXPERTS = "mixtureOfExperts"
    """Every other block has experts; ``target`` is how far their capacity tightens towards the mean."""


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
        registered("schedule", SCHEDULES, trained_schedules()),
        _stages_rule(),
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
    schedule: Annotated[str, Field(max_length=253)] = DEFAULT_SCHEDULE
    """Order of the microbatches: a name under [Schedules](#schedules), or ``prefix.name`` of a distribution
    that is installed in the operator's and the trainer's image."""
    stages_per_rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """With LoopedBFS and the interleaved schedules: parts of the model on each pod, which take turns.
    Absent: 2, or as many as the schedule has. ``minStages`` and ``maxStages`` go on counting pods."""

    @field_validator("schedule")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            kind = SCHEDULES.find(value)
        except RegistryError as error:
            raise ValueError(str(error)) from error
        if not kind.trained:
            raise ValueError(f"{value} is planned and simulated only: the trainer does not carry it out")
        return value

    @property
    def parts_per_rank(self) -> int:
        """How many stages of the model a rank of a gang holds; one that trains alone has the whole model."""
        return SCHEDULES[self.schedule].stages_on_a_rank(self.stages_per_rank)


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
    every_steps: _Steps = 1
    """Steps between two changes."""
    target: Annotated[float, Field(ge=0, le=1)]
    """What is reached at ``endStep``, 0 to 1: final sparsity, or the fraction of layers frozen."""


class Checkpoint(ApiModel):
    """Where and how often the state is saved; the template mounts the volume."""

    path: Annotated[str, Field(min_length=2, max_length=4096, pattern=r"^/.+$")] = Field(
        json_schema_extra=schema(immutable("path", "the job resumes from what it saved there"))
    )
    """Absolute directory that all ranks share, as the pods see it."""
    every_steps: _Steps = 100
    """Steps between two checkpoints; there is one more at each stop."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Complete checkpoints kept; older ones are removed."""


class Decay(enum.StrEnum):
    """How the learning rate goes on after the warm-up."""

    CONSTANT = "constant"
    """It stays."""
    LINEAR = "linear"
    """A straight line down."""
    COSINE = "cosine"
    """Half a cosine down."""


class Precision(enum.StrEnum):
    """What layers compute in; weights and optimizer state stay fp32."""

    FP32 = "fp32"
    """Single precision."""
    BF16 = "bf16"
    """bfloat16, by autocast."""
    FP16 = "fp16"
    """Half precision with a scaled loss; on GPUs alone."""


_CALLABLE = Field(max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$")


class Data(ApiModel):
    """What to learn from, where it is not the model's own data."""

    name: Annotated[str, _CALLABLE]
    """``module:callable`` of the trainer's image; it returns a batch function, a dataset or a loader."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the callable."""


class Training(ApiModel):
    """How the weights are learnt."""

    RULES = (
        Rule(
            "!has(self.decaySteps) || self.decaySteps > self.warmupSteps",
            "decaySteps is not above warmupSteps: nothing is left to the decay. To fix: raise decaySteps",
            field=".decaySteps",
            holds=lambda training: (
                training.decay_steps is None or training.decay_steps > training.warmup_steps
            ),
        ),
    )

    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Initial weights, data order and dropout follow from it."""
    learning_rate: Annotated[float, Field(ge=0, le=1000)] = 1e-3
    """Learning rate after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.01
    """Weight decay of the optimizer."""
    warmup_steps: Step = 0
    """Steps of linear warm-up of the learning rate."""
    clip_norm: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Largest norm of the gradient over all stages; a larger one is scaled down. Absent: 1.0, or no clipping
    where the schedule has no flush."""
    optimizer: Annotated[
        str,
        Field(max_length=253, pattern=r"^(adamw|sgd|[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*)$"),
    ] = "adamw"
    """``adamw``, ``sgd``, or ``module:callable`` of the trainer's image."""
    decay: Decay = Decay.CONSTANT
    """How the learning rate goes on after the warm-up."""
    decay_steps: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """The step at which the decay ends. Absent: ``totalSteps``."""
    decay_to: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of ``learningRate`` that is left where the decay ends."""
    precision: Precision = Precision.FP32
    """What layers compute in."""
    recompute: bool = False
    """Keep only each layer's input, and run its forward again in the backward: less memory, more time."""
