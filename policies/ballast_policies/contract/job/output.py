"""What a job writes while it trains: checkpoints and metrics."""

import dataclasses

from ballast_policies.contract.job.model import CALLABLE
from ballast_policies.contract.settings import Settings, setting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Settings):
    """Where and how often the state is saved."""

    path: str | None = setting(
        None,
        min_length=1,
        max_length=4096,
        immutable="the job resumes from what it saved there",
        required_with="model",
        cluster_pattern=r"^/.+$",
        cluster_form="an absolute path. To fix: e.g. /checkpoints",
    )
    """Directory that all ranks share; in a cluster it is absolute, as the pods see it, and the template
    mounts the volume. Required with ``model``; without one, the client library saves there."""
    every_steps: int = setting(100, ge=1, le=2**31 - 1)
    """Steps between two checkpoints; there is one more at each stop."""
    keep: int = setting(2, ge=1, le=1000)
    """Complete checkpoints that are kept; older ones are removed."""
    start_over: bool = False
    """Whether to start from step 0 where there are checkpoints and none of them can be used; they are set
    aside. Else the job does not start."""
    retry_seconds: float = setting(60.0, ge=0, le=86_400)
    """How long to try again what storage refuses, when the job resumes and when it saves its last step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig(Settings):
    """Where rank 0 writes its figures, besides standard output."""

    port: int | None = setting(None, ge=1, le=65_535)
    """Port that serves Prometheus metrics. Absent: none."""
    json_lines: str | None = setting(None, min_length=1, max_length=4096)
    """File that every step and event is appended to."""
    tensorboard: str | None = setting(None, min_length=1, max_length=4096)
    """Directory for TensorBoard; needs the package ``tensorboard`` in the trainer's image."""
    writer: str | None = setting(
        None, max_length=253, pattern=rf"^{CALLABLE}$", form="module:callable. To fix: e.g. my_metrics:Writer"
    )
    """``module:callable`` of the trainer's image that returns a writer of your own."""
