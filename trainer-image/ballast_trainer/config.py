"""What a training job is, as the trainer reads it: ``config.json`` of the plan, or the file given to ``run``.

Keys are camelCase, as in ``TrainingJob.spec``.  Unknown keys are refused, a null means the default.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from ballast_trainer.config_reading import one_of, read_fields, require
from ballast_trainer.config_reshaping import RebalanceConfig, RepackConfig
from ballast_trainer.errors import ConfigurationError

DECAYS = ("constant", "cosine", "linear")
PRECISIONS = ("bf16", "fp16", "fp32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What to train."""

    name: str
    """A registered name (``gpt``, ``recurrent``) or ``module:callable``."""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Passed to the model's builder."""
    layers: int | None = None
    """Layers that the pipeline is cut from; None: what the builder makes of ``args``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """How a step's batch goes through the stages."""

    min_stages: int = 1
    max_stages: int | None = None
    microbatches: int = 8
    global_batch_size: int = 16
    """Sequences per optimizer step; a multiple of ``microbatches``."""
    schedule: str = "1F1B"
    stages_per_rank: int | None = None
    """With LoopedBFS and the interleaved schedules; None: 2, or as many as the schedule has."""
    replicas: tuple[int, ...] = ()
    """By stage, how many ranks hold it; microbatch k goes to replica k mod r. Empty: one each."""

    def __post_init__(self) -> None:
        for count in self.replicas:
            require(count >= 1, "pipeline.replicas", f"{count} in {list(self.replicas)} is below 1")
        if self.stages_per_rank is not None:
            require(self.stages_per_rank >= 1, "pipeline.stagesPerRank", f"{self.stages_per_rank} is below 1")
        require(self.min_stages >= 1, "pipeline.minStages", f"{self.min_stages} is below 1")
        if self.max_stages is not None and self.max_stages < self.min_stages:
            raise ConfigurationError(
                "pipeline.maxStages", f"{self.max_stages} is below minStages {self.min_stages}"
            )
        require(self.microbatches >= 1, "pipeline.microbatches", f"{self.microbatches} is below 1")
        if self.global_batch_size < 1 or self.global_batch_size % self.microbatches:
            raise ConfigurationError(
                "pipeline.globalBatchSize",
                f"{self.global_batch_size} is not a multiple of {self.microbatches} microbatches. "
                f"To fix: {max(1, round(self.global_batch_size / self.microbatches)) * self.microbatches}",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StragglersConfig:
    """What a tensor group does about ranks that are late."""

    policy: str = "none"
    """``none``; ``resize``: a late rank leaves out columns (some accuracy is lost); ``migrate``: others
    compute its columns (nothing is lost); ``semi``: the cheaper split of both."""
    selection: str = "priority"
    """Which columns are left out: ``priority``, those whose weights change least, or ``random`` ones."""
    differentiated: bool = False
    """Leave out more in layers that change little, and less in the others."""
    imputation: str = "zero"
    """What stands for a gradient that is not computed: ``zero``, ``average`` or ``same`` as last time."""
    epoch_steps: int = 20
    """Steps after which columns are chosen anew."""
    tolerance: float = 0.05
    """A rank is late where it is slower than the fastest by more than this fraction."""

    def __post_init__(self) -> None:
        where = "parallelism.stragglers"
        one_of(f"{where}.policy", self.policy, ("none", "resize", "migrate", "semi"))
        one_of(f"{where}.selection", self.selection, ("priority", "random"))
        one_of(f"{where}.imputation", self.imputation, ("zero", "average", "same"))
        require(self.epoch_steps >= 1, f"{where}.epochSteps", f"{self.epoch_steps} is below 1")
        require(self.tolerance >= 0, f"{where}.tolerance", f"{self.tolerance} is below 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismConfig:
    """How many ranks work at each position of the pipeline."""

    tensor: int = 1
    """Ranks that share the matrices of each layer."""
    data: int = 1
    """Replicas of the pipeline; each takes its share of the microbatches."""
    scatter_gather: bool = True
    """Each tensor rank sends its part of the activations between stages, which the receivers put together."""
    stragglers: StragglersConfig = dataclasses.field(default_factory=StragglersConfig)

    def __post_init__(self) -> None:
        require(self.tensor >= 1, "parallelism.tensor", f"{self.tensor} is below 1")
        require(self.data >= 1, "parallelism.data", f"{self.data} is below 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicConfig:
    """One kind of change while training."""

    kind: str
    start_step: int = 0
    end_step: int
    every_steps: int = 1
    target: float
    """What is reached at ``endStep``: final sparsity, fraction of layers frozen, ... in [0, 1]."""

    def __post_init__(self) -> None:
        where = f"dynamics[{self.kind}]"
        require(self.start_step >= 0, f"{where}.startStep", f"{self.start_step} is below 0")
        require(
            self.end_step >= self.start_step,
            f"{where}.endStep",
            f"{self.end_step} is before startStep {self.start_step}",
        )
        require(self.every_steps >= 1, f"{where}.everySteps", f"{self.every_steps} is below 1")
        require(0 <= self.target <= 1, f"{where}.target", f"{self.target} is outside [0, 1]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where and how often the state is saved."""

    path: str | None = None
    """A directory that all ranks share; None: no checkpoints."""
    every_steps: int = 100
    keep: int = 2
    """Complete checkpoints kept; older ones are removed."""

    def __post_init__(self) -> None:
        require(self.every_steps >= 1, "checkpoint.everySteps", f"{self.every_steps} is below 1")
        require(self.keep >= 1, "checkpoint.keep", f"{self.keep} is below 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How the weights are learnt."""

    seed: int = 0
    """Initial weights, data order and dropout follow from it."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 0
    """Steps of linear warm-up of the learning rate."""
    decay: str = "constant"
    """How the learning rate goes on after the warm-up: ``constant``, ``linear`` or ``cosine``."""
    decay_steps: int | None = None
    """The step at which the decay ends; None: ``totalSteps``."""
    decay_to: float = 0.0
    """Fraction of ``learningRate`` that is left where the decay ends."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None: no clipping."""
    optimizer: str = "adamw"
    """``adamw``, ``sgd``, or ``module:callable`` that is given parameters and a learning rate."""
    precision: str = "fp32"
    """``fp32``; ``bf16`` or ``fp16``: autocast, the weights themselves stay fp32."""
    recompute: bool = False
    """Keep only each layer's input, and run its forward again in the backward."""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.learning_rate) and self.learning_rate >= 0,
            "training.learningRate",
            f"{self.learning_rate} is not a rate",
        )
        require(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0,
            "training.weightDecay",
            f"{self.weight_decay} is not a weight decay. To fix: 0 or more",
        )
        if self.clip_norm is not None:
            require(self.clip_norm > 0, "training.clipNorm", f"{self.clip_norm} is not above 0")
        require(self.warmup_steps >= 0, "training.warmupSteps", f"{self.warmup_steps} is below 0")
        one_of("training.decay", self.decay, DECAYS)
        if self.decay_steps is not None:
            require(
                self.decay_steps > self.warmup_steps,
                "training.decaySteps",
                f"{self.decay_steps} is not above warmupSteps {self.warmup_steps}",
            )
        require(0 <= self.decay_to <= 1, "training.decayTo", f"{self.decay_to} is outside [0, 1]")
        one_of("training.precision", self.precision, PRECISIONS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What to learn from, where it is not the model's own data."""

    name: str
    """``module:callable`` that returns a batch function, a dataset or a loader (see ``data.sources``)."""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Passed to the callable."""

    def __post_init__(self) -> None:
        require(
            ":" in self.name, "data.name", f"{self.name!r} is not module:callable. To fix: e.g. my_model:Data"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where figures go besides standard output; rank 0 writes them."""

    port: int | None = None
    """Serve Prometheus metrics here; None: not at all."""
    json_lines: str | None = None
    """A file that every step and event is appended to."""
    tensorboard: str | None = None
    """A directory for TensorBoard; needs the package ``tensorboard``."""
    writer: str | None = None
    """``module:callable`` that returns a writer of your own (see ``reporting.writers``)."""

    def __post_init__(self) -> None:
        if self.port is not None:
            require(1 <= self.port <= 65535, "metrics.port", f"{self.port} is not a port")
        if self.writer is not None:
            require(":" in self.writer, "metrics.writer", f"{self.writer!r} is not module:callable")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The whole of it."""

    total_steps: int
    model: ModelConfig
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    parallelism: ParallelismConfig = dataclasses.field(default_factory=ParallelismConfig)
    dynamics: tuple[DynamicConfig, ...] = ()
    rebalance: RebalanceConfig = dataclasses.field(default_factory=RebalanceConfig)
    repack: RepackConfig = dataclasses.field(default_factory=RepackConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    data: DataConfig | None = None
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        require(self.total_steps >= 1, "totalSteps", f"{self.total_steps} is below 1")
        microbatches, data = self.pipeline.microbatches, self.parallelism.data
        require(
            microbatches % data == 0,
            "parallelism.data",
            f"{microbatches} microbatches are no multiple of {data} replicas. "
            f"To fix: pipeline.microbatches: {max(1, round(microbatches / data)) * data}",
        )
        if self.rebalance.balancer == "network":
            schedule, replicas = self.pipeline.schedule, self.pipeline.replicas
            held = f"{schedule} with replicas" if replicas else schedule
            require(
                schedule == "1F1B" and all(count == 1 for count in replicas),
                "rebalance.balancer",
                f"'network' knows the period of 1F1B with one stage a rank, not of {held}. "
                "To fix: pipeline.schedule: 1F1B without replicas, or balancer: exact",
            )
        if self.rebalance.balancer == "deepspeed":
            require(
                self.rebalance.memory_bytes is None and all(count == 1 for count in self.pipeline.replicas),
                "rebalance.balancer",
                "'deepspeed' knows neither rebalance.memoryBytes nor pipeline.replicas. To fix: leave these "
                "out, or balancer: exact",
            )
        kinds = [dynamic.kind for dynamic in self.dynamics]
        for kind in kinds:
            require(kinds.count(kind) == 1, "dynamics", f"{kind!r} is given twice")
        if self.training.decay != "constant" and self.training.decay_steps is None:
            warm = self.training.warmup_steps
            require(
                warm < self.total_steps,
                "training.warmupSteps",
                f"{warm} leaves none of {self.total_steps} steps to {self.training.decay} decay",
            )

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> Self:
        """Read a configuration.

        Raises:
            ConfigurationError: a field is missing, unknown, of the wrong type or out of range.
        """
        read: Self = read_fields(cls, value, "")
        return read
