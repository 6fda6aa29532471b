"""The two ends of a tensor-parallel pair of products (Megatron-LM's f and g).

The input is whole on every rank, and so is the sum of the ranks' results; in between each rank
works on its part alone.  So a pair costs one all-reduce forward and one backward.
"""

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import torch

from ballast_trainer.distributed.axis import Axis, exchanged
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


def _summed(partial: torch.Tensor, axis: Axis, piggyback: Piggyback | None = None) -> torch.Tensor:
    """The sum over the ranks; with what travels on it."""
    extra = piggyback.load() if piggyback is not None else None
    if piggyback is None or extra is None:
        return axis.all_reduce(partial.contiguous().clone())
    both = torch.cat([partial.reshape(-1).to(extra.dtype), extra])
    axis.all_reduce(both)
    piggyback.unload(both[partial.numel() :])
    return both[: partial.numel()].view_as(partial).to(partial.dtype)


def _part(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    return value.chunk(axis.size, -1)[axis.index].contiguous()


def _whole(chunk: torch.Tensor, axis: Axis) -> torch.Tensor:
    return torch.cat(axis.all_gather(chunk), -1)


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
    return exchanged(value, functools.partial(_part, axis=axis), functools.partial(_whole, axis=axis))


@eager
def gather(chunk: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The reverse of :func:`scatter`, at the receiving stage: an all-gather inside its tensor group."""
    return exchanged(chunk, functools.partial(_whole, axis=axis), functools.partial(_part, axis=axis))


@eager
def copy_to_group(value: torch.Tensor, axis: Axis, piggyback: Piggyback | None = None) -> torch.Tensor:
    """The input of a pair, whole on every rank; its gradient is the sum over the ranks (f)."""
    if axis.size == 1:
        return value
    if piggyback is not None and torch.is_grad_enabled() and not value.requires_grad:
        # Above frozen layers the input needs no gradient, and there would be no backward all-reduce.
        value = value.detach().requires_grad_()
    summed = functools.partial(_summed, axis=axis, piggyback=piggyback)
    return exchanged(value, lambda whole: whole.view_as(whole), summed)


@eager
def reduce_from_group(partial: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The output of a pair: the sum over the ranks (g)."""
    if axis.size == 1:
        return partial
    return exchanged(partial, functools.partial(_summed, axis=axis), lambda gradient: gradient)
