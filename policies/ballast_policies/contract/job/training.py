"""Optimizer and learning rate, and the validation on data that is not trained on."""

import enum
from typing import Annotated

from pydantic import Field

from ballast_policies.contract.conditions import Rule, absent, at, given
from ballast_policies.contract.job.model import CALLABLE, DataConfig, callable_name
from ballast_policies.contract.model import Form, Settings

DEFAULT_CLIP_NORM = 1.0


class Decay(enum.StrEnum):
    """Course of the learning rate after the warm-up."""

    CONSTANT = "constant"
    """Unchanged."""
    LINEAR = "linear"
    """A straight line down."""
    COSINE = "cosine"
    """Half a cosine down."""


class WeightType(enum.StrEnum):
    """The type of weights and gradients."""

    FP32 = "fp32"
    BF16 = "bf16"


class Precision(enum.StrEnum):
    """Precision in which layers compute."""

    FP32 = "fp32"
    """Single precision."""
    BF16 = "bf16"
    """bfloat16, by autocast."""
    FP16 = "fp16"
    """Half precision with a scaled loss; on GPUs only."""


class TrainingConfig(Settings):
    """Optimizer, batch, learning rate and precision of the training."""

    RULES = (
        Rule(
            condition=at("warmup_steps") < at("decay_steps"),
            field="decay_steps",
            reason="decaySteps is not above warmupSteps: no step is left for the decay",
            fix="raise decaySteps",
        ),
        Rule(
            condition=(at("decay") != Decay.CONSTANT) | (absent("decay_steps") & (at("decay_to") == 0.0)),
            field="decay",
            reason="decay is constant: decaySteps and decayTo have no effect",
            fix="decay: linear or cosine, or leave them out",
        ),
        Rule(
            condition=absent("rate_factor")
            | ((at("warmup_steps") == 0) & (at("decay") == Decay.CONSTANT) & absent("decay_steps")),
            field="rate_factor",
            reason="rateFactor takes the place of warmupSteps, decay and decaySteps",
            fix="leave these out, or rateFactor",
        ),
        Rule(
            condition=(at("dtype") == WeightType.FP32) | (at("precision") == Precision.BF16),
            field="dtype",
            reason="layers whose weights are bf16 compute in it",
            fix="precision: bf16, or leave dtype out",
        ),
        Rule(
            condition=(at("dtype") == WeightType.BF16) | (at("master_weights") == True),  # noqa: E712 - a comparison as a value
            field="master_weights",
            reason="weights of fp32 have no masters that could be left out",
            fix="dtype: bf16, or leave masterWeights out",
        ),
        Rule(
            condition=absent("compile_timeout_seconds") | (at("compile") == True),  # noqa: E712 - a comparison as a value
            field="compile_timeout_seconds",
            reason="without compile no layer is compiled",
            fix="compile: true, or leave compileTimeoutSeconds out",
        ),
        Rule(
            condition=(at("recompute_every") == 1) | (at("recompute") == True),  # noqa: E712 - a comparison as a value
            field="recompute_every",
            reason="without recompute no layer repeats its forward",
            fix="recompute: true, or leave recomputeEvery out",
        ),
    )

    seed: int = Field(0, ge=0, le=2**53)
    """Determines initial weights, order of the data and dropout."""
    learning_rate: float = Field(1e-3, ge=0, le=1000)
    """Learning rate after the warm-up."""
    weight_decay: float = Field(0.01, ge=0, le=1000)
    """Weight decay of the optimizer."""
    warmup_steps: int = Field(0, ge=0, le=2**53)
    """Steps of linear warm-up of the learning rate."""
    decay: Decay = Decay.CONSTANT
    """Course of the learning rate after the warm-up."""
    decay_steps: int | None = Field(None, ge=1, le=2**53)
    """The step at which the decay ends. Absent: ``totalSteps``."""
    decay_to: float = Field(0.0, ge=0, le=1)
    """Fraction of ``learningRate`` that is left where the decay ends."""
    rate_factor: Annotated[str, Field(max_length=253), callable_name("my_rates:factor")] | None = None
    """A learning rate schedule of your own, ``module:callable`` of the trainer's image: called with the step,
    from 0, and ``totalSteps``, it returns the factor on ``learningRate``. It depends on these two alone."""
    clip_norm: float | None = Field(None, ge=0, le=1e9)
    """Largest norm of the gradient over all stages; a larger one is scaled down. 0: no clipping. Absent: 1.0,
    or no clipping where the schedule has no flush."""
    optimizer: Annotated[
        str,
        Field(max_length=253),
        Form(
            rf"^(adamw|sgd|{CALLABLE})$",
            "adamw, sgd or module:callable. To fix: e.g. my_optimizers:lion",
        ),
    ] = "adamw"
    """``adamw``, ``sgd``, or ``module:callable`` of the trainer's image, called with the parameters and the
    learning rate."""
    precision: Precision = Precision.FP32
    """Precision in which layers compute: ``fp32``; ``bf16`` or ``fp16`` by autocast."""
    dtype: WeightType = WeightType.FP32
    """Type of weights and gradients: ``fp32`` or ``bf16``, in which all but batch norms is then held, sent
    and exported."""
    master_weights: bool = True
    """fp32 copies of the weights with ``dtype: bf16``, which the optimizer updates, its state fp32, too.
    Without them its state is bf16: half the memory, and updates below 1/256 of a weight are lost."""
    recompute: bool = False
    """Only each layer's input is kept and its forward runs again in the backward: less memory, more time."""
    recompute_every: int = Field(1, ge=1, le=1024)
    """Layers that ``recompute`` repeats: 4 is the fourth, the eighth, ...; the others keep everything."""
    dataloader_num_workers: int = Field(0, ge=0, le=64)
    """Processes on each rank that read the batches of the next steps while it trains. 0: read in the step.
    Not for a loader, which has workers of its own."""
    deterministic: bool = False
    """Torch may use deterministic kernels only; a layer that has none ends the job. Slower."""
    skip_bad_samples: int = Field(0, ge=0, le=1_000_000)
    """Number of samples of a dataset that are replaced by others since they cannot be read or collated; of an
    iterable or a loader, whose whole batch is left out, how many batches. One more ends the job."""
    group_by_length: bool = False
    """A step's samples are of about one length, as in transformers; with a dataset that has a column
    ``length``, or an attribute ``lengths``."""
    compile: bool = False
    """Each layer is compiled (``torch.compile``, with the random numbers of one that is not), again on a rank
    that it moves to. The trainer's image needs a C++ compiler."""
    comm_timeout_seconds: float = Field(600.0, ge=1, le=86400)
    """Seconds that ranks wait for one that lives but is busy, e.g. in a layer. Dead and hung ranks are
    noticed in seconds."""
    compile_timeout_seconds: float | None = Field(None, ge=1, le=86400)
    """The same for one that compiles. Absent: ``commTimeoutSeconds``."""

    @property
    def repeated(self) -> int:
        """Number of layers of which the last repeats its forward; 0: none does."""
        return self.recompute_every if self.recompute else 0

    @property
    def has_masters(self) -> bool:
        """True if the optimizer updates copies of the weights."""
        return self.dtype is WeightType.BF16 and self.master_weights

    @property
    def norm_limit(self) -> float | None:
        """The largest norm of the gradient; None: no clipping."""
        if self.clip_norm is None:
            return DEFAULT_CLIP_NORM
        return self.clip_norm or None


EVALUATION_RULES = (
    Rule(
        condition=absent("evaluation") | absent("data") | given("evaluation.data"),
        field="evaluation.data",
        reason="missing, where the training data is not the model's own",
        fix="name the validation data",
    ),
    Rule(
        condition=absent("evaluation") | given("evaluation.data") | given("evaluation.batches"),
        field="evaluation.batches",
        reason="missing: the model's own data has no end",
        fix="give batches, each of pipeline.globalBatchSize samples, or evaluation.data",
    ),
)
"""Rules on the whole configuration."""


class EvaluationConfig(Settings):
    """Frequency and data of the measurement of the validation loss."""

    every_steps: int = Field(100, ge=1, le=2**31 - 1)
    """Steps between two evaluations; there is one more after the last step."""
    batches: int | None = Field(None, ge=1, le=2**31 - 1)
    """Batches of ``pipeline.globalBatchSize`` samples, the same in every evaluation. Absent: all whole
    batches of a dataset or loader that has a length."""
    timeout_seconds: float | None = Field(None, ge=1, le=86400)
    """Seconds that ranks wait for one that is busy with a layer, a batch or a score of it. Absent:
    ``training.commTimeoutSeconds``."""
    data: DataConfig | None = None
    """The validation data, read in its own order. Absent: the model's own data, drawn by another seed."""
