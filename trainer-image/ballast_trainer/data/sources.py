"""The user's data, in an order that depends on seed and step alone.

So it is the same on every rank, under every partition, after every new plan and restart.  The callable
``data.name`` is called with ``data.args`` and returns one of

- a function ``batch(seed, step, size)`` -> inputs, targets: pure; it decides on the order;
- a dataset with ``len()`` and ``[index]`` -> (input, target): shuffled in every epoch;
- a loader, e.g. ``torch.utils.data.DataLoader``, that yields (inputs, targets) of whole batches:
  read from the start up to the step of a restart.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch

from ballast_trainer.causes import SAMPLE_NOTE, with_place
from ballast_trainer.data.batch import Batch, BatchFunction
from ballast_trainer.errors import ConfigurationError, DataError, TrainerError
from ballast_trainer.seeding import host_seeded, mixed_key

FIELD = "data.name"
_DATA = 0xDA7A
_KEPT_PERMUTATIONS = 2
"""A batch may straddle two epochs."""
_RECENT_BATCHES = 4
"""Batches kept of a loader: without a flush, the ends of the pipeline are some steps apart."""


def is_dataset(source: Any) -> bool:
    """Whether it has samples by index."""
    return hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, Mapping)


def is_loader(source: Any) -> bool:
    """Whether it can be read several times."""
    return isinstance(source, Iterable) and not isinstance(source, Mapping | Iterator)


def refuse_samples(source: Any, field: str = FIELD) -> None:
    """Refuse what yields samples, one by one.

    Raises:
        ConfigurationError: it is such.
    """
    if isinstance(source, torch.utils.data.IterableDataset):
        reason = f"{type(source).__name__} yields samples. To fix: return DataLoader(..., batch_size=...)"
        raise ConfigurationError(field, reason)


def no_source(source: Any, field: str = FIELD) -> ConfigurationError:
    """The error for what is no data."""
    return ConfigurationError(
        field,
        f"a {type(source).__name__} is no batch function, dataset or loader that can be read twice. "
        "To fix: return one of these",
    )


def length_of(dataset: Any, field: str = FIELD) -> int:
    """``len()`` of a dataset.

    Raises:
        ConfigurationError: it raises.
    """
    try:
        return len(dataset)
    except Exception as error:  # a user's dataset may do anything there
        raise no_length(dataset, error, field) from error


def no_length(source: Any, error: Exception, field: str = FIELD) -> ConfigurationError:
    """The error for a dataset or loader whose ``len()`` raises ``error``."""
    return ConfigurationError(
        field,
        f"len() of the {type(source).__name__} fails: {with_place(error)}. "
        "To fix: let it return how many samples there are",
    )


def is_read_in_order(batch: BatchFunction) -> bool:
    """Whether a batch can be had only after those of the steps before it."""
    return isinstance(batch, ReplayedLoader)


def batches_from(source: Any) -> BatchFunction:
    """The batch function of a user's function, dataset or loader.

    Raises:
        ConfigurationError: ``source`` is none of these, or an empty dataset.
    """
    refuse_samples(source)
    if is_dataset(source):
        return ShuffledDataset(source)
    if is_loader(source):
        return ReplayedLoader(source)
    if callable(source):
        return functools.partial(_checked, source)
    raise no_source(source)


def _checked(batch: BatchFunction, seed: int, step: int, size: int) -> Batch:
    return whole_batch(batch(seed, step, size), size)


def whole_batch(batch: Any, size: int, field: str = FIELD) -> Batch:
    """Inputs and targets, if the batch is a pair of tensors of ``size`` samples.

    Raises:
        ConfigurationError: it is not.
    """
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        reason = f"gives {type(batch).__name__}, not a pair of inputs and targets. To fix: return both"
        raise ConfigurationError(field, reason)
    inputs, targets = batch
    for name, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, torch.Tensor):
            reason = f"{name} are {type(value).__name__}, not a tensor. To fix: return tensors"
            raise ConfigurationError(field, reason)
        if value.dim() == 0 or len(value) != size:
            raise ConfigurationError(
                field,
                f"{name} have shape {tuple(value.shape)}, pipeline.globalBatchSize is {size}. "
                f"To fix: give batches of {size}; a loader: batch_size={size}, drop_last=True",
            )
    return inputs, targets


def read_batch(
    batch: BatchFunction, seed: int, number: int, size: int, *, field: str, name: str, what: str
) -> Batch:
    """A batch of the user's data, whose own errors are told in words.

    Args:
        batch: gives it.
        seed: that ``batch`` is called with.
        number: of the batch, from 0.
        size: samples.
        field: of the configuration that names the data.
        name: its value.
        what: the batch in words, e.g. ``the batch of step 4``.

    Raises:
        DataError: reading it fails.
        ConfigurationError: it is no batch.
    """
    try:
        return batch(seed, number, size)
    except (TrainerError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # a user's data may do anything
        raise DataError(
            f"{field}: {name!r} does not give {what}: {with_place(error)}. "
            "To fix: the data, or the code that reads it; then start again"
        ) from error


class ShuffledDataset:
    """A dataset that can be indexed, shuffled in every epoch.

    Step s takes positions s * size to (s + 1) * size - 1 of the epochs laid end to end.  An epoch is as
    long as the dataset was when it was made.
    """

    def __init__(self, dataset: Any) -> None:
        self._length = length_of(dataset)
        if self._length == 0:
            raise ConfigurationError(FIELD, "the dataset has no sample. To fix: one at least")
        self._dataset = dataset
        self._permutation = functools.lru_cache(maxsize=_KEPT_PERMUTATIONS)(self._permuted)

    def _permuted(self, seed: int, epoch: int) -> numpy.ndarray:
        return numpy.random.default_rng((seed, epoch)).permutation(self._length)

    def indices(self, seed: int, step: int, size: int) -> list[int]:
        """Which samples the batch of ``step`` is made of."""
        positions = range(step * size, (step + 1) * size)
        found = []
        for position in positions:
            epoch, offset = divmod(position, self._length)
            found.append(int(self._permutation(seed, epoch)[offset]))
        return found

    def __call__(self, seed: int, step: int, size: int) -> Batch:
        """Inputs and targets of ``step``."""
        with seeded_data(seed, step):
            samples = [sample_of(self._dataset, index) for index in self.indices(seed, step, size)]
        return whole_batch(torch.utils.data.default_collate(samples), size)


def sample_of(dataset: Any, index: int) -> Any:
    """A sample; its errors are noted with its index."""
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"{SAMPLE_NOTE}{index}")
        raise


class ReplayedLoader:
    """A loader that yields the batches of an epoch, one after the other.

    Torch is seeded before an epoch begins and before each batch, so a loader that shuffles does so
    the same way on every rank.  To go far back, or to resume, it is read again from the first epoch.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._batches: Iterator[Any] = iter(())
        self._epoch = -1
        self._step = -1
        self._seed: int | None = None
        self._recent: dict[int, Any] = {}

    def __call__(self, seed: int, step: int, size: int) -> Batch:
        """Inputs and targets of ``step``."""
        if seed != self._seed or (step <= self._step and step not in self._recent):
            self._batches, self._epoch, self._step, self._seed = iter(()), -1, -1, seed
            self._recent.clear()
        while self._step < step:
            batch = self._next(seed)
            self._step += 1
            self._recent[self._step] = batch
            self._recent.pop(self._step - _RECENT_BATCHES, None)
        return whole_batch(self._recent[step], size)

    def _next(self, seed: int) -> Any:
        for _ in range(2):
            with seeded_data(seed, self._step + 1):
                try:
                    return next(self._batches)
                except StopIteration:
                    pass
            self._epoch += 1
            with seeded_data(seed, -1 - self._epoch):
                self._batches = iter(self._loader)
        reason = "the loader yields no batch. To fix: one at least, of globalBatchSize samples"
        if self._step >= 0:
            reason = (
                f"the loader has ended after {self._step + 1} batches, and yields none when read again. "
                "To fix: let __iter__ begin anew, or return as many batches as totalSteps"
            )
        raise ConfigurationError(FIELD, reason)


def seeded_data(seed: int, part: int) -> contextlib.AbstractContextManager[None]:
    """The host's generators seeded from both, and as they were afterwards."""
    return host_seeded(mixed_key(seed, _DATA, part) >> 1)
