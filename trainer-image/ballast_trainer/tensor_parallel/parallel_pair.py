"""A pair of matrix products over a tensor group, with one all-reduce forward and one backward.

Between the two products lie independent units (the inner units of an MLP, the heads of an attention),
an equal number on each rank.  For a while a rank may leave out contraction columns of its products
(:mod:`~ballast_trainer.tensor_parallel.product`) or hand its last units to other ranks
(:mod:`~ballast_trainer.tensor_parallel.migration`): helpers add their results to their own partial
sums, which the pair's all-reduce sums over all ranks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.slicing import SlicedModule, Slicing
from ballast_trainer.tensor_parallel.exchange import Piggyback, copy_to_group, reduce_from_group
from ballast_trainer.tensor_parallel.product import ColumnSelection, GemmTimer, product


class SlicedLinear(SlicedModule):
    """This rank's part of a whole ``nn.Linear``, so that any number of ranks starts with the same model."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, whole: nn.Linear, axis: Axis, slicings: dict[str, Slicing]) -> None:
        super().__init__()
        self.axis, self.slicings = axis, slicings
        for name, parameter in whole.named_parameters():
            held = parameter.detach()
            if name in slicings:
                held = slicings[name].part(held, axis.index, axis.size)
            setattr(self, name, nn.Parameter(held.clone(), requires_grad=parameter.requires_grad))
        if whole.bias is None:
            self.bias = None


class ColumnLinear(SlicedLinear):
    """Each rank makes some of the output features: weight [out / t, in], bias [out / t]."""

    def __init__(self, whole: nn.Linear, axis: Axis, *, blocks: int = 1) -> None:
        """Take this rank's output features; ``blocks`` as of :class:`Slicing`: 3 for query, key and value.

        Raises:
            ValueError: the features do not divide.
        """
        slicing = Slicing(dim=0, blocks=blocks)
        super().__init__(whole, axis, {"weight": slicing, "bias": slicing})

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """[..., in], in the group by :func:`copy_to_group` -> this rank's [..., out / t]."""
        return functional.linear(value, self.weight, self.bias)


class RowLinear(SlicedLinear):
    """Each rank takes some of the input features: weight [out, in / t]; the bias is whole, added once."""

    def __init__(self, whole: nn.Linear, axis: Axis) -> None:
        """Take this rank's input features.

        Raises:
            ValueError: the features do not divide.
        """
        super().__init__(whole, axis, {"weight": Slicing(dim=1)})

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's [..., in / t] -> [..., out], whole on every rank."""
        summed = reduce_from_group(functional.linear(value, self.weight), self.axis)
        return summed if self.bias is None else summed + self.bias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Weights of some units of a pair, as one rank computes with them.

    Attributes:
        first: global number of the first unit.
        count: how many.
        inner, inner_bias: [rows, D] and [rows] or None, of the first product.
        outer: [D, rows], of the second.
    """

    first: int
    count: int
    inner: torch.Tensor
    inner_bias: torch.Tensor | None
    outer: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """The weights there are."""
        return [tensor for tensor in (self.inner, self.inner_bias, self.outer) if tensor is not None]


class ParallelPair(nn.Module):
    """Two sliced linear layers with independent units between.

    A subclass names the attributes that hold its two layers.

    Attributes:
        units: of this rank.
        blocks: parts of the inner layer's rows that each have all units: 3 for query, key and value.
        handed_over: how many of its last units others compute, this step.
        helped: units of other ranks that this rank computes, this step.
        piggyback: carries the gradients of units handed over, on the backward all-reduce.
        selections: contraction columns computed this step, by ``inner`` and ``outer``.
        clock: times the products.
        rows: positions of the last microbatch, over all of its sequences.
    """

    names: tuple[str, str]

    def __init__(self, axis: Axis, *, units: int, blocks: int = 1) -> None:
        super().__init__()
        self.axis = axis
        self.units = units
        self.blocks = blocks
        self.handed_over = 0
        self.helped: tuple[Units, ...] = ()
        self.piggyback: Piggyback | None = None
        self.selections: dict[str, ColumnSelection] = {}
        self.clock = GemmTimer(torch.device("cpu"))
        self.rows = 1

    @property
    def inner(self) -> ColumnLinear:
        """The first layer."""
        found: ColumnLinear = getattr(self, self.names[0])
        return found

    @property
    def outer(self) -> RowLinear:
        """The second layer."""
        found: RowLinear = getattr(self, self.names[1])
        return found

    def units_at(self, first: int, count: int) -> Units:
        """The weights of this rank's units ``first`` to ``first + count``, those of a block together."""
        weight: torch.Tensor = self.inner.weight
        bias: torch.Tensor | None = self.inner.bias
        if count < self.units:
            blocks = (self.blocks, self.units, -1)
            weight = weight.view(*blocks, weight.shape[1])[:, first : first + count].flatten(0, 2)
            bias = None if bias is None else bias.view(*blocks)[:, first : first + count].flatten()
        width = self.outer.weight.shape[1] // self.units
        return Units(
            first=self.axis.index * self.units + first,
            count=count,
            inner=weight,
            inner_bias=bias,
            outer=self.outer.weight[:, first * width : (first + count) * width],
        )

    def draw(self, value: torch.Tensor) -> Any:
        """Random numbers of a forward, the same on every rank, for units of any rank."""
        return None

    def mix(self, between: torch.Tensor, units: Units, drawn: Any) -> torch.Tensor:
        """From the first product's output to the second's input: [..., rows] of the units."""
        raise NotImplementedError

    def _partial(
        self, value: torch.Tensor, units: Units, drawn: Any, selections: dict[str, ColumnSelection]
    ) -> torch.Tensor:
        between = product(
            value, units.inner, units.inner_bias, selection=selections.get("inner"), clock=self.clock
        )
        mixed = self.mix(between, units, drawn)
        return product(mixed, units.outer, None, selection=selections.get("outer"), clock=self.clock)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D], whole on every rank."""
        value = copy_to_group(value, self.axis, self.piggyback)
        self.rows = value.numel() // value.shape[-1]
        drawn = self.draw(value)
        own = self.units_at(0, self.units - self.handed_over)
        partial = self._partial(value, own, drawn, self.selections)
        for units in self.helped:
            partial = partial + self._partial(value, units, drawn, {})
        summed = reduce_from_group(partial, self.axis)
        return summed if self.outer.bias is None else summed + self.outer.bias


def pairs(modules: Sequence[nn.Module]) -> list[ParallelPair]:
    """The pairs inside of layers, in the order of their definition: the same on every rank of the group."""
    return [child for module in modules for child in module.modules() if isinstance(child, ParallelPair)]
