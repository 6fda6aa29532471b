"""Seeds of random numbers, the same for every partition, schedule and restart.

Before a layer runs, torch's generator is seeded from (seed, step, microbatch, layer).  So dropout
is the same under every partition, schedule and restart, and there is no generator state to move.
"""

import functools

import torch

_MASK = (1 << 64) - 1
_BUILD = 0xB01D


def _mixed(state: int, part: int) -> int:
    state = (state ^ (part & _MASK)) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def mixed_key(*parts: int) -> int:
    """One 64-bit key from several integers (splitmix64's finaliser over each in turn)."""
    return functools.reduce(_mixed, parts, 0x9E3779B97F4A7C15)


def seed_layer(device: torch.device, key: int, layer: int) -> None:
    """Seed the generator of ``device`` for one layer's forward.

    Args:
        device: where the layer runs.
        key: ``mixed_key(seed, step, microbatch)``, made once for all layers of a stage.
        layer: its index.
    """
    seed = _mixed(key, layer) >> 1
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_build(*, seed: int, layer: int) -> None:
    """Seed the CPU generator for building ``layer``: it starts with the same weights on any rank."""
    torch.default_generator.manual_seed(mixed_key(seed, _BUILD, layer) >> 1)
