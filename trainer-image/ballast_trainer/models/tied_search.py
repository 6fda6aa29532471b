"""Search of a whole model for tied weights, and the model that has them."""

import copy
import dataclasses
import logging
import time
from collections.abc import Sequence

import torch
from torch import nn

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.protocol import Model, buildable
from ballast_trainer.models.ties import Member, Tie, TieSearch, merged
from ballast_trainer.seeding import host_seeded, seed_build

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 30.0
"""Seconds after which no further layers are built and looked at."""


def find_ties(model: Model, *, seed: int) -> tuple[Tie, ...]:
    """The model's ties: those that it states, and those of parameters that its layers share.

    Layers that functions make are built one after the other, so one is in memory at a time.

    Args:
        model: whose layers to build.
        seed: as the job builds them.

    Raises:
        ConfigurationError: a layer cannot be built, or layers share what cannot be tied.
    """
    search = TieSearch()
    began = time.monotonic()
    for index in range(model.layer_count):
        if time.monotonic() - began > _LONGEST_SECONDS:
            logger.warning(
                "tied weights were looked for in layers 0 to %d only: building takes long. "
                "To fix: state them, Model(tied=...)",
                index - 1,
            )
            break
        kept = None if model.kept_layer is None else model.kept_layer(index)
        search.look_at(_built(model, index, seed) if kept is None else kept)
        try:
            search.add(index)
        except ValueError as error:
            raise ConfigurationError("model.name", str(error)) from error
    return merged([*model.tied, *search.ties()])


def _built(model: Model, index: int, seed: int) -> nn.Module:
    # Not on the device meta, where the caller may count operations: a cache would keep it.
    with host_seeded(), torch.device("cpu"):
        seed_build(seed=seed, layer=index)
        return buildable(model, index)


def with_ties(model: Model, ties: Sequence[Sequence[Member]], *, seed: int) -> Model:
    """The model with these ties, whose tied layers are copies of what its functions share.

    Args:
        model: the model.
        ties: all of them.
        seed: as the job builds the layers.
    """
    found = merged(ties)
    if not found:
        return model
    before = {
        layer: sorted({other for other, _ in tie if other < layer}) for tie in found for layer, _ in tie
    }

    def build_layer(index: int) -> nn.Module:
        if index not in before or (model.kept_layer is not None and model.kept_layer(index) is not None):
            return model.build_layer(index)
        # Where functions share a parameter by a cache, the first layer fills it, as in one process.
        earlier = [_built(model, layer, seed) for layer in before[index]]
        with torch.device("cpu"):
            layer = copy.deepcopy(model.build_layer(index))
        del earlier
        return layer

    return dataclasses.replace(model, tied=found, build_layer=build_layer)
