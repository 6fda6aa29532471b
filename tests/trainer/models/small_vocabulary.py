"""A model of 64 tokens and 8 positions, and data of which one batch may have others."""

import torch
from ballast_trainer.models.protocol import Model
from torch import nn


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 8), nn.Embedding(8, 8)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))


def build():
    layers = [Embedding(), nn.Linear(8, 8), nn.Linear(8, 64)]
    return Model.from_layers(
        layers, loss=lambda out, to: nn.functional.cross_entropy(out.flatten(0, 1), to.flatten())
    )


def batches(*, step, vocabulary, length, inputs=0, targets=0):
    def batch(seed, number, size):
        odd = number == step
        made = [torch.randint(0, vocabulary, (size, length if odd else 8)) for _ in range(2)]
        if odd:
            for tokens, value in zip(made, (inputs, targets), strict=True):
                tokens[-1, -1] = value or tokens[-1, -1]
        return tuple(made)

    return batch
