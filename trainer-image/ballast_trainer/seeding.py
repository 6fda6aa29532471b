"""Seeds of random numbers, the same for every partition, schedule and restart.

Before a layer runs, the generators of torch (of the CPU, too, where it runs on a GPU), numpy and Python are
seeded from (seed, step, microbatch, layer).  So the random numbers of a layer are the same under every
partition, schedule and restart, and there is no generator state to move.
"""

import contextlib
import functools
import os
import random
from collections.abc import Iterator

import numpy
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


def seed_layer(device: torch.device, key: int, layer: int, *, torch_alone: bool = False) -> None:
    """Seed the host's generators and that of ``device`` for one layer's forward.

    ``key``: ``mixed_key(seed, step, microbatch)``, made once for all layers of a stage; ``torch_alone``: the
    layer draws from no other generator, and the others take as long as a small layer.
    """
    seed = _mixed(key, layer) >> 1
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    if torch_alone:
        torch.default_generator.manual_seed(seed)
    else:
        seed_host(seed)


def seed_build(*, seed: int, layer: int) -> None:
    """Seed the host's generators for building ``layer``: it starts with the same weights on any rank."""
    seed_host(mixed_key(seed, _BUILD, layer) >> 1)


def seed_host(seed: int) -> None:
    """Seed the generators of torch on the CPU, of numpy and of Python."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Torch's deterministic kernels alone; one that has none raises an error that names it."""
    # Read when cuBLAS starts; without it torch refuses its products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def host_seeded(seed: int | None = None) -> Iterator[None]:
    """The host's generators seeded with ``seed`` (None: unchanged), and restored afterwards."""
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    of_numpy = numpy.random.get_state()
    if seed is not None:
        seed_host(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
