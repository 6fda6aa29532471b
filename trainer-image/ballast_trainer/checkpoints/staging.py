"""Staging of a rank's state: copies in the host's memory, from which a checkpoint is written.

Trained weights and their optimizers' state change in the optimizer step alone.  They are copied while the
next step computes its gradients, and it waits with its update until they are; all else is copied at once.
"""

import threading
from collections.abc import Collection, Mapping

import torch

from ballast_trainer.errors import CheckpointNotWritten


class StagedCopy:
    """The copies of one checkpoint, on their way.

    Attributes:
        tensors: the copies by key; to be read after :meth:`finish`.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        waiting: Mapping[str, torch.Tensor],
        copied: "torch.cuda.Event | None",
    ) -> None:
        """Prepare.

        Args:
            tensors: the copies by key.
            waiting: what has yet to be copied, by key.
            copied: on a GPU, the end of the copying; None: the copying is :meth:`finish`'s.
        """
        self.tensors = tensors
        self._waiting = waiting
        self._copied = copied
        self._versions = {key: value._version for key, value in waiting.items()}
        self._done = threading.Event()

    def finish(self) -> None:
        """Copy what is left; on the thread that writes.

        Raises:
            CheckpointNotWritten: some of it has changed meanwhile.
        """
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

        Args:
            state: this rank's tensors by key.
            later: keys of those that stay as they are until :meth:`StagedCopy.wait` has returned.
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
