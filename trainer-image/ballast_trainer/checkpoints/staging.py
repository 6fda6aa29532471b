"""Staging of a rank's state: copies in the host's memory, which a thread writes or sends beside the steps.

Trained weights and their optimizers' state change in the optimizer step alone.  They are copied while the
next step computes its gradients, and it waits with its update until they are; all else is copied at once.
"""

import dataclasses
import mmap
import threading
import weakref
from collections import defaultdict
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
        self._changed: list[str] | None = None
        self._done = threading.Event()

    def finish(self) -> None:
        """Copy the rest; on the thread that writes. Raises CheckpointNotWritten: it has changed meanwhile."""
        try:
            if self._copied is not None:
                self._copied.synchronize()
            else:
                for key, value in self._waiting.items():
                    self.tensors[key].copy_(value)
        finally:
            changed = self._look_for_changes()
            self._waiting = {}
            self._done.set()
        if changed:
            raise CheckpointNotWritten(
                f"{changed[0]} changed while it was copied, in the layer's forward or in a callback. "
                "To fix: checkpoint.asyncMode: disabled, or change it in the optimizer step"
            )

    def _look_for_changes(self) -> list[str]:
        """Keys that changed before they were copied, or before the training waited for the GPU's copies."""
        found = [key for key, value in self._waiting.items() if value._version != self._versions[key]]
        # Not what the training, which has waited, changes while another thread looks.
        if self._changed is None:
            self._changed = found
        return self._changed

    def wait(self) -> None:
        """Let no kernel or statement that follows change what is being copied; on the thread that trains."""
        if self._copied is not None:
            self._look_for_changes()
            torch.cuda.current_stream().wait_event(self._copied)
        else:
            self._done.wait()


class Staging:
    """The host's memory for the copies, which the next checkpoint uses again; page-locked where a GPU copies.

    Locking takes seconds for gigabytes, so that threads do it beside the steps: :meth:`make_room` before the
    first copy, else the thread that writes it (:meth:`lock`).
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare; ``device`` is where the state lives."""
        self._device = device
        self._rooms: dict[str, torch.Tensor] = {}
        self._unlocked: list[torch.Tensor] = []
        self._making: threading.Thread | None = None
        self._enough = threading.Event()
        self._stream: torch.cuda.Stream | None = None

    def make_room(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin to make locked memory for copies of ``state``; none of those before is used any more."""
        missing = self._take_over(state)

        def make() -> None:
            for key, size in missing.items():
                if self._enough.is_set():
                    return
                # The system finds its pages now, and not while it keeps the GPU's other work waiting.
                self._add(key, size).fill_(0)
                self.lock()

        self._making = threading.Thread(target=make, name="checkpoint-memory", daemon=True)
        self._making.start()

    def _take_over(self, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Give the memory that there is to tensors of ``state``; the bytes of those that get none."""
        self._enough.set()
        if self._making is not None:
            self._making.join()
        self._enough.clear()
        sizes = {key: value.nbytes for key, value in state.items()}
        spare, rooms = defaultdict(list), {}
        for key, room in self._rooms.items():
            if sizes.get(key) == room.nbytes:
                rooms[key] = room
            else:
                spare[room.nbytes].append(room)
        for key, size in sizes.items():
            if key not in rooms and spare[size]:
                rooms[key] = spare[size].pop()
        self._rooms = rooms
        return {key: size for key, size in sizes.items() if key not in rooms}

    def _add(self, key: str, size: int) -> torch.Tensor:
        """Memory on pages of its own: a page is locked once, and not for two."""
        memory = torch.empty(_whole_pages(size) + mmap.PAGESIZE, dtype=torch.uint8)
        start = -memory.data_ptr() % mmap.PAGESIZE
        room = self._rooms[key] = memory[start : start + size]
        self._unlocked.append(room)
        return room

    def lock(self) -> None:
        """Lock the memory that is not yet; not on the thread that trains."""
        while self._unlocked:
            room = self._unlocked.pop()
            if self._device.type != "cuda" or not room.nbytes:
                continue
            with torch.cuda.device(self._device):
                cuda = torch.cuda.cudart()
                # Where the system locks no more, copies are slower, and right.
                if int(cuda.cudaHostRegister(room.data_ptr(), _whole_pages(room.nbytes), 1)) == 0:
                    weakref.finalize(room, cuda.cudaHostUnregister, room.data_ptr())

    def begin(self, state: Mapping[str, torch.Tensor], *, later: Collection[str]) -> StagedCopy:
        """Begin to copy ``state``; none of the copies before is used any more.

        The tensors of ``later`` stay as they are until :meth:`StagedCopy.wait` has returned.
        """
        for key, size in self._take_over(state).items():
            self._add(key, size)
        copies = {key: self._rooms[key].view(of.dtype).view(of.shape) for key, of in state.items()}
        if self._device.type == "cuda":
            return self._begin_on_gpu(state, copies, later)
        for key, value in state.items():
            if key not in later:
                copies[key].copy_(value)
        return StagedCopy(copies, {key: state[key] for key in later}, None)

    def _begin_on_gpu(
        self, state: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor], later: Collection[str]
    ) -> StagedCopy:
        """All copies are queued now: behind the kernels of the step that is done, beside the next one's."""
        now = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        for key, value in state.items():
            if key not in later:
                copies[key].copy_(value, non_blocking=True)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            for key in later:
                copies[key].copy_(state[key], non_blocking=True)
            copied = self._stream.record_event()
        # They are held until the copying is done, so that nothing else gets their memory.
        return StagedCopy(copies, {key: state[key] for key in later}, copied)


def _whole_pages(size: int) -> int:
    return size + -size % mmap.PAGESIZE


@dataclasses.dataclass(frozen=True, slots=True)
class Flight(Generic[Result]):
    """A copy of a rank's state, and what the work with it returns, or raises."""

    copy: StagedCopy
    result: "Future[Result]"


class BesideSteps(Generic[Result]):
    """Work with a copy of the ranks' state, on a thread and in a group of its own, beside the steps."""

    def __init__(self, device: torch.device, name: str) -> None:
        """Prepare; ``device`` is where the state lives, ``name`` the thread's."""
        self._name, self._device = name, device
        self._staging, self._kept = Staging(device), Staging(device)
        self._group: tuple[Any, Any] = (None, None)
        """The patient group of the ranks that it is for, and the one of the thread."""

    def make_room(self, world: World, layers: LayerSet) -> None:
        """Begin to lock memory for the next copy, beside the steps; after the work before has ended.

        On a CPU, where no memory needs to be locked, it does nothing.
        """
        if self._device.type == "cuda":
            self._staging.make_room(tensors.stored(world, layers))

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
        staging, result = self._staging, Future[Result]()
        copy = staging.begin(state, later=later)
        beside = dataclasses.replace(world, patient_group=self._group[1])

        def run() -> None:
            try:
                failure = None
                try:
                    copy.finish()
                    staging.lock()
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
