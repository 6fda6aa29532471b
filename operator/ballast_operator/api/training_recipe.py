"""The part of a TrainingJob that the trainer acts on: it gets these fields, verbatim, as ``config.json``."""

import enum
from typing import Annotated, Any

from ballast_policies.planning.schedules import TAKES_CHUNKS, stages_of
from pydantic import Field

from ballast_operator.api.base import ApiModel, Rule, Step, immutable, schema

_Steps = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Schedule(enum.StrEnum):
    """Orders of microbatches that the trainer runs."""

    GPIPE = "GPipe"
    """All forwards, then all backwards."""
    ONE_F_ONE_B = "1F1B"
    """Forwards and backwards take turns (PipeDream-Flush): fewer activations in memory."""
    LOOPED_BFS = "LoopedBFS"
    """Several stages a rank, all microbatches through one before the next."""
    INTERLEAVED_1F1B = "Interleaved1F1B"
    """1F1B with v stages a rank: the bubble divided by v, v times the messages."""
    ZERO_BUBBLE_H1 = "ZeroBubbleH1"
    """1F1B whose weight gradients wait and fill the bubble."""
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    """Both: several stages a rank, and weight gradients that fill the bubble."""
    ZERO_BUBBLE_V = "ZeroBubbleV"
    """Two stages a rank, the second on the way back, and weight gradients that fill the bubble."""
    PIPEDREAM = "PipeDream"
    """No flush: a stage learns after each microbatch, at weights that are some updates late."""
    PIPEDREAM_VERTICAL_SYNC = "PipeDreamVerticalSync"
    """The same, every stage as late as the first."""
    PIPEDREAM_2BW = "PipeDream2BW"
    """No flush: one update a step, on every stage one update late."""

    @property
    def flushes(self) -> bool:
        """Whether all stages learn at once, at the end of a step."""
        return not self.value.startswith("PipeDream")

    @property
    def fixed_stages_per_rank(self) -> int | None:
        """Stages a rank; None: as many as ``stagesPerRank`` says."""
        return None if self.value in TAKES_CHUNKS else stages_of(self.value, 1)


DEFAULT_STAGES_PER_RANK = 2
"""Where the schedule leaves it free and ``stagesPerRank`` is absent."""

_FREE = ", ".join(f"'{schedule.value}'" for schedule in Schedule if schedule.fixed_stages_per_rank is None)
_TWO = ", ".join(f"'{schedule.value}'" for schedule in Schedule if schedule.fixed_stages_per_rank == 2)


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
        Rule(
            f"!has(self.stagesPerRank) || self.schedule in [{_FREE}] || "
            f"self.stagesPerRank == (self.schedule in [{_TWO}] ? 2 : 1)",
            f"this schedule's stages a rank are fixed ({_TWO}: 2; others: 1). "
            f"To fix: leave stagesPerRank out, or take one of {_FREE}",
            field=".stagesPerRank",
            holds=lambda pipeline: (
                pipeline.stages_per_rank is None
                or pipeline.schedule.fixed_stages_per_rank in (None, pipeline.stages_per_rank)
            ),
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
    stages_per_rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """With LoopedBFS and the interleaved schedules: parts of the model on each pod, which take turns.
    Absent: 2, or as many as the schedule has. ``minStages`` and ``maxStages`` go on counting pods."""

    @property
    def parts_per_rank(self) -> int:
        """How many stages of the model a rank of a gang holds; one that trains alone has the whole model."""
        fixed = self.schedule.fixed_stages_per_rank
        return fixed or self.stages_per_rank or DEFAULT_STAGES_PER_RANK


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
