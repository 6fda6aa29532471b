"""Layers of models, cut over a tensor group.

:func:`split_layer` knows the project's transformer block; register your own with
``@split_layer_type.register``.  What it does not know stays whole on every rank, which is correct and
saves nothing.
"""

import functools

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.models.gpt import Attention, Block, Mlp
from ballast_trainer.runtime.axis import Axis
from ballast_trainer.tensor_parallel.exchange import collect, spread
from ballast_trainer.tensor_parallel.linear import ColumnLinear, RowLinear


class ParallelMlp(nn.Module):
    """This rank's inner units of two linear maps with a non-linearity between."""

    def __init__(self, up: nn.Linear, down: nn.Linear, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.up = ColumnLinear(up, axis)
        self.down = RowLinear(down, axis)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D], whole on every rank."""
        value = spread(value, self.axis)
        partial = self.down(functional.gelu(self.up(value)))
        summed = collect(partial, self.axis)
        return summed if self.down.bias is None else summed + self.down.bias


class ParallelAttention(nn.Module):
    """This rank's heads of causal self-attention."""

    def __init__(self, whole: Attention, axis: Axis) -> None:
        super().__init__()
        if whole.heads % axis.size:
            raise ValueError(f"{whole.heads} heads do not divide over {axis.size} tensor ranks")
        self.axis = axis
        self.all_heads = whole.heads
        self.heads = whole.heads // axis.size
        self.dropout = whole.dropout
        self.qkv = ColumnLinear(whole.qkv, axis, blocks=3)
        self.out = RowLinear(whole.out, axis)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D], whole on every rank."""
        hidden = spread(hidden, self.axis)
        size, length, _ = hidden.shape
        q, k, v = self.qkv(hidden).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        first = self.axis.index * self.heads
        mixed = self._attend(q, k, v, range(first, first + self.heads))
        partial = self.out(mixed.transpose(1, 2).reshape(size, length, -1))
        summed = collect(partial, self.axis)
        return summed if self.out.bias is None else summed + self.out.bias

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: range) -> torch.Tensor:
        if not (self.training and self.dropout > 0):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        # Dropout draws for all heads and uses its own: then masks, and every later draw of the layer,
        # are those of the whole model in one process on the CPU.
        size, _, length, width = q.shape
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * width**-0.5).masked_fill(later, -torch.inf)
        kept = torch.empty(size, self.all_heads, length, length, device=q.device, dtype=q.dtype)
        kept = kept.bernoulli_(1 - self.dropout)[:, heads.start : heads.stop] / (1 - self.dropout)
        return (scores.softmax(-1) * kept) @ v


@functools.singledispatch
def split_layer_type(module: nn.Module, axis: Axis) -> nn.Module:
    """The layer cut over ``axis``, by its type; in place or anew. A layer of unknown type stays whole."""
    return module


@split_layer_type.register
def _split_block(module: Block, axis: Axis) -> nn.Module:
    assert isinstance(module.attention, Attention) and isinstance(module.mlp, Mlp)
    module.attention = ParallelAttention(module.attention, axis)
    module.mlp = ParallelMlp(module.mlp.up, module.mlp.down, axis)
    return module


def split_layer(module: nn.Module, axis: Axis) -> nn.Module:
    """A layer whose matrices are cut over the ranks of ``axis``; the layer itself where there is one rank.

    Raises:
        ValueError: heads or units do not divide over the ranks.
    """
    return module if axis.size == 1 else split_layer_type(module, axis)
