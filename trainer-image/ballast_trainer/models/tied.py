"""Detection of tied weights: a parameter shared by layers, which two ranks could not share."""

import logging
import time
import weakref

from torch import nn

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.protocol import Model
from ballast_trainer.seeding import host_seeded, seed_build

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 30.0
"""Seconds after which no further layers are built and checked."""


def refuse_tied_layers(model: Model, *, seed: int) -> None:
    """Build the layers one by one, and refuse two that share a parameter.

    A parameter that outlives its layer is also referenced elsewhere: by a closure, a cache, another layer's
    module.  Only those are compared, so one layer at a time is in memory.

    Args:
        model: whose layers to build.
        seed: as the job builds them.

    Raises:
        ConfigurationError: names both layers and the parameter in each.
    """
    kept: dict[int, tuple[weakref.ref[nn.Parameter], int, str]] = {}
    began = time.monotonic()
    for index in range(model.layer_count):
        if time.monotonic() - began > _LONGEST_SECONDS:
            logger.warning(
                "tied weights were looked for in layers 0 to %d only: building takes long", index - 1
            )
            return
        with host_seeded():
            seed_build(seed=seed, layer=index)
            module = model.build_layer(index)
        found = [(name, id(p), weakref.ref(p)) for name, p in module.named_parameters()]
        del module
        for name, identity, reference in found:
            if reference() is None:
                continue
            known = kept.get(identity)
            if known is None or known[0]() is None:
                known = kept[identity] = (reference, index, name)
            if known[1] != index:
                raise ConfigurationError(
                    "model.name",
                    f"layers {known[1]} and {index} share a parameter ({known[2]!r}, {name!r}), and may "
                    "be on two ranks. To fix: untie them (Hugging Face: tie_word_embeddings=False)",
                )
