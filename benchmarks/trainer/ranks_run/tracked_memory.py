"""Bytes of the tensors that a rank holds, operation by operation."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class TrackedMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that exist: each operation's results, until their storage goes.

    Attributes:
        most: bytes at the fullest moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._living: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation, and note its results."""
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, result)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._living:
            self._living.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._living.discard(key)
        self.now -= size
