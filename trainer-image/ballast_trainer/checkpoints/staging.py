"""Staging of a rank's state: copies in the host's memory, which a thread writes or sends beside the steps.

Trained weights and their optimizers' state change in the optimizer step alone.  They are copied while the
next step computes its gradients, and it waits with its update until they are; all else is copied at once.
"""

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from ballast_trainer.checkpoints import tensors
from ballast_trainer.distributed.process_group import World, patient_group, peer_failures
from ballast_trainer.errors import CheckpointNotWritten
from ballast_trainer.layers.layer import LayerSet

Result = TypeVar("Result")


class StagedCopy:
    """The copies of one checkpoint by key, to be read after :meth:`finish`."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        waiting: Mapping[str, torch.Tensor],
        copied: "torch.cuda.Event | None",
    ) -> None:
        """Prepare; ``waiting`` has yet to be copied: by a GPU, until ``copied``, or by :meth:`finish`."""
        self.tensors = tensors
        self._waiting = waiting
        self._copied = copied
        self._versions = {key: value._version for key, value in waiting.items()}
        self._done = threading.Event()

    def finish(self) -> None:
        """Copy the rest; on the thread that writes. Raises CheckpointNotWritten: it has changed meanwhile."""
        try:
            if self._copied is not None:
                self._copied.synchronize()
            else:
                for key, value in self._waiting.items():
                    self.tensors[key].copy_(value)
            changed = [key for key, value in self._waiting.items() if value._version != self._versions[key]]
        finally:
            self._waiting = {}
            self._done.set()
        if changed:
            raise CheckpointNotWritten(
                f"{changed[0]} changed while it was copied, in the layer's forward or in a callback. "
                "To fix: checkpoint.asyncMode: disabled, or change it in the optimizer step"
            )

    def wait(self) -> None:
        """Let no kernel or statement that follows change what is being copied; on the thread that trains."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        else:
            self._done.wait()


class Staging:
    """The host's memory for the copies, which the next checkpoint uses again; pinned where a GPU copies."""

    def __init__(self, device: torch.device) -> None:
        """Prepare; ``device`` is where the state lives."""
        self._device = device
        self._kept: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def begin(self, state: Mapping[str, torch.Tensor], *, later: Collection[str]) -> StagedCopy:
        """Begin to copy ``state``; none of the copies before is used any more.

        The tensors of ``later`` stay as they are until :meth:`StagedCopy.wait` has returned.
        """
        self._kept = {key: self._room(key, value) for key, value in state.items()}
        if self._device.type == "cuda":
            return self._begin_on_gpu(state, later)
        for key, value in state.items():
            if key not in later:
                self._kept[key].copy_(value)
        return StagedCopy(self._kept, {key: state[key] for key in later}, None)

    def _begin_on_gpu(self, state: Mapping[str, torch.Tensor], later: Collection[str]) -> StagedCopy:
        """All copies are queued now: behind the kernels of the step that is done, beside the next one's."""
        now = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        for key, value in state.items():
            if key not in later:
                self._kept[key].copy_(value, non_blocking=True)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            for key in later:
                self._kept[key].copy_(state[key], non_blocking=True)
            copied = self._stream.record_event()
        # They are held until the copying is done, so that nothing else gets their memory.
        return StagedCopy(self._kept, {key: state[key] for key in later}, copied)

    def _room(self, key: str, value: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(key)
        if kept is not None and kept.shape == value.shape and kept.dtype == value.dtype:
            return kept
        if self._device.type == "cuda":
            try:
                return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            except RuntimeError:
                # The system pins no more: the copy is slower, and right.
                pass
        return torch.empty(value.shape, dtype=value.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Flight(Generic[Result]):
    """A copy of a rank's state, and what the work with it returns, or raises."""

    copy: StagedCopy
    result: "Future[Result]"


class BesideSteps(Generic[Result]):
    """Work with a copy of the ranks' state, on a thread and in a group of its own, beside the steps."""

    def __init__(self, device: torch.device, name: str) -> None:
        """Prepare; ``device`` is where the state lives, ``name`` the thread's."""
        self._name = name
        self._staging, self._kept = Staging(device), Staging(device)
        self._group: tuple[Any, Any] = (None, None)
        """The patient group of the ranks that it is for, and the one of the thread."""

    def begin(
        self,
        world: World,
        layers: LayerSet,
        work: Callable[[World, Mapping[str, torch.Tensor]], Result],
        *,
        at_once: bool,
    ) -> Flight[Result]:
        """Begin to copy, and to ``work`` with the copy; collective, after the work before has ended.

        It gets the ranks with the thread's group, and this rank's tensors by key; if one of these has changed
        while it was copied, all ranks get a :class:`CheckpointNotWritten` in its place.  ``at_once``: more
        than the optimizer step changes the tensors.
        """
        if world.size > 1 and self._group[0] is not world.patient_group:
            self._group = world.patient_group, patient_group()
        state = tensors.stored(world, layers)
        later = set() if at_once else tensors.changed_by_optimizer(layers, state)
        copy, result = self._staging.begin(state, later=later), Future[Result]()
        beside = dataclasses.replace(world, patient_group=self._group[1])

        def run() -> None:
            try:
                failure = None
                try:
                    copy.finish()
                except CheckpointNotWritten as error:
                    failure = str(error)
                with peer_failures():
                    failure = next(filter(None, beside.gather(failure, patient=True)), None)
                    if failure is not None:
                        raise CheckpointNotWritten(failure)
                    result.set_result(work(beside, copy.tensors))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return Flight(copy, result)

    def keep(self) -> None:
        """The newest copy stays as it is, until that of a later work is kept."""
        self._staging, self._kept = self._kept, self._staging
