"""Layers of models, cut over a tensor group.

:func:`split_layer` knows the project's transformer block and the layers of transformers; register your
own with ``@split_layer_type.register``.  Layers of other types stay whole on every rank, which is correct
but saves nothing.
"""

import functools
from typing import Any

import torch
from ballast_policies.contract.job.job import JobConfig
from torch import nn
from torch.nn import functional

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.layers.slicing import slicings
from ballast_trainer.models.gpt import Attention, Block, Mlp
from ballast_trainer.models.hugging_face import DecoderLayer, RoutedLayer
from ballast_trainer.models.protocol import Model, buildable
from ballast_trainer.tensor_parallel.parallel_pair import (
    ColumnLinear,
    ParallelPair,
    RowLinear,
    Units,
    pairs,
)
from ballast_trainer.tensor_parallel.transformers_plan import check_cut_layer, cut_by_plan, kind_of_layer


class ParallelMlp(ParallelPair):
    """This rank's inner units of two linear maps with a GELU between."""

    names = "up", "down"

    def __init__(self, whole: Mlp, axis: Axis) -> None:
        up, down = ColumnLinear(whole.up, axis), RowLinear(whole.down, axis)
        super().__init__(axis, units=up.weight.shape[0])
        self.up, self.down = up, down

    def mix(self, between: torch.Tensor, units: Units, drawn: Any) -> torch.Tensor:
        """GELU."""
        return functional.gelu(between)


class ParallelAttention(ParallelPair):
    """This rank's heads of causal self-attention."""

    names = "qkv", "out"

    def __init__(self, whole: Attention, axis: Axis) -> None:
        if whole.heads % axis.size:
            raise ValueError(f"{whole.heads} heads do not divide over {axis.size} tensor ranks")
        super().__init__(axis, units=whole.heads // axis.size, blocks=3)
        self.heads = whole.heads
        self.dropout = whole.dropout
        self.qkv, self.out = ColumnLinear(whole.qkv, axis, blocks=3), RowLinear(whole.out, axis)

    def draw(self, value: torch.Tensor) -> torch.Tensor | None:
        """Dropout of the attention of all heads, [B, H, S, S]: 0 or 1 / (1 - p).

        Each rank draws for all heads and uses its own.  So the masks, and every later draw of the
        layer, are those of the whole model in one process on the CPU.
        """
        if not (self.training and self.dropout > 0):
            return None
        size, length, _ = value.shape
        kept = torch.empty(size, self.heads, length, length, device=value.device)
        return kept.bernoulli_(1 - self.dropout).div_(1 - self.dropout)

    def mix(self, between: torch.Tensor, units: Units, drawn: Any) -> torch.Tensor:
        """Attention of the heads: [B, S, 3 x heads x width] -> [B, S, heads x width]."""
        size, length, _ = between.shape
        q, k, v = between.view(size, length, 3, units.count, -1).permute(2, 0, 3, 1, 4)
        if drawn is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
            kept = drawn[:, units.first : units.first + units.count].to(q.dtype)
            mixed = (scores.softmax(-1) * kept) @ v
        return mixed.transpose(1, 2).reshape(size, length, -1)


@functools.singledispatch
def split_layer_type(module: nn.Module, axis: Axis) -> nn.Module:
    """The layer split over ``axis``, by its type, in place or as a new module; others stay whole."""
    return module


@split_layer_type.register
def _split_block(module: Block, axis: Axis) -> nn.Module:
    assert isinstance(module.attention, Attention) and isinstance(module.mlp, Mlp)
    module.attention = ParallelAttention(module.attention, axis)
    module.mlp = ParallelMlp(module.mlp, axis)
    return module


split_layer_type.register(DecoderLayer, cut_by_plan)


@split_layer_type.register
def _split_routed(module: RoutedLayer, axis: Axis) -> nn.Module:
    cut_by_plan(module.inner, axis)
    return module


def split_layer(module: nn.Module, axis: Axis) -> nn.Module:
    """A layer whose matrices are cut over the ranks of ``axis``; the layer itself where there is one rank.

    Raises:
        ValueError: heads or units do not divide over the ranks.
    """
    return module if axis.size == 1 else split_layer_type(module, axis)


def check_tensor_parallel(model: Model, config: JobConfig) -> None:
    """Refuse a model that cannot be cut, before ranks start.

    Raises:
        ConfigurationError: no layer can be cut, one cannot, or nothing can be done about its stragglers.
    """
    size = config.parallelism.tensor
    if size == 1:
        return
    axis, found, tried = Axis(ranks=tuple(range(size))), False, set()
    with torch.random.fork_rng():
        for index in range(model.layer_count):
            kept = None if model.kept_layer is None else model.kept_layer(index)
            kind = None if kept is None else kind_of_layer(kept)
            if found and (kind is None or kind in tried):
                continue
            tried.add(kind)
            module = buildable(model, index)
            try:
                if kind is not None:
                    check_cut_layer(module, size)
                split = split_layer(module, axis)
            except ValueError as error:
                fix = "" if "To fix" in str(error) else ". To fix: a divisor of it, or 1"
                raise ConfigurationError(
                    "parallelism.tensor", f"{size}: layer {index}: {error}{fix}"
                ) from error
            if not slicings(split):
                continue
            found = True
            policy = config.parallelism.stragglers.policy
            if policy != "none" and not pairs([split]):
                raise ConfigurationError(
                    "parallelism.stragglers.policy",
                    f"{policy}: layer {index} of {config.model_name!r} is cut without pairs of products "
                    "(ParallelPair), whose units could be left out or handed over. To fix: none",
                )
    if not found:
        raise ConfigurationError(
            "parallelism.tensor",
            f"no layer of {config.model_name!r} can be cut. To fix: set it to 1, or register your layers "
            "with ballast_trainer.tensor_parallel.layers.split_layer_type",
        )
