"""Data that every Python has."""

import importlib

import torch


class Texts:
    """Windows of the Python language reference, byte by byte; targets are the bytes that follow."""

    def __init__(self, length: int) -> None:
        topics = importlib.import_module("pydoc_data.topics").topics
        self.text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[index * self.length : (index + 1) * self.length + 1]
        return window[:-1], window[1:]
