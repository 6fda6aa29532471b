"""The two ends of a tensor-parallel pair of products (Megatron-LM's f and g).

The input is whole on every rank, and so is the sum of what the ranks make of it; in between each rank
works on its part alone.  So a pair costs one all-reduce forward and one backward.
"""

from typing import Any

import torch

from ballast_trainer.runtime.axis import Axis


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradient.contiguous().clone()
        return ctx.axis.all_reduce(summed), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, axis: Axis) -> torch.Tensor:
        summed = partial.contiguous().clone()
        return axis.all_reduce(summed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def spread(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The input of a pair, whole on every rank; its gradient is the sum over the ranks (f)."""
    if axis.size == 1:
        return value
    out: torch.Tensor = _Spread.apply(value, axis)
    return out


def collect(partial: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The output of a pair: the sum over the ranks (g)."""
    if axis.size == 1:
        return partial
    out: torch.Tensor = _Collect.apply(partial, axis)
    return out
