"""Validation data: the same batches in every evaluation, in the data's own order.

The callable ``evaluation.data.name`` returns what ``data.name`` may return; a dataset is not shuffled.  Only
whole batches count.
"""

import dataclasses
import functools
from typing import Any

from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.training import EvaluationConfig

from ballast_trainer.data.collate import Batch, BatchFunction
from ballast_trainer.data.sources import (
    OrderedDataset,
    OrderedLoader,
    batches_from,
    incomplete_batch,
    is_dataset,
    is_loader,
    length_of,
    no_length,
    no_source,
    seeded_data,
    yields_samples,
)
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import batch_form, data_source
from ballast_trainer.seeding import mixed_key

FIELD = "evaluation.data.name"
_VALIDATION = 0x7A11D


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValidationData:
    """The batches of an evaluation.

    Attributes:
        batch: inputs and targets of batch ``number``, ``batch(seed, number, size)``.
        count: how many batches there are.
        seed: that ``batch`` is called with.
        name: of what gives them, in the configuration.
        field: where the name stands there.
    """

    batch: BatchFunction
    count: int
    seed: int
    name: str = ""
    field: str = FIELD


def validation_data(config: JobConfig, model: Model) -> ValidationData | None:
    """The data of ``evaluation``, if any. Raises ConfigurationError: not usable, or too few whole batches."""
    evaluation, seed = config.evaluation, config.training.seed
    if evaluation is None:
        return None
    if evaluation.data is None:
        assert evaluation.batches is not None, "the contract refuses it"
        apart = mixed_key(seed, _VALIDATION) >> 33
        return ValidationData(
            batch=model.batch,
            count=evaluation.batches,
            seed=apart,
            name=config.model_name,
            field="model.name",
        )
    source = data_source(evaluation.data, "evaluation.data", seed=seed)
    form = batch_form(evaluation.data, model, config.pipeline.microbatches, "evaluation.data")
    size = config.pipeline.global_batch_size
    batch: BatchFunction
    available = None
    if is_dataset(source):
        available, batch = length_of(source, FIELD) // size, OrderedDataset(source, form)
    elif is_loader(source):
        available, batch = _length(source, size), OrderedLoader(source, form)
    elif callable(source):
        batch = functools.partial(_seeded, batches_from(source, form))
    else:
        raise no_source(source, FIELD)
    count = _count(evaluation, available, size)
    return ValidationData(batch=batch, count=count, seed=seed, name=evaluation.data.name)


def _count(evaluation: EvaluationConfig, available: int | None, size: int) -> int:
    """Number of batches of an evaluation, of those that are available; None: it is not known."""
    if available == 0:
        reason = f"has no whole batch of {size} samples (pipeline.globalBatchSize). To fix: more data"
        raise ConfigurationError(FIELD, reason)
    if evaluation.batches is None and available is None:
        reason = "missing: evaluation.data has no length. To fix: give batches"
        raise ConfigurationError("evaluation.batches", reason)
    if evaluation.batches is None:
        assert available is not None
        return available
    if available is not None and evaluation.batches > available:
        reason = (
            f"{evaluation.batches}, and evaluation.data has {available} whole batches of {size} samples. "
            f"To fix: at most {available}, or leave it out"
        )
        raise ConfigurationError("evaluation.batches", reason)
    return evaluation.batches


def _length(loader: Any, size: int) -> int | None:
    try:
        batches = len(loader) // (size if yields_samples(loader) else 1)
    except TypeError:  # it has none
        return None
    except Exception as error:
        raise no_length(loader, error, FIELD) from error
    return batches - bool(incomplete_batch(loader))


def _seeded(batch: BatchFunction, seed: int, number: int, size: int) -> Batch:
    with seeded_data(seed, number):
        return batch(seed, number, size)
