"""Bytes that a layer keeps from its forward to its backward, and bytes that it hands on."""

import dataclasses

import torch
from torch import nn

from ballast_trainer.runtime.layers import Layer, LayerSet
from ballast_trainer.runtime.precision import computing_in


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Of one layer and one microbatch, in bytes.

    Attributes:
        kept: held until the backward; what several layers keep counts for the first of them.
        output: handed to the next layer.
    """

    kept: int
    output: int


def activations_of(layers: LayerSet, inputs: torch.Tensor, device: torch.device) -> dict[int, Activations]:
    """Run one microbatch forward through all layers, and count.

    Args:
        layers: the whole model.
        inputs: of one microbatch.
        device: where they are.
    """
    found: dict[int, Activations] = {}
    counted: dict[int, torch.Tensor] = {}
    value = inputs.to(device)
    for layer in layers:
        config = layer.config
        with computing_in(config.precision, device):
            if config.recompute:
                kept = _count(value, counted, layer.module)
                with torch.no_grad():
                    value = layer.module(value)
            else:
                kept, value = _forward(layer, value, counted)
        found[layer.index] = Activations(kept=kept, output=value.nbytes)
    return found


def _forward(layer: Layer, value: torch.Tensor, counted: dict[int, torch.Tensor]) -> tuple[int, torch.Tensor]:
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += _count(tensor, counted, layer.module)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer.module(value)
    return kept, output


def _count(tensor: torch.Tensor, counted: dict[int, torch.Tensor], module: nn.Module) -> int:
    """Bytes of the tensor's storage, where it was not counted before and is no weight."""
    if tensor.layout is not torch.strided:
        # Sparse weights: they are held anyway.
        return 0
    storage = tensor.untyped_storage()
    own = {held.untyped_storage().data_ptr() for held in (*module.parameters(), *module.buffers())}
    if storage.data_ptr() in own or storage.data_ptr() in counted:
        return 0
    # Kept alive, so that no other tensor takes its address.
    counted[storage.data_ptr()] = tensor
    return storage.nbytes()
