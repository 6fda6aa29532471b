"""Batches of the steps to come, read by processes beside the training one."""

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ballast_trainer.data.collate import Batch
from ballast_trainer.errors import ConfigurationError, DataError
from ballast_trainer.process_exit import end_with_parent

_RECENT_BATCHES = 4
"""Batches kept: a step may be asked for twice, and without a flush a pipeline's ends are some steps apart."""
_PER_WORKER = 2


class ReadAhead:
    """Reads each step's batch before it is asked for, in the order of the steps.

    Data must be given by the step alone, so that any worker may read any step.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        *,
        workers: int,
        last_step: int,
        pinned: bool,
        told: Callable[[], Any] = lambda: None,
    ) -> None:
        """Prepare; workers start with the first batch.

        Args:
            read: the batch of a step; called in the workers.
            workers: processes.
            last_step: the step after the last one that is read.
            pinned: whether batches are in page-locked memory, from which copies to a GPU are faster.
            told: what a worker has to tell after a batch.
        """
        self._read, self._workers, self._last_step, self._pinned = read, workers, last_step, pinned
        self._told = told
        self._next = 0
        self._batches: Iterator[Any] | None = None
        self._recent: dict[int, tuple[Batch, Any]] = {}

    def batch(self, step: int) -> tuple[Batch, Any]:
        """Inputs and targets of ``step``, and what their worker has told.

        Raises:
            DataError, ConfigurationError: as reading the batch raises.
        """
        if step in self._recent:
            return self._recent[step]
        if self._batches is None or step != self._next:
            self.close()
            self._batches, self._next = self._start(step), step
        try:
            found = next(self._batches)
        except RuntimeError as error:  # a worker was killed
            raise DataError(
                f"training.dataloaderNumWorkers: a process that reads the data has ended: {error}. "
                "To fix: more memory, fewer workers, or 0, which reads the data in the training process"
            ) from error
        if isinstance(found, _Failed):
            raise found.error()
        self._recent[step] = found
        self._next += 1
        for old in sorted(self._recent)[:-_RECENT_BATCHES]:
            del self._recent[old]
        return self._recent[step]

    def close(self) -> None:
        """End the workers."""
        self._batches = None
        self._recent.clear()

    def _start(self, step: int) -> Iterator[Any]:
        loader: Any = torch.utils.data.DataLoader(
            _Steps(self._read, self._told),
            sampler=range(step, self._last_step),
            batch_size=None,
            num_workers=self._workers,
            # A user's data need not be picklable, and is in memory once.
            multiprocessing_context="fork",
            prefetch_factor=_PER_WORKER,
            pin_memory=self._pinned,
            worker_init_fn=functools.partial(_start_worker, os.getpid()),
            # Of its own: the training process's numbers must not depend on how data are read.
            generator=torch.Generator(),
        )
        return iter(loader)


class _Steps(torch.utils.data.Dataset[Any]):
    """The batches of a job by step, or why one cannot be read."""

    def __init__(self, read: Callable[[int], Batch], told: Callable[[], Any]) -> None:
        self._read, self._told = read, told

    def __getitem__(self, step: int) -> Any:
        try:
            inputs, targets = self._read(step)
        except ConfigurationError as error:
            return _Failed(error.field, str(error).removeprefix(f"{error.field}: "))
        except DataError as error:
            return _Failed(None, str(error))
        return (inputs, targets), self._told()


class _Failed:
    """An error on its way from a worker; errors with several arguments cannot be pickled."""

    def __init__(self, field: str | None, text: str) -> None:
        self._field, self._text = field, text

    def error(self) -> ConfigurationError | DataError:
        return DataError(self._text) if self._field is None else ConfigurationError(self._field, self._text)


def _start_worker(parent: int, number: int) -> None:
    """Undo what a fork inherits: the rank's signal handlers, and sockets that must close when it dies."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
