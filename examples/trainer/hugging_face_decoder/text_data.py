"""Data of one's own: a dataset that can be indexed; the trainer shuffles it the same way on every rank."""

import importlib

import torch


class Windows:
    """Windows of a text, byte by byte; targets are the inputs shifted by one.

    The text is the Python language reference that comes with every Python.
    """

    def __init__(self, context: int) -> None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._context
        window = self._text[start : start + self._context + 1]
        return window[:-1], window[1:]
