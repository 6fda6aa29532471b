"""Validation data: the same batches in every evaluation, in the data's own order.

The callable ``evaluation.data.name`` returns what ``data.name`` may return; a dataset is not shuffled.  Only
whole batches count.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.training import EvaluationConfig

from ballast_trainer.data.collate import Batch, BatchForm, BatchFunction
from ballast_trainer.data.sources import (
    batches_of,
    is_dataset,
    is_loader,
    length_of,
    no_length,
    no_source,
    refuse_form,
    sample_of,
    seed_generators,
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
    available: int | None
    if is_dataset(source):
        available, batch = length_of(source, FIELD) // size, functools.partial(_in_order, source, form)
    elif is_loader(source):
        available, batch = _length(source, size), OrderedLoader(source, form)
    elif callable(source):
        refuse_form(source, form)
        available, batch = None, functools.partial(_checked, source, form)
    else:
        raise no_source(source, FIELD)
    count = _count(evaluation, available, size)
    return ValidationData(batch=batch, count=count, seed=seed, name=evaluation.data.name)


def _count(evaluation: EvaluationConfig, available: int | None, size: int) -> int:
    """How many batches an evaluation has, of those that are available; None: it is not known."""
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
        return len(loader) // (size if yields_samples(loader) else 1)
    except TypeError:  # it has none
        return None
    except Exception as error:
        raise no_length(loader, error, FIELD) from error


def _checked(batch: BatchFunction, form: BatchForm, seed: int, number: int, size: int) -> Batch:
    with seeded_data(seed, number):
        return form.checked(batch(seed, number, size), size)


def _in_order(dataset: Any, form: BatchForm, seed: int, number: int, size: int) -> Batch:
    """Batch ``number`` of a dataset that can be indexed: samples number * size to (number + 1) * size - 1."""
    with seeded_data(seed, number):
        samples = [sample_of(dataset, index) for index in range(number * size, (number + 1) * size)]
        return form.checked(form.of_samples(samples), size)


class OrderedLoader:
    """A loader, or an iterable dataset, read from its first batch in every evaluation."""

    def __init__(self, loader: Iterable[Any], form: BatchForm) -> None:
        if not yields_samples(loader):
            refuse_form(loader, form)
        self._loader, self._form = loader, form
        self._batches: Iterator[Any] = iter(())
        self._next = 0

    def __call__(self, seed: int, number: int, size: int) -> Batch:
        """Inputs and targets of batch ``number``. Raises ConfigurationError: it has fewer batches."""
        if number == 0 or number < self._next:
            with seeded_data(seed, -1):
                seed_generators(self._loader)
                self._batches, self._next = batches_of(self._loader, self._form, size), 0
        while True:
            with seeded_data(seed, self._next):
                batch = next(self._batches, None)
            if batch is None:
                reason = f"the loader of evaluation.data yields {self._next}. To fix: at most that many"
                raise ConfigurationError("evaluation.batches", reason)
            self._next += 1
            if self._next > number:
                return self._form.checked(batch, size)
