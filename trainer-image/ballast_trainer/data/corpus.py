"""The built-in corpus: the help topics of the running Python, as bytes, present on every machine.

``pydoc_data.topics`` is the Python language reference in English, about 700 KB, under the PSF
licence.  A batch is a pure function of seed and step, so it is the same on every rank, under every
partition, after every restart.
"""

import functools
import importlib

import numpy
import torch

VOCABULARY = 256
"""Bytes."""


@functools.cache
def _corpus() -> torch.Tensor:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def longest_context() -> int:
    """Most positions of a sample of the text."""
    return len(_corpus()) - 1


def text_batch(seed: int, step: int, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step: ``size`` random windows of the text.

    Returns:
        inputs, targets: int64 [size, context]; targets are the inputs shifted by one byte.
    """
    corpus = _corpus()
    starts = numpy.random.default_rng((seed, step)).integers(0, len(corpus) - context, size=size)
    windows = torch.stack([corpus[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
