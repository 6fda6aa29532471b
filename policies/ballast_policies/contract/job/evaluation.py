"""When a job measures its loss on data that it does not train on."""

from pydantic import Field

from ballast_policies.contract.conditions import absent, given
from ballast_policies.contract.job.model import DataConfig
from ballast_policies.contract.model import Settings
from ballast_policies.contract.rules import Rule

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
    """When the validation loss is measured, and on which data."""

    every_steps: int = Field(100, ge=1, le=2**31 - 1)
    """Steps between two evaluations; there is one more after the last step."""
    batches: int | None = Field(None, ge=1, le=2**31 - 1)
    """Batches of ``pipeline.globalBatchSize`` samples, the same in every evaluation. Absent: all whole
    batches of a dataset or loader that has a length."""
    data: DataConfig | None = None
    """The validation data, read in its own order. Absent: the model's own data, drawn by another seed."""
