"""Layers of a small model that have computed the gradients of one batch."""

import torch
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.precision import computing_in
from ballast_trainer.models.gpt import build_gpt

CPU = torch.device("cpu")


def trained_layers(config, *, seed=3):
    """Layers of a small model with the gradients of one batch, not yet learnt from."""
    model = build_gpt(layers=4, dim=16, heads=2, context=8, dropout=0.0)
    layers = LayerSet(model, config, CPU, lambda index, module: module)
    layers.hold(layers.make(index) for index in range(4))
    inputs, targets = model.batch(seed, 0, 4)
    value = inputs
    with computing_in(config.precision, CPU):
        for layer in layers:
            value = layer.module(value)
    return layers, lambda scale: (scale.scaled(model.loss)(value, targets)).backward()


def weights(layers):
    return [parameter.detach().clone() for parameter in layers.parameters()]
