"""Data whose topic changes while a job reads it: prose, then programs, then tables, then prose again.

What a model finds easy, and how it routes positions, changes with what it reads; so does the load of its
layers.
"""

import functools
import importlib
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

TOPICS = ("prose", "programs", "tables")
_PROGRAMS = ("argparse.py", "ast.py", "configparser.py", "inspect.py", "typing.py")
_TABLES = ("cp037.py", "cp437.py", "cp850.py", "cp1250.py", "cp1251.py", "koi8_r.py", "mac_roman.py")


@functools.cache
def text_of(topic: str) -> torch.Tensor:
    """Bytes, uint8 [N]: the language reference, modules and character tables that come with every Python."""
    library = Path(sysconfig.get_paths()["stdlib"])
    if topic == "prose":
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        parts = [topics[name] for name in sorted(topics)]
    elif topic == "programs":
        parts = [(library / name).read_text(encoding="utf-8") for name in _PROGRAMS]
    else:
        parts = [(library / "encodings" / name).read_text(encoding="utf-8") for name in _TABLES]
    return torch.frombuffer(bytearray("\n".join(parts).encode()), dtype=torch.uint8)


def in_order(context: int, steps: int) -> Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]:
    """A batch function: windows of one topic for ``steps`` steps, then of the next.

    Args:
        context: bytes in a window; targets are the inputs shifted by one byte.
        steps: that a topic lasts.
    """

    def batch(seed: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = text_of(TOPICS[step // steps % len(TOPICS)])
        starts = numpy.random.default_rng((seed, step)).integers(0, len(text) - context, size=size)
        windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    return batch
