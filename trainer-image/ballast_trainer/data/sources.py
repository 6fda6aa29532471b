"""The user's data, in an order that depends on seed and step alone.

So it is the same on every rank, under every partition, after every new plan and restart.  The callable
``data.name`` is called with ``data.args`` and returns one of

- a function ``batch(seed, step, size)`` -> inputs, targets: pure; it decides on the order;
- a dataset with ``len()`` and ``[index]`` -> (input, target): shuffled in every epoch;
- an iterable dataset, which yields such samples in its own order;
- a loader, e.g. ``torch.utils.data.DataLoader``, that yields (inputs, targets) of whole batches.

The last two are read from the start up to the step of a restart, unless they have ``state_dict()`` and
``load_state_dict()``, as those of torchdata and Hugging Face have.
"""

import base64
import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import logging
import types
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch

from ballast_trainer.causes import SAMPLE_NOTE, with_place
from ballast_trainer.data.collate import Batch, BatchForm, BatchFunction
from ballast_trainer.data.read_ahead import (
    RECENT_BATCHES,
    is_of_shared_memory,
    shared_memory_full,
    start_worker,
)
from ballast_trainer.errors import ConfigurationError, DataError, TrainerError
from ballast_trainer.seeding import host_seeded, mixed_key

logger = logging.getLogger(__name__)

FIELD = "data.name"
_DATA = 0xDA7A
_SUBSTITUTE = 0x5B57
_GROUPED = 50
"""Batches that are drawn together to be sorted by length, as transformers does it."""
_KEPT_PERMUTATIONS = 2
"""A batch may straddle two epochs."""


def is_dataset(source: Any) -> bool:
    """True if it has samples by index."""
    return hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, Mapping)


def is_loader(source: Any) -> bool:
    """True if it can be read several times."""
    return isinstance(source, Iterable) and not isinstance(source, Mapping | Iterator)


def yields_samples(source: Any) -> bool:
    """True if it yields samples one by one, not batches."""
    return isinstance(source, torch.utils.data.IterableDataset)


def refuse_form(source: Any, form: BatchForm) -> None:
    """Refuse to make batches of what gives whole ones.

    Raises:
        ConfigurationError: ``form`` says how.
    """
    makes = {"collate": form.collate, "padToMultipleOf": form.multiple, "packing": form.rows}
    for name in (name for name, value in makes.items() if value is not None):
        raise ConfigurationError(
            f"{form.field}.{name}",
            f"a {type(source).__name__} gives whole batches. To fix: leave it out (DataLoader: collate_fn)",
        )


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
    """True if a batch can be read only after those of the steps before it."""
    return isinstance(batch, ReplayedLoader)


def has_one_shape(batch: BatchFunction) -> bool:
    """True if all batches have the same shape, as far as is known; ``one_shape`` of a function says so."""
    source = batch.args[0] if isinstance(batch, functools.partial) and batch.func is _checked else batch
    if isinstance(source, ShuffledDataset):
        return source.stacks
    return getattr(source, "one_shape", False) is True


def batches_from(source: Any, form: BatchForm | None = None) -> BatchFunction:
    """The batch function of a user's function, dataset or loader; without ``form`` batches are of pairs.

    Raises:
        ConfigurationError: ``source`` is none of these, or an empty dataset; ``form`` does not suit it.
    """
    form = form or BatchForm()
    if is_dataset(source):
        return ShuffledDataset(source, form)
    if is_loader(source):
        if rest := incomplete_batch(source):
            logger.warning(
                "%s: the last batch of an epoch has %d samples, not %d, and the job ends there. "
                "To fix: drop_last=True",
                FIELD,
                rest,
                source.batch_size,
            )
        return ReplayedLoader(source, form)
    if callable(source):
        refuse_form(source, form)
        return functools.partial(_checked, source, form)
    raise no_source(source)


def incomplete_batch(source: Any) -> int:
    """Samples of the last batch of a loader's epoch, if they are fewer than in the others; else 0."""
    if not isinstance(source, torch.utils.data.DataLoader) or source.drop_last or not source.batch_size:
        return 0
    dataset: Any = source.dataset
    sampled: Any = source.sampler  # perhaps a part of the dataset, or some of it twice
    has_length = is_dataset(dataset) and hasattr(sampled, "__len__")
    return length_of(sampled) % source.batch_size if has_length else 0


def _checked(batch: BatchFunction, form: BatchForm, seed: int, step: int, size: int) -> Batch:
    return form.checked(batch(seed, step, size), size)


def read_batch(
    batch: BatchFunction, seed: int, number: int, size: int, *, field: str, name: str, what: str
) -> Batch:
    """A batch of the user's data, whose own errors are told in words.

    ``field`` of the configuration names the data, by ``name``; ``what`` is the batch in words, e.g. ``the
    batch of step 4``.

    Raises:
        DataError: reading it fails.
        ConfigurationError: it is no batch.
    """
    try:
        # Code that turns gradients off must not do so for the training.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return batch(seed, number, size)
    except (TrainerError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # a user's data may do anything
        if is_of_shared_memory(error):
            raise shared_memory_full(f"{field}: {name!r}") from error
        raise DataError(
            f"{field}: {name!r} does not give {what}: {with_place(error)}. "
            "To fix: the data, or the code that reads it; then start again"
        ) from error


class BadSamples:
    """Samples that cannot be read and are left out, up to a number.

    Attributes:
        most: how many may be left out.
        known: by index of the sample, or by number of a loader's batch, the error.
    """

    def __init__(self) -> None:
        self.most = 0
        self.known: dict[int, str] = {}

    def note(self, number: int, error: Exception) -> None:
        """Leave this one out.

        Raises:
            Exception: ``error``: it is one too many, or not of the data.
        """
        if isinstance(error, TrainerError | MemoryError | torch.OutOfMemoryError):
            raise error
        if number not in self.known and len(self.known) >= self.most:
            raise error
        self.known[number] = with_place(error)

    def add(self, known: Mapping[int, str]) -> None:
        """Leave those out, too, that another process could not read.

        Raises:
            DataError: they are too many.
        """
        self.known |= known
        if len(self.known) > self.most:
            last = list(self.known)[-1]
            raise DataError(
                f"{FIELD}: more cannot be read than training.skipBadSamples allows ({self.most}): "
                f"{len(self.known)}, the last {last}: {self.known[last]}. To fix: the data, or allow more"
            )


class ShuffledDataset:
    """A dataset that can be indexed, shuffled in every epoch.

    Step s takes positions s * size to (s + 1) * size - 1 of the epochs laid end to end, later or earlier
    ones where the size has changed since.  An epoch is as long as the dataset was when it was made.  In the
    place of a sample that cannot be read comes the first that can, of a sequence that seed and position draw.

    Attributes:
        length: samples of an epoch.
    """

    def __init__(self, dataset: Any, form: BatchForm | None = None) -> None:
        self._form = form or BatchForm()
        field = f"{self._form.field}.name"
        self.length = length_of(dataset, field)
        if self.length == 0:
            raise ConfigurationError(field, "the dataset has no sample. To fix: one at least")
        self._dataset = dataset
        self._lengths: numpy.ndarray | None = None
        self.bad = BadSamples()
        self._ahead: dict[int, int] = {}
        self._begun: dict[int, tuple[int, int]] = {}
        self._permutation = functools.lru_cache(maxsize=_KEPT_PERMUTATIONS)(self._permuted)

    def _permuted(self, seed: int, epoch: int, size: int) -> numpy.ndarray:
        order = numpy.random.default_rng((seed, epoch)).permutation(self.length)
        if self._lengths is None or not size:
            return order
        together = size * max(1, min(_GROUPED, self.length // (4 * size)))
        drawn = numpy.split(order, range(together, self.length, together))
        return numpy.concatenate([some[numpy.argsort(-self._lengths[some], kind="stable")] for some in drawn])

    def group_by_length(self) -> None:
        """Sort what is drawn for 50 batches by length, the longest first, as transformers does it.

        Lengths are the column ``length`` of a Hugging Face dataset, else the attribute ``lengths``.

        Raises:
            ConfigurationError: there is neither, or not a number for each sample.
        """
        column = "length" in (getattr(self._dataset, "column_names", None) or ())
        try:
            found = self._dataset["length"] if column else getattr(self._dataset, "lengths", None)
            self._lengths = numpy.asarray(found, dtype=numpy.int64)
        except Exception:  # a user's dataset may do anything there
            self._lengths = None
        if self._lengths is None or self._lengths.shape != (self.length,):
            raise ConfigurationError(
                "training.groupByLength",
                f"the {type(self._dataset).__name__} does not say how long each of its {self.length} samples "
                "is. To fix: a column length, e.g. by dataset.map, or an attribute lengths of whole numbers",
            )

    @property
    def stacks(self) -> bool:
        """True if a batch is nothing but its samples, one above the other."""
        return self._form.multiple is None and self._form.collate is None and self._form.rows is None

    def indices(self, seed: int, step: int, size: int) -> list[int]:
        """Indices of the samples in the batch of ``step``."""
        first = self.samples_before(seed, step, size)
        found = []
        for position in range(first, first + size):
            epoch, offset = divmod(position, self.length)
            sorted_by = self._sorted_by(seed, epoch, size)
            found.append(int(self._permutation(seed, epoch, sorted_by)[offset]))
        return found

    def _sorted_by(self, seed: int, epoch: int, size: int) -> int:
        begun, before = self._begun.get(seed, (-1, 0))
        return before if epoch <= begun else size if self._lengths is not None else 0

    def sorted_by(self, seed: int, step: int, size: int) -> int:
        """The batch size by whose multiples the epoch before ``step`` is sorted by length; 0: it is not."""
        return self._sorted_by(seed, self.samples_before(seed, step, size) // self.length, size)

    def samples_before(self, seed: int, step: int, size: int) -> int:
        """Samples of the steps before ``step``."""
        return step * size + self._ahead.get(seed, 0)

    def continue_from(
        self, seed: int, step: int, size: int, samples: int, sorted_by: int | None = None
    ) -> None:
        """Let the batch of ``step`` begin after so many samples, of an epoch sorted as it was begun.

        ``sorted_by``: as :meth:`sorted_by` told; None: it is not known, and taken for that of today.
        """
        self._ahead[seed] = samples - step * size
        if sorted_by is not None:
            self._begun[seed] = samples // self.length, sorted_by

    def chosen(self, seed: int, step: int, size: int, bad: Container[int] = ()) -> list[int]:
        """Indices of :meth:`indices`, with others in the places of ``bad`` ones."""
        found = self.indices(seed, step, size)
        for number in range(size):
            drawn = itertools.count()
            while found[number] in bad:
                key = mixed_key(seed, _SUBSTITUTE, step * size + number, next(drawn))
                found[number] = key % self.length
        return found

    def __call__(self, seed: int, step: int, size: int) -> Batch:
        """Inputs and targets of ``step``."""
        while True:
            # From the first sample on, so that a rank that knows of a bad one draws the same random numbers.
            with seeded_data(seed, step):
                chosen = self.chosen(seed, step, size, self.bad.known)
                samples: list[Any] = []
                try:
                    for index in chosen:
                        samples.append(sample_of(self._dataset, index))  # noqa: PERF401 - counted on an error
                    batch = self._form.of_samples(samples)
                except Exception as error:
                    self._leave_out(chosen, samples, error)
                else:
                    return self._form.checked(batch, size)

    def _leave_out(self, chosen: Sequence[int], samples: Sequence[Any], error: Exception) -> None:
        """Leave out the sample after those that were read; of a whole batch the one that makes none alone.

        Raises:
            Exception: ``error``, where it is of no sample; a sample's, which is one too many.
        """
        number = len(samples)
        if number == len(chosen):
            for number, sample in enumerate(samples):
                try:
                    self._form.of_samples([sample] * (self._form.rows or 1))
                except Exception as alone:
                    alone.add_note(f"{SAMPLE_NOTE}{chosen[number]}")
                    error = alone
                    break
            else:
                raise error
        if len(self.bad.known) + 1 >= self.length:
            raise error
        self.bad.note(chosen[number], error)

    def told(self) -> Any:
        """Data that :meth:`agree` needs of the other ranks."""
        return dict(self.bad.known)

    def agree(self, told: Sequence[Any]) -> bool:
        """Leave out what any rank could not read; whether the batch has to be read again.

        Raises:
            DataError: it is too much.
        """
        for known in told:
            self.bad.add(known)
        return any(known.keys() != self.bad.known.keys() for known in told)


class OrderedDataset(ShuffledDataset):
    """One that is not shuffled: batch s has the samples s * size to (s + 1) * size - 1."""

    def indices(self, seed: int, step: int, size: int) -> list[int]:
        """Indices of the samples in the batch."""
        return list(range(step * size, (step + 1) * size))


def sample_of(dataset: Any, index: int) -> Any:
    """A sample; its errors are noted with its index."""
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"{SAMPLE_NOTE}{index}")
        raise


def batches_of(source: Iterable[Any], form: BatchForm, size: int) -> Iterator[Any]:
    """The batches of an epoch of a loader, or of samples, of which an incomplete batch is left out."""
    if isinstance(source, torch.utils.data.DataLoader):
        also: Any = source.worker_init_fn
        if getattr(also, "func", None) is not start_worker:
            source.worker_init_fn = functools.partial(start_worker, also)
    if not yields_samples(source):
        return iter(source)
    return _SampleBatches(iter(source), form, size)


def _parts(source: Any) -> tuple[Any, ...]:
    """A loader, and what its samples and their order come from; None in place of what it has not."""
    batches = getattr(source, "batch_sampler", None)
    sampler, of_batches = getattr(source, "sampler", None), getattr(batches, "sampler", None)
    return source, getattr(source, "dataset", None), sampler, batches, of_batches


def seed_generators(source: Any) -> None:
    """Seed a loader's own generators as torch's is: its order does not depend on what it was read for."""
    for part in _parts(source):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(torch.initial_seed())


class _SampleBatches:
    """Batches of an iterator's samples; of one that raises, the samples of the whole batch are left out."""

    def __init__(self, samples: Iterator[Any], form: BatchForm, size: int) -> None:
        self.samples, self._form, self._size = samples, form, size

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        found, failed = [], None
        for _ in range(self._size):
            try:
                found.append(next(self.samples))
            except StopIteration:
                if failed is not None:
                    break
                raise
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return self._form.of_samples(found)


def _drops_its_buffer(source: Any) -> bool:
    """True if it is a stream of Hugging Face with a shuffle buffer, or a loader of one."""
    # Not the attribute of a stream of the user's own, whose state may have its buffer.
    parts = [getattr(getattr(source, "dataset", source), "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if hasattr(part, "buffer_size"):
            return True
        if part is not None:
            parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False


def _has_ended(batches: Iterator[Any]) -> bool:
    """True if an iterator that has raised has nothing left for that reason, as generators."""
    inner = batches.samples if isinstance(batches, _SampleBatches) else batches
    return isinstance(inner, types.GeneratorType) and inner.gi_frame is None


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Position of a loader after a batch, by its own account.

    Attributes:
        step: whose batch is next.
        epoch: of it.
        state: what ``state_dict()`` returned.
        left_out: batches before it that could not be read.
    """

    step: int
    epoch: int
    state: Any
    left_out: int = 0

    def to_text(self) -> str:
        """Text for a checkpoint.

        Raises:
            ConfigurationError: the state has more than numbers, text, lists, dicts and tensors.
        """
        buffer = io.BytesIO()
        try:
            torch.save((self.epoch, self.state, self.left_out), buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:  # a user's objects may do anything there
            raise ConfigurationError(
                FIELD,
                f"state_dict() of the loader cannot be saved: {str(error).splitlines()[0]}. "
                "To fix: let it return numbers, text, lists, dicts and tensors",
            ) from error
        return base64.b64encode(buffer.getvalue()).decode()

    @classmethod
    def from_text(cls, step: int, text: str) -> "LoaderPosition":
        """Position of a checkpoint of ``step``.

        Raises:
            ValueError: the text is none of :meth:`to_text`.
        """
        try:
            saved = torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True)
            epoch, state, left_out = saved
        except Exception as error:  # torch and pickle raise many kinds
            raise ValueError(text) from error
        if type(epoch) is not int or type(left_out) is not int or min(epoch, left_out) < 0:
            raise ValueError(text)
        return cls(step, epoch, state, left_out)


class ReplayedLoader:
    """A loader that yields the batches of an epoch, one after the other; or an iterable dataset.

    Torch is seeded before an epoch begins and before each batch, so a loader that shuffles does so
    the same way on every rank.  To go far back, or to resume, it continues from the nearest state that it
    gave, or is read again from the first epoch.
    """

    _kept = RECENT_BATCHES
    _asks_for_state = True

    def __init__(self, source: Iterable[Any], form: BatchForm | None = None) -> None:
        self._form = form or BatchForm()
        if not yields_samples(source):
            refuse_form(source, self._form)
        self._source = source
        self.bad = BadSamples()
        self._left_out = 0
        self._has_state = self._asks_for_state and all(
            callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict")
        )
        if self._has_state and _drops_its_buffer(source):
            self._has_state = False
            logger.warning(
                "%s: the state of a %s is without the samples in its shuffle buffer, which would be skipped: "
                "after a stop it is read again from its first sample. To fix: a dataset with an index, or "
                "shuffle its shards alone",
                FIELD,
                type(source).__name__,
            )
        self._batches: Iterator[Any] = iter(())
        self._epoch = -1
        self._step = -1
        self._seed: int | None = None
        self._recent: dict[int, Any] = {}
        self._positions: dict[int, dict[int, LoaderPosition]] = {}

    def __call__(self, seed: int, step: int, size: int) -> Batch:
        """Inputs and targets of ``step``."""
        if seed != self._seed or (step <= self._step and step not in self._recent):
            self._seed = seed
            self._recent.clear()
            self._go_back(seed, step, size)
        while self._step < step:
            batch = self._next(seed, size)
            self._step += 1
            self._recent[self._step] = batch
            self._recent.pop(self._step - self._kept, None)
            self._note_position(seed)
        return self._form.checked(self._recent[step], size)

    def told(self) -> Any:
        """Data that :meth:`agree` needs of the other ranks."""
        return self._left_out, dict(self.bad.known)

    def agree(self, told: Sequence[Any]) -> bool:
        """Leave out as many batches as any rank; whether the newest one has to be read again.

        Raises:
            DataError: they are too many.
        """
        for _, known in told:
            self.bad.add(known)
        counts = [left_out for left_out, _ in told]
        if self._left_out < max(counts):
            self._recent.pop(self._step)
            self._step -= 1
            self._left_out += 1
        return len(set(counts)) > 1

    def position(self, seed: int, step: int) -> LoaderPosition | None:
        """Position before the batch of ``step``; None: it has no state, or ``step`` is long gone."""
        return self._positions.get(seed, {}).get(step)

    def continue_from(self, seed: int, position: LoaderPosition) -> None:
        """Begin there; batches of steps before it are read from the first epoch."""
        if self._has_state:
            self._positions[seed] = {position.step: position}
            self._seed = None

    def _note_position(self, seed: int) -> None:
        if self._has_state:
            state = copy.deepcopy(self._source.state_dict())  # type: ignore[attr-defined]
            known = self._positions.setdefault(seed, {})
            known[self._step + 1] = LoaderPosition(self._step + 1, self._epoch, state, self._left_out)
            for old in sorted(known)[: -RECENT_BATCHES - 1]:
                del known[old]

    def _go_back(self, seed: int, step: int, size: int) -> None:
        """Return to the last known position before ``step``."""
        known = [one for at, one in self._positions.get(seed, {}).items() if at <= step]
        self._batches, self._epoch, self._step, self._left_out = iter(()), -1, -1, 0
        if not known:
            return
        last = max(known, key=lambda one: one.step)
        self._epoch, self._step, self._left_out = last.epoch - 1, last.step - 1, last.left_out
        try:
            self._begin_epoch(seed, size, last.state)
        except Exception as error:
            error.add_note("given the state of a checkpoint")
            raise

    def _begin_epoch(self, seed: int, size: int, state: Any = None) -> None:
        self._epoch += 1
        with seeded_data(seed, -1 - self._epoch):
            # Of a loader, the dataset (a stream of Hugging Face that has continued from a state would begin
            # each epoch there) and the samplers (each epoch would have the order of the first).
            loader, *parts = _parts(self._source)
            for told in [loader] if callable(getattr(loader, "set_epoch", None)) else parts:
                if callable(getattr(told, "set_epoch", None)):
                    told.set_epoch(self._epoch)
            seed_generators(self._source)
            if state is not None:
                self._source.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
            self._batches = batches_of(self._source, self._form, size)

    def _next(self, seed: int, size: int) -> Any:
        anew = False
        while True:
            with seeded_data(seed, self._step + 1):
                try:
                    return next(self._batches)
                except StopIteration:
                    pass
                except Exception as error:
                    if _has_ended(self._batches):
                        raise
                    self.bad.note(self._step + 1 + self._left_out, error)
                    self._left_out += 1
                    continue
            if anew:
                break
            self._begin_epoch(seed, size)
            anew = True
        raise self._ended()

    def _ended(self) -> ConfigurationError:
        """The error for a loader that has no batch for the next step."""
        reason = "the loader yields no batch. To fix: one at least, of globalBatchSize samples"
        if self._step >= 0:
            reason = (
                f"the loader has ended after {self._step + 1} batches, and yields none when read again. "
                "To fix: let __iter__ begin anew, or return as many batches as totalSteps"
            )
        return ConfigurationError(FIELD, reason)


class OrderedLoader(ReplayedLoader):
    """A loader, or an iterable dataset, read from its first batch in every evaluation, and never twice."""

    _kept = 1
    _asks_for_state = False

    def _begin_epoch(self, seed: int, size: int, state: Any = None) -> None:
        if self._epoch == 0:
            raise self._ended()
        super()._begin_epoch(seed, size, state)

    def _ended(self) -> ConfigurationError:
        reason = f"the loader of evaluation.data yields {self._step + 1}. To fix: at most that many"
        return ConfigurationError("evaluation.batches", reason)


def seeded_data(seed: int, part: int) -> contextlib.AbstractContextManager[None]:
    """The host's generators seeded from both, and as they were afterwards."""
    return host_seeded(mixed_key(seed, _DATA, part) >> 1)
