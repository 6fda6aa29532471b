"""Models of the trainer's own text: a first layer, layers that are alike, and a head."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ballast_trainer.data.collate import Batch
from ballast_trainer.data.corpus import longest_context, text_batch
from ballast_trainer.models.protocol import Model


def text_model(
    first: tuple[str, Callable[[], nn.Module]],
    inner: tuple[str, Callable[[int], nn.Module]],
    last: tuple[str, Callable[[], nn.Module]],
    *,
    layers: int,
    context: int,
    **fields: Any,
) -> Model:
    """A model of ``layers`` layers on sequences of ``context`` bytes.

    Args:
        first: name and builder of layer 0, for errors.
        inner: those of the layers between, given a layer's index.
        last: those of the last layer.
        layers: of the model.
        context: longest sequence.
        fields: further ones of :class:`Model`.

    Raises:
        ValueError: fewer than 3 layers.
    """
    if layers < 3:
        raise ValueError(f"{layers} layers: {first[0]}, {last[0]} and at least one {inner[0]} make 3")

    def batch(seed: int, step: int, size: int) -> Batch:
        return text_batch(seed, step, size, context)

    vars(batch)["one_shape"] = True

    def build_layer(index: int) -> nn.Module:
        if index == 0:
            return first[1]()
        return last[1]() if index == layers - 1 else inner[1](index)

    return Model(
        independent_layers=True,
        layer_count=layers,
        build_layer=build_layer,
        **fields,
        batch=batch,
    )


def check_arguments(*, layers: int, context: int, dropout: float, **sizes: int) -> None:
    """Refuse what no model can be built of, before a layer is.

    Args:
        layers: of the model, its two ends among them.
        context: positions of a sample.
        dropout: probability.
        sizes: further counts by name, e.g. the width.

    Raises:
        ValueError: names the argument, its value and what it may be.
    """
    for name, value in {"layers": layers, "context": context, **sizes}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} {value!r} is no whole number from 1 on")
    if context > longest_context():
        raise ValueError(f"context {context}: the built-in text has samples of at most {longest_context()}")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout {dropout!r} is no probability from 0 to below 1")
