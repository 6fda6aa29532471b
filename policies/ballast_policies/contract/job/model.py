"""What a job trains, and on which data."""

from typing import Annotated

from pydantic import Field

from ballast_policies.contract.model import Arguments, Form, Settings

CALLABLE = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*"
"""``module:callable``, which the trainer imports."""


def callable_name(example: str) -> Form:
    """The form of a field that names a callable of the trainer's image."""
    return Form(rf"^{CALLABLE}$", f"module:callable. To fix: e.g. {example}")


FAMILIES = {"autoencoder": "autoencoder", "gpt": "transformer", "recurrent": "recurrent"}
"""Family of each registered model: which dynamic cases can change it."""


class ModelConfig(Settings):
    """What the trainer builds."""

    name: Annotated[
        str,
        Field(max_length=253),
        Form(
            rf"^([a-z][a-z0-9-]*|{CALLABLE})$",
            "the name of a model (gpt, recurrent) or module:callable. To fix: e.g. my_model:build",
        ),
    ]
    """A registered model (``gpt``, ``recurrent``), or ``module:callable`` of the trainer's image."""
    args: Arguments = Field(default_factory=dict)
    """Passed to the model's builder."""
    layers: int | None = Field(None, ge=1, le=100_000)
    """Number of layers that the pipeline partitions. If set, the operator refuses more stages than layers.
    Absent: as many as the builder makes of ``args``."""


class DataConfig(Settings):
    """The training data, where it is not the model's own."""

    name: Annotated[str, Field(max_length=253), callable_name("my_model:Data")]
    """``module:callable`` of the trainer's image; it returns a batch function, a dataset or a loader."""
    args: Arguments = Field(default_factory=dict)
    """Passed to the callable."""
