"""Bytes that layers save from the forward to the backward of one microbatch.

Autograd's hooks see all saved tensors; storages count once, for the first layer that keeps them, and those of
weights and buffers not at all, since they are held anyway.  A stage's input is often a part of a
batch: only the part counts.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ballast_trainer.trees import Tree, tensors_of


class SavedTensors:
    """Tensors that the layers of one stage keep of the running microbatch.

    Tensors are only noted while layers run, in about a microsecond each, and counted later.  They are
    kept alive, so that no other tensor takes its address, until the counter is released.
    """

    def __init__(self, part: Tree) -> None:
        """Begin with the stage's input, which may be part of a larger storage."""
        self._noted: list[tuple[int, torch.Tensor]] = []
        self._counted: dict[int, torch.Tensor] = {}
        self._parts: dict[int, torch.Tensor] = {}
        self.add_part(part)

    def add_part(self, part: Tree) -> None:
        """Count only the tensors of these storages."""
        for tensor in tensors_of(part):
            if tensor.layout is torch.strided:
                self._parts.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    def saving(self, layer: int) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which all that autograd saves is noted for ``layer``; nothing else changes."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            # An output that knows the node that keeps it would be a cycle.
            alone = tensor.detach()
            self._noted.append((layer, alone))
            return alone

        return torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is)

    def keep(self, layer: int, tensor: torch.Tensor) -> None:
        """Note a tensor that a layer keeps by other means than autograd."""
        self._noted.append((layer, tensor))

    def count(self, modules: Iterable[nn.Module] = ()) -> dict[int, int]:
        """Bytes by layer of the tensors noted since the last count, without what the ``modules`` hold."""
        weights = {
            held.untyped_storage().data_ptr()
            for module in modules
            for held in (*module.parameters(), *module.buffers())
            if held.layout is torch.strided
        }
        found: dict[int, int] = {}
        for layer, tensor in self._noted:
            # Sparse weights are held anyway.
            if tensor.layout is torch.strided:
                found[layer] = found.get(layer, 0) + self._bytes(tensor, weights)
        self._noted.clear()
        return found

    def _bytes(self, tensor: torch.Tensor, weights: set[int]) -> int:
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:
            # Inside torch.func, of a tensor that wraps another.
            return tensor.nbytes
        if address in weights or address in self._counted:
            return 0
        self._counted[address] = tensor
        part = self._parts.get(address)
        return storage.nbytes() if part is None else part.nbytes


def weight_gradient_bytes(output: Tree, sources: Iterable[Any] = ()) -> int:
    """Bytes of the gradients from which those of weights are computed, of one layer's graph.

    They flow into the nodes on the way to the layer's input that have weights beside them.  ``sources``:
    nodes whose outputs are its input; none: its input is a leaf, or has no gradient.
    """
    leads_to_input: dict[Any, bool] = {None: False}
    leads_to_input.update(dict.fromkeys(sources, True))
    total, waiting = 0, [tensor.grad_fn for tensor in tensors_of(output)]
    while waiting:
        node = waiting[-1]
        following = [] if node is None else [child for child, _ in node.next_functions if child is not None]
        unseen = [child for child in following if child not in leads_to_input]
        if unseen:
            waiting += unseen
            continue
        waiting.pop()
        if node is None or node in leads_to_input:
            continue
        ways = [leads_to_input[child] for child in following]
        leaf = getattr(node, "variable", None)
        leads_to_input[node] = any(ways) or (leaf is not None and not isinstance(leaf, nn.Parameter))
        if any(ways) and not all(ways):
            sizes = getattr(node, "_input_metadata", ())
            total += sum(math.prod(size.shape) * size.dtype.itemsize for size in sizes)
    return total


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
