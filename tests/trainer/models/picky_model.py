"""A small model whose layers refuse to be loaded as long as a file is there, and its data."""

from pathlib import Path

import torch
from ballast_trainer.models.protocol import Model
from torch import nn

WIDTH = 8


class PickyLinear(nn.Linear):
    """Stands for whatever may go wrong where a layer arrives."""

    def __init__(self, refusing):
        super().__init__(WIDTH, WIDTH)
        self.refusing = Path(refusing)

    def _load_from_state_dict(self, *arguments):
        if self.refusing.exists():
            raise RuntimeError("refused by the test")
        super()._load_from_state_dict(*arguments)


def build(*, refusing, depth=8):
    """``depth`` layers of a regression."""
    return Model(
        layer_count=depth,
        build_layer=lambda index: nn.Sequential(PickyLinear(refusing), nn.Tanh(), nn.Dropout(0.1)),
        loss=nn.functional.mse_loss,
    )


def batches():
    """Running sums of random numbers."""

    def batch(seed, step, size):
        values = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1000 * seed + step))
        return values, values.cumsum(1)

    return batch
