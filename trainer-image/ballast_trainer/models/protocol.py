"""What the trainer needs to know of a model: two functions.

``build_layer(index)`` makes one layer; the model is the composition of layers 0 to
``layer_count`` - 1, each taking what the one before it returns (one tensor).  The first takes the
batch's inputs, the last returns what ``loss(output, targets)`` scores.  A rank builds only the
layers it holds; the trainer seeds torch's generator per layer before it calls ``build_layer``, so
that a layer starts with the same weights wherever it is built.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as a list of layers.

    Attributes:
        family: what kind it is (``transformer``, ``recurrent``, ...); throughput differs by it.
        layer_count: how many layers there are.
        build_layer: makes layer ``index``; called on any rank, at any time, in any order.
        loss: mean loss of one microbatch, from the last layer's output and the targets.
        batch: inputs and targets of a step, ``batch(seed, step, size)`` -> tensors whose first
            dimension is ``size``; a pure function, so that every rank sees the same order.
    """

    family: str
    layer_count: int
    build_layer: Callable[[int], nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: Callable[[int, int, int], Batch]

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[Callable[[], nn.Module]],
        *,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        batch: Callable[[int, int, int], Batch],
        family: str = "custom",
    ) -> "Model":
        """A model from a list of functions that each make a layer."""
        return cls(
            family=family,
            layer_count=len(layers),
            build_layer=lambda index: layers[index](),
            loss=loss,
            batch=batch,
        )
