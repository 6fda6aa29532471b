"""Layers that are built to be looked at, before any rank holds them."""

import torch
from torch import nn

from ballast_trainer.models.protocol import Model
from ballast_trainer.seeding import host_seeded


def layer_without_memory(model: Model, index: int) -> nn.Module:
    """The layer on the device meta: no memory for its weights, where it can be built so."""
    with host_seeded():
        try:
            with torch.device("meta"):
                return model.build_layer(index)
        except Exception:  # a user's layer that computes with its weights as it is built
            return model.build_layer(index)
