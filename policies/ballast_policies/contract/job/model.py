"""A job's model and data."""

from typing import Annotated

from pydantic import Field

from ballast_policies.contract.conditions import Rule, absent, at
from ballast_policies.contract.model import Arguments, Form, Settings

CALLABLE = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*"
"""``module:callable``, which the trainer imports."""


def callable_name(example: str) -> Form:
    """The form of a field that names a callable of the trainer's image."""
    return Form(rf"^{CALLABLE}$", f"module:callable. To fix: e.g. {example}")


FAMILIES = {"autoencoder": "autoencoder", "gpt": "transformer", "recurrent": "recurrent"}
"""Family of each registered model: which dynamic cases can change it."""


class ModelConfig(Settings):
    """The model that the trainer builds."""

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


class ColumnsConfig(Settings):
    """Columns of the inputs and targets in data that are rows by name."""

    inputs: str = Field(min_length=1, max_length=253)
    """Column of the inputs, e.g. ``input_ids``."""
    targets: str = Field(min_length=1, max_length=253)
    """Column of the targets, e.g. ``labels``."""


class DataConfig(Settings):
    """The training data, where it is not the model's own."""

    RULES = (
        Rule(
            condition=absent("collate") | absent("pad_to_multiple_of"),
            field="pad_to_multiple_of",
            reason="collate makes the batches, and pads them",
            fix="leave one of the two out",
        ),
        Rule(
            condition=absent("collate") | (at("packing") == False),  # noqa: E712
            field="packing",
            reason="collate makes the batches, and packs them",
            fix="leave one of the two out",
        ),
    )

    name: Annotated[str, Field(max_length=253), callable_name("my_model:Data")]
    """``module:callable`` of the trainer's image; it returns a dataset, an iterable dataset, a loader or a
    batch function."""
    args: Arguments = Field(default_factory=dict)
    """Passed to the callable."""
    columns: ColumnsConfig | None = None
    """Inputs and targets in samples or batches that are dicts, as of Hugging Face datasets. Absent: they are
    pairs."""
    collate: Annotated[str, Field(max_length=253), callable_name("my_model:collate")] | None = None
    """``module:callable`` that makes a batch of a list of samples. Absent: they are stacked."""
    pad_to_multiple_of: int | None = Field(None, ge=1, le=2**31 - 1)
    """Pads the samples of a batch to its longest, rounded up to a multiple of this: inputs by 0, targets by
    -100. Absent: all samples have one length."""
    packing: bool = False
    """Puts a batch's samples one after the other into a row a microbatch, about equally long: positions begin
    anew with each sample, and attention stays within it. Rows are padded to the longest, or
    ``padToMultipleOf``."""
    shift_labels: bool = False
    """The targets are the inputs' own tokens, as transformers takes ``labels``: each place gets the one that
    follows, the last of a sample -100. Absent: they are next tokens already."""
