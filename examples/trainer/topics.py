"""Data whose topic changes while a job reads it, e.g. prose, then programs, then tables, then prose again.

What a model finds easy, and how it routes positions, changes with what it reads; so does the load of its
layers.
"""

import functools
import importlib
import sysconfig
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import torch

TOPICS = ("prose", "programs", "tables")
_MAPPED = 0x3000
"""Characters in the map: those before the signs of Chinese, Japanese and Korean, which have no capitals."""
_PROGRAMS = ("argparse.py", "ast.py", "configparser.py", "inspect.py", "typing.py")
_TABLES = ("cp037.py", "cp437.py", "cp850.py", "cp1250.py", "cp1251.py", "koi8_r.py", "mac_roman.py")


@functools.cache
def text_of(topic: str) -> torch.Tensor:
    """Bytes, uint8 [N]: the language reference, modules and character tables that come with every Python.

    Beside these, ``map`` has a byte for each character, which says whether it is a capital letter: nine in
    ten bytes are alike, as in masks, padded sequences and sparse tables.

    Raises:
        ValueError: there is no such topic.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    if topic == "prose":
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        parts = [topics[name] for name in sorted(topics)]
    elif topic == "programs":
        parts = [(library / name).read_text(encoding="utf-8") for name in _PROGRAMS]
    elif topic == "map":
        parts = ["".join(".#"[unicodedata.category(chr(code)) == "Lu"] for code in range(_MAPPED))]
    elif topic == "tables":
        parts = [(library / "encodings" / name).read_text(encoding="utf-8") for name in _TABLES]
    else:
        raise ValueError(f"topics: {topic!r} is none of {', '.join(TOPICS)}, map. To fix: one of these")
    return torch.frombuffer(bytearray("\n".join(parts).encode()), dtype=torch.uint8)


def in_order(
    context: int, steps: int, topics: Sequence[str] = TOPICS
) -> Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]:
    """A batch function: windows of one topic for ``steps`` steps, then of the next.

    Args:
        context: bytes in a window; targets are the inputs shifted by one byte.
        steps: that a topic lasts.
        topics: in their order; after the last the first one comes again.
    """

    def batch(seed: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = text_of(topics[step // steps % len(topics)])
        starts = numpy.random.default_rng((seed, step)).integers(0, len(text) - context, size=size)
        windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    return batch
