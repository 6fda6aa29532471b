"""Modules used for something else than training, and afterwards as they were."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from ballast_trainer.layers.buffers import copies_of, in_place
from ballast_trainer.seeding import host_seeded

_OWN = frozenset({"_parameters", "_buffers", "_modules"})


@contextlib.contextmanager
def evaluating(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """The modules in evaluation mode, without gradients; buffers, attributes and generators come back.

    Attributes come back where they were replaced, e.g. what a layer has counted in its newest forward; an
    object that was changed in place stays changed.

    Args:
        modules: layers.
        device: whose generator comes back, too.
    """
    whole = [part for module in modules for part in module.modules()]
    kept = [(part, {k: v for k, v in vars(part).items() if k not in _OWN}) for part in whole]
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with host_seeded(), in_place(copies_of(whole)), torch.no_grad():
        try:
            for part in whole:
                part.training = False
            yield
        finally:
            for part, attributes in kept:
                for name in vars(part).keys() - attributes.keys() - _OWN:
                    del vars(part)[name]
                vars(part).update(attributes)
            if of_device is not None:
                torch.cuda.set_rng_state(of_device, device)
