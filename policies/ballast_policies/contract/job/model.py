"""What a job trains, and on which data."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract.settings import Settings, setting

CALLABLE = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*"
"""``module:callable``, which the trainer imports."""

FAMILIES = {"autoencoder": "autoencoder", "gpt": "transformer", "recurrent": "recurrent"}
"""Family of each registered model: which dynamic cases can change it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Settings):
    """What the trainer builds."""

    name: str = setting(
        max_length=253,
        pattern=rf"^([a-z][a-z0-9-]*|{CALLABLE})$",
        form="the name of a model (gpt, recurrent) or module:callable. To fix: e.g. my_model:build",
    )
    """A registered model (``gpt``, ``recurrent``), or ``module:callable`` of the trainer's image."""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Passed to the model's builder."""
    layers: int | None = setting(None, ge=1, le=100_000)
    """Number of layers that the pipeline partitions. If set, the operator refuses more stages than layers.
    Absent: as many as the builder makes of ``args``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Settings):
    """The training data, where it is not the model's own."""

    name: str = setting(
        max_length=253, pattern=rf"^{CALLABLE}$", form="module:callable. To fix: e.g. my_model:Data"
    )
    """``module:callable`` of the trainer's image; it returns a batch function, a dataset or a loader."""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Passed to the callable."""
