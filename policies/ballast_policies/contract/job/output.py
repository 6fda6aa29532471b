"""Output of a job while it trains, and at its end: checkpoints, metrics, the whole model."""

import enum
from typing import Annotated

from pydantic import Field

from ballast_policies.contract.conditions import Rule, absent, at, given
from ballast_policies.contract.job.model import callable_name
from ballast_policies.contract.model import Arguments, Form, InCluster, Settings

DEFAULT_CHECKPOINT_STEPS = 100
"""Steps between two checkpoints where none are stated and nothing is known."""


class AsyncMode(enum.StrEnum):
    """Mode of writing a checkpoint, beside the steps or between them."""

    ASYNC = "async"
    DISABLED = "disabled"


class CheckpointConfig(Settings):
    """Place and frequency of checkpoints."""

    path: Annotated[
        str | None,
        Field(min_length=1, max_length=4096),
        InCluster(
            required_with="model",
            immutable="the job resumes from what it saved there",
            form=Form(r"^/.+$", "an absolute path. To fix: e.g. /checkpoints"),
        ),
    ] = None
    """Directory that all ranks share; in a cluster it is absolute, as the pods see it, and the template
    mounts the volume. Required with ``model``; without one, the client library saves there."""
    every_steps: int | None = Field(None, ge=1, le=2**31 - 1)
    """Steps between two checkpoints; there is one more at each stop. Absent: on spot machines by how often
    they are taken away and how long a checkpoint takes, as measured; else 100, as for scripts and for
    schedules without a flush."""
    keep: int = Field(2, ge=1, le=1000)
    """Complete checkpoints that are kept; older ones are removed."""
    start_over: bool = False
    """Start from step 0 where there are checkpoints and none of them can be used; they are set aside. Else
    the job does not start."""
    retry_seconds: float = Field(60.0, ge=0, le=86_400)
    """Seconds to try again what storage refuses, when the job resumes and when it saves its last step."""
    async_mode: AsyncMode = AsyncMode.ASYNC
    """``async``: steps go on while a copy of the state is written, which takes as much again of the host's
    memory; ``disabled``: they wait. Where a job stops or changes its ranks it waits in any case."""
    in_memory_every_steps: int = Field(0, ge=0, le=2**31 - 1)
    """Steps between two copies of each rank's state in the memory of the next one; 0: none. With them the
    ranks that are left after a loss keep their processes and go on from the newest copy. In a TrainingJob a
    killed rank starts again in its pod; a gang that may be smaller goes on without a lost pod. Refused under
    torchrun, on NCCL."""

    @property
    def steps(self) -> int:
        """Steps between two checkpoints, without what is measured."""
        return self.every_steps or DEFAULT_CHECKPOINT_STEPS


class WandbConfig(Settings):
    """A run of Weights & Biases, which reads its key from the environment."""

    project: str = Field(min_length=1, max_length=253)
    """Its project."""
    entity: str | None = Field(None, min_length=1, max_length=253)
    """The user or team that it belongs to. Absent: the key's own."""
    name: (
        Annotated[
            str,
            Field(max_length=128),
            Form(r"^[^/\\#?%:]+$", "a name without / \\ # ? % :. To fix: e.g. first-run"),
        ]
        | None
    ) = None
    """Name of the run, which a job that starts again continues. Absent: a new run each launch."""


class MlflowConfig(Settings):
    """A run of MLflow."""

    tracking_uri: str | None = Field(None, min_length=1, max_length=4096)
    """Its server or folder. Absent: ``MLFLOW_TRACKING_URI``."""
    experiment: str = Field(min_length=1, max_length=253)
    """Its experiment, made where there is none."""
    name: (
        Annotated[
            str, Field(max_length=253), Form(r"^[^'\"`]+$", "a name without quotes. To fix: e.g. first-run")
        ]
        | None
    ) = None
    """Name of the run; a job that starts again continues the newest run of that name. Absent: a new run
    each launch."""


class ProfilingConfig(Settings):
    """Traces of torch's profiler, and memory snapshots."""

    path: str = Field(min_length=1, max_length=4096)
    """Folder that the chosen ranks write to, a file each: for chrome://tracing, Perfetto, TensorBoard."""
    first_step: int = Field(10, ge=1, le=2**53)
    """The first step of the trace."""
    steps: int = Field(2, ge=1, le=100)
    """Number of steps in a row. Without a flush the trace lasts until the pipeline is drained."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0, le=65_535)], ...], Field(max_length=256)] = ()
    """The ranks that are traced. Absent: all."""
    memory_snapshot: bool = False
    """Ranks on GPUs record allocations, and write a snapshot when memory runs out (pytorch.org/memory_viz).
    """


class MetricsConfig(Settings):
    """Outputs of rank 0's metrics, besides standard output."""

    port: int | None = Field(None, ge=1, le=65_535)
    """Port that serves Prometheus metrics. Absent: none."""
    json_lines: str | None = Field(None, min_length=1, max_length=4096)
    """File that every step and event is appended to."""
    tensorboard: str | None = Field(None, min_length=1, max_length=4096)
    """Directory for TensorBoard; needs the package ``tensorboard`` in the trainer's image."""
    writer: Annotated[str, Field(max_length=253), callable_name("my_metrics:Writer")] | None = None
    """``module:callable`` of the trainer's image that returns a writer of your own."""
    wandb: WandbConfig | None = None
    """A run of Weights & Biases; needs the package ``wandb`` in the trainer's image."""
    mlflow: MlflowConfig | None = None
    """A run of MLflow; needs the package ``mlflow`` in the trainer's image."""


class CallbackError(enum.StrEnum):
    """Reaction to an error of the callback."""

    END = "end"
    REPORT = "report"


class CallbackConfig(Settings):
    """A function of the trainer's image that is told what happens."""

    name: Annotated[str, Field(max_length=253), callable_name("my_callbacks:notify")]
    """``module:callable``, called as ``callable(event, step, values, **args)`` after each step (``step``),
    each evaluation (``evaluation``) and each checkpoint (``checkpoint``). It ends the job by raising
    ``StopTraining``."""
    args: Arguments = Field(default_factory=dict)
    """Passed to it with each call."""
    every_rank: bool = False
    """All ranks call it, else rank 0 alone."""
    on_error: CallbackError = CallbackError.END
    """Consequence of an error: ``end`` of the job, as by an error of a layer, or ``report``: a warning."""
    timeout_seconds: float | None = Field(None, ge=1, le=86400)
    """Seconds that other ranks wait for a call of it. Absent: ``training.commTimeoutSeconds``."""


class ExportFormat(enum.StrEnum):
    """Format of an exported whole model."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    HUGGING_FACE = "huggingFace"


class ExportConfig(Settings):
    """The whole model, written once after the last step."""

    path: Annotated[
        str,
        Field(min_length=1, max_length=4096),
        InCluster(form=Form(r"^/.+$", "an absolute path. To fix: e.g. /checkpoints/model.safetensors")),
    ]
    """File, or folder of ``huggingFace``, that rank 0 writes; it may lie in ``checkpoint.path``."""
    format: ExportFormat = ExportFormat.SAFETENSORS
    """``safetensors`` or ``torch``: one file of all parameters and buffers under the model's own names;
    ``huggingFace``: a folder that ``from_pretrained`` loads."""


EXPORT_RULES = (
    Rule(
        condition=absent("export") | given("checkpoint.path"),
        field="export",
        reason="the model is put together from the last checkpoint",
        fix="give checkpoint.path",
    ),
    Rule(
        condition=at("export.path") != at("checkpoint.path"),
        field="export.path",
        reason="the checkpoints are there",
        fix="a place in it, e.g. model.safetensors",
    ),
)
"""Rules on the whole configuration."""
