"""Models of the trainer's own text: a first layer, layers that are alike, and a head."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ballast_trainer.data.corpus import text_batch
from ballast_trainer.models.loss_weights import LossWeight
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.ties import Tie


def text_model(
    first: tuple[str, Callable[[], nn.Module]],
    inner: tuple[str, Callable[[int], nn.Module]],
    last: tuple[str, Callable[[], nn.Module]],
    *,
    family: str,
    layers: int,
    context: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tied: Sequence[Tie] = (),
    loss_weight: LossWeight | None = None,
) -> Model:
    """A model of ``layers`` layers on sequences of ``context`` bytes.

    Args:
        first: name and builder of layer 0, for errors.
        inner: those of the layers between, given a layer's index.
        last: those of the last layer.
        family: see :class:`Model`, as are ``loss`` and ``tied``.
        layers: of the model.
        context: longest sequence.
        loss: of one microbatch.
        tied: parameters that layers share.
        loss_weight: see :class:`Model`.

    Raises:
        ValueError: fewer than 3 layers.
    """
    if layers < 3:
        raise ValueError(f"{layers} layers: {first[0]}, {last[0]} and at least one {inner[0]} make 3")

    def build_layer(index: int) -> nn.Module:
        if index == 0:
            return first[1]()
        return last[1]() if index == layers - 1 else inner[1](index)

    return Model(
        family=family,
        independent_layers=True,
        layer_count=layers,
        build_layer=build_layer,
        tied=tied,
        loss=loss,
        loss_weight=loss_weight,
        batch=lambda seed, step, size: text_batch(seed, step, size, context),
    )
