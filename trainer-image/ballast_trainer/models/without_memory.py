"""Layers that are built to be looked at, before any rank holds them."""

import torch
from torch import nn

from ballast_trainer.causes import with_place
from ballast_trainer.errors import ConfigurationError, TrainerError
from ballast_trainer.models.protocol import Model
from ballast_trainer.seeding import host_seeded


def layer_without_memory(model: Model, index: int) -> nn.Module:
    """The layer on the device meta: no memory for its weights, where it can be built so.

    Raises:
        ConfigurationError: it cannot be built at all.
    """
    with host_seeded():
        try:
            with torch.device("meta"):
                return model.build_layer(index)
        except Exception:  # a user's layer that computes with its weights as it is built
            return buildable(model, index)


def buildable(model: Model, index: int) -> nn.Module:
    """The layer, built as a rank builds it.

    Raises:
        ConfigurationError: it cannot be built; so no rank starts that would find out later.
    """
    try:
        layer = model.build_layer(index)
    except (TrainerError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a user's function may raise anything
        reason = f"layer {index} cannot be built: {with_place(error)}. To fix: the arguments, or the function"
        raise ConfigurationError("model.args", reason) from error
    if not isinstance(layer, nn.Module):
        reason = f"layer {index} is {type(layer).__name__}, no nn.Module. To fix: return a module"
        raise ConfigurationError("model.name", reason)
    return layer
