"""A model whose layers take the seconds that they are told, by sleeping, whatever else the machine does."""

import time
from typing import Any

import torch
from ballast_trainer.models.protocol import Model
from torch import nn

DIM = 16


MOST_OWED_SECONDS = 0.05

_owed = 0.0


def _sleep(seconds: float) -> None:
    """Sleep; what was overslept, as happens on a busy machine, comes off the next sleeps."""
    global _owed  # noqa: PLW0603 - one thread trains
    paid = min(_owed, seconds)
    began = time.perf_counter()
    if seconds > paid:
        time.sleep(seconds - paid)
    took = time.perf_counter() - began
    _owed = min(MOST_OWED_SECONDS, max(0.0, _owed + took - seconds))


class _Nap(torch.autograd.Function):
    """The value itself; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        _sleep(ctx.seconds)
        return gradient, None


class SleepingLayer(nn.Module):
    """[B, DIM] -> [B, DIM]; the backward takes twice the seconds of the forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self._seconds = seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Multiply and sleep."""
        _sleep(self._seconds)
        scaled: torch.Tensor = _Nap.apply(value * self.weight, 2 * self._seconds)
        return scaled


def build(layers: int, seconds: float) -> Model:
    """A model of ``layers`` layers; a forward of one takes ``seconds``."""
    # With one thread the trainer's meter reads the thread's CPU time, which a sleeping layer does not take.
    torch.set_num_threads(2)
    return Model(
        layer_count=layers,
        build_layer=lambda index: SleepingLayer(seconds),
        loss=nn.functional.mse_loss,
        batch=lambda seed, step, size: (torch.ones(size, DIM), torch.zeros(size, DIM)),
        independent_layers=True,
    )
