"""The two ends of a tensor-parallel pair of products (Megatron-LM's f and g).

The input is whole on every rank, and so is the sum of the ranks' results; in between each rank
works on its part alone.  So a pair costs one all-reduce forward and one backward.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import ConfigurationError

_Function = TypeVar("_Function", bound=Callable[..., torch.Tensor])


def eager(function: _Function) -> _Function:
    """A function that is not compiled with its layer: what counts or times would be again in each step."""
    return cast(_Function, torch.compiler.disable(function))


class Piggyback(Protocol):
    """Numbers that travel on the backward's all-reduce."""

    def load(self) -> torch.Tensor | None:
        """This rank's contribution, flat; None where there is none yet, then on all ranks."""

    def unload(self, summed: torch.Tensor) -> None:
        """The sum over the ranks."""


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: Axis, piggyback: Piggyback | None) -> torch.Tensor:
        ctx.axis, ctx.piggyback = axis, piggyback
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        extra = ctx.piggyback.load() if ctx.piggyback is not None else None
        if extra is None:
            return ctx.axis.all_reduce(gradient.contiguous().clone()), None, None
        both = torch.cat([gradient.reshape(-1).to(extra.dtype), extra])
        ctx.axis.all_reduce(both)
        ctx.piggyback.unload(both[gradient.numel() :])
        return both[: gradient.numel()].view_as(gradient).to(gradient.dtype), None, None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, axis: Axis) -> torch.Tensor:
        return axis.all_reduce(partial.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return value.chunk(axis.size, -1)[axis.index].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.cat(ctx.axis.all_gather(gradient), -1), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return torch.cat(axis.all_gather(chunk), -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.axis.size, -1)[ctx.axis.index].contiguous(), None


@eager
def scatter(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[b, s, h], whole on every rank -> this rank's [b, s, h / t], which it sends to the next stage.

    The stages' tensor groups would otherwise send the same tensor t times; so each pair of ranks sends
    b s h / t numbers, forward and backward (scatter/gather optimisation of Megatron-LM's pipeline).

    Raises:
        ConfigurationError: h does not divide by t.
    """
    if value.shape[-1] % axis.size:
        raise ConfigurationError(
            "parallelism.scatterGather",
            f"activations {tuple(value.shape)} between stages do not divide over {axis.size} tensor ranks. "
            "To fix: set it to false",
        )
    chunk: torch.Tensor = _Scatter.apply(value, axis)
    return chunk


@eager
def gather(chunk: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The reverse of :func:`scatter`, at the receiving stage: an all-gather inside its tensor group."""
    value: torch.Tensor = _Gather.apply(chunk, axis)
    return value


@eager
def copy_to_group(value: torch.Tensor, axis: Axis, piggyback: Piggyback | None = None) -> torch.Tensor:
    """The input of a pair, whole on every rank; its gradient is the sum over the ranks (f)."""
    if axis.size == 1:
        return value
    if piggyback is not None and torch.is_grad_enabled() and not value.requires_grad:
        # Above frozen layers the input needs no gradient, and there would be no backward all-reduce.
        value = value.detach().requires_grad_()
    out: torch.Tensor = _CopyToGroup.apply(value, axis, piggyback)
    return out


@eager
def reduce_from_group(partial: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The output of a pair: the sum over the ranks (g)."""
    if axis.size == 1:
        return partial
    out: torch.Tensor = _ReduceFromGroup.apply(partial, axis)
    return out
