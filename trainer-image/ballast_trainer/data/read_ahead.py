"""Batches of the steps to come, read by processes beside the training one; these processes, also a user's."""

import functools
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from ballast_trainer.data.collate import Batch
from ballast_trainer.errors import ConfigurationError, DataError, TrainerError
from ballast_trainer.process_exit import end_with_parent

RECENT_BATCHES = 4
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
        """Prepare to ``read`` the steps before ``last_step`` in processes that start with the first batch.

        ``pinned``: into page-locked memory, from which copies to a GPU are faster; ``told``: what a worker
        tells after a batch.
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
            if is_of_shared_memory(error):
                raise shared_memory_full("training.dataloaderNumWorkers") from error
            raise DataError(
                f"training.dataloaderNumWorkers: a process that reads the data has ended: {error}. "
                "To fix: more memory, fewer workers, or 0, which reads the data in the training process"
            ) from error
        # Also of one that cannot be read: if it is asked for again, it is read again.
        self._next += 1
        if isinstance(found, TrainerError):
            raise found
        self._recent[step] = found
        for old in sorted(self._recent)[:-RECENT_BATCHES]:
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
            worker_init_fn=functools.partial(start_worker, None),
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
        except (ConfigurationError, DataError) as error:
            return error
        return (inputs, targets), self._told()


def start_worker(also: Callable[[int], object] | None, number: int) -> None:
    """Begin process ``number`` of a loader: it ends with its rank, and tells of what it cannot send."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank stops after its step, and still needs data
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid == os.getppid():
        end_with_parent(parent.pid)
    elif parent is not None:  # that of a server of forks, which lives as long as its forks do
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    Queue._on_queue_feeder_error = _tell_unsent  # type: ignore[attr-defined]
    if also is not None:
        also(number)


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _tell_unsent(queue: Any, error: Exception, item: tuple[Any, ...]) -> None:
    """Send the error in the place of a batch, where Python would only print it and the rank wait for ever."""
    number, batch, *rest = item
    if isinstance(batch, ExceptionWrapper):
        os._exit(1)
    told = ExceptionWrapper((type(error), error, error.__traceback__), "a process that reads the data")
    queue.put((number, told, *rest))


_SHARED_MEMORY = "/dev/shm"


def is_of_shared_memory(error: BaseException) -> bool:
    """True if a loader's error is that the memory that its processes share is full."""
    # Torch's message of a process that a full one has killed is the cause of another.
    return any(
        isinstance(one, RuntimeError) and "shared memory" in str(one) for one in (error, error.__cause__)
    )


def shared_memory_full(field: str) -> DataError:
    """The error for it; ``field`` names the data."""
    try:
        size = f" ({shutil.disk_usage(_SHARED_MEMORY).total / 2**20:.0f} MiB)"
    except OSError:
        size = ""
    return DataError(
        f"{field}: {_SHARED_MEMORY}{size} is too small for the batches that the data's processes have read. "
        "To fix: a larger one (in a pod a volume in memory there, Docker: --shm-size), or fewer workers"
    )
