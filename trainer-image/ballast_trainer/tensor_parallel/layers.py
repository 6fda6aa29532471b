"""Layers of models, cut over a tensor group.

:func:`split_layer` knows the project's transformer block and the layers of transformers; register your
own with ``@split_layer_type.register``.  Layers of other types stay whole on every rank, which is correct
but saves nothing.
"""

import functools

import torch
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import StragglerPolicy
from torch import nn

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.layers.layer import refuse_whole_matrices
from ballast_trainer.layers.slicing import slicings
from ballast_trainer.models.gpt import Attention, Block, Mlp
from ballast_trainer.models.hugging_face import DecoderLayer, RoutedLayer
from ballast_trainer.models.protocol import Model, buildable
from ballast_trainer.tensor_parallel.parallel_pair import ColumnLinear, ParallelPair, RowLinear, pairs
from ballast_trainer.tensor_parallel.transformers_plan import check_cut_layer, cut_by_plan, kind_of_layer


class CutAttention(Attention):
    """This rank's heads of causal self-attention."""

    def __init__(self, whole: Attention, axis: Axis) -> None:
        """Take them.

        Raises:
            ValueError: they do not divide.
        """
        nn.Module.__init__(self)
        if whole.heads % axis.size:
            raise ValueError(f"{whole.heads} heads do not divide over {axis.size} tensor ranks")
        self.heads, self.head_dim, self.dropout = whole.heads, whole.head_dim, whole.dropout
        qkv, out = ColumnLinear(whole.qkv, axis, blocks=3), RowLinear(whole.out, axis)
        self.add_module("qkv", qkv)
        self.add_module("out", out)
        self._pair = ParallelPair([qkv], out, units=whole.heads // axis.size)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of these heads, with dropout drawn for all.

        Each rank draws for all heads and uses its own.  So the masks, and every later draw of the
        layer, are those of the whole model in one process on the CPU.
        """
        if not (self.training and self.dropout > 0):
            return super().attend(q, k, v)
        size, _, length, _ = q.shape
        kept = torch.empty(size, self.heads, length, length, device=q.device)
        kept = kept.bernoulli_(1 - self.dropout).div_(1 - self.dropout)[:, self._pair.unit_numbers()]
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
        mixed: torch.Tensor = (scores.softmax(-1) * kept.to(q.dtype)) @ v
        return mixed


@functools.singledispatch
def split_layer_type(module: nn.Module, axis: Axis) -> nn.Module:
    """The layer split over ``axis``, by its type, in place or as a new module; others stay whole."""
    return module


@split_layer_type.register
def _split_block(module: Block, axis: Axis) -> nn.Module:
    assert isinstance(module.attention, Attention) and isinstance(module.mlp, Mlp)
    module.attention = CutAttention(module.attention, axis)
    up, down = ColumnLinear(module.mlp.up, axis), RowLinear(module.mlp.down, axis)
    ParallelPair([up], down, units=up.weight.shape[0])
    module.set_submodule("mlp.up", up)
    module.set_submodule("mlp.down", down)
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
        ConfigurationError: no layer can be cut, one cannot, its optimizer needs whole matrices, or nothing
            can be done about its stragglers.
    """
    size = config.parallelism.tensor
    if size == 1:
        return
    refuse_whole_matrices(config.training)
    policy = config.parallelism.stragglers.policy
    migrates = policy in {StragglerPolicy.MIGRATE, StragglerPolicy.SEMI}
    axis, found, tried = Axis(ranks=tuple(range(size))), False, set()
    relieved, without = policy == StragglerPolicy.NONE, set()
    with torch.random.fork_rng():
        for index in range(model.layer_count):
            kept = model.kept_layer(index)
            kind = None if kept is None else kind_of_layer(kept)
            if found and (kind is None or kind in tried):
                continue
            tried.add(kind)
            module = buildable(model, index)
            field, value = "parallelism.tensor", str(size)
            try:
                if kind is not None:
                    check_cut_layer(module, size)
                    if migrates:
                        field, value = "parallelism.stragglers.policy", policy
                        check_cut_layer(buildable(model, index), size, migrates=True)
                split = split_layer(module, axis)
            except ValueError as error:
                fix = "" if "To fix" in str(error) else ". To fix: a divisor of it, or 1"
                raise ConfigurationError(field, f"{value}: layer {index}: {error}{fix}") from error
            if not slicings(split):
                continue
            found = True
            # Of one unit nothing is handed over.
            relieved |= any(policy != StragglerPolicy.MIGRATE or pair.units > 1 for pair in pairs([split]))
            without.add((type(module) if kind is None else kind[0]).__name__)
    if not found:
        raise ConfigurationError(
            "parallelism.tensor",
            f"no layer of {config.model_name!r} can be cut. To fix: set it to 1, or register your layers "
            "with ballast_trainer.tensor_parallel.layers.split_layer_type",
        )
    if not relieved:
        raise ConfigurationError(
            "parallelism.stragglers.policy",
            f"{policy}: {', '.join(sorted(without))} of {config.model_name!r}: cut without pairs of products "
            "(ParallelPair), whose columns could be left out or units handed over. To fix: none",
        )
