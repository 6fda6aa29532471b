"""Linear maps in pairs over a tensor group, with one all-reduce forward and one backward.

Column-cut maps of one input (two, where queries and keys are latent), and a row-cut map of what their layer
makes of the outputs: the two of an MLP or the three of a gated one (two where gates and the rest are one
matrix), the projections of an attention; and the halves of their adapters (LoRA) that are cut.  Between them
lie independent units (inner units of an MLP, heads of an attention, of grouped queries a key head with its
queries), an equal number on each rank.

For a while a rank may leave out contraction columns of its products
(:mod:`~ballast_trainer.tensor_parallel.product`) or hand its last units to other ranks
(:mod:`~ballast_trainer.tensor_parallel.migration`): helpers compute them beside their own, and the pair's
all-reduce sums over all ranks.  A layer of a pair must therefore compute with any number of units.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.slicing import SlicedModule, Slicing
from ballast_trainer.models.blocks import is_conv1d
from ballast_trainer.tensor_parallel.exchange import Piggyback, copy_to_group, eager, reduce_from_group
from ballast_trainer.tensor_parallel.product import ColumnSelection, GemmTimer, product


class SharedInput:
    """State that column-cut maps of one input share: one all-reduce of its gradient for all of them.

    Where latent queries and keys are two inputs, each has one.

    Attributes:
        readers: how many they are.
        piggyback: travels on that all-reduce, of the input that is read first, whose gradient is there last;
            None: nothing does.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis, self.readers = axis, 0
        self.carry(None)
        self._learns = False

    def carry(self, piggyback: Piggyback | None) -> None:
        """Set what travels in the next step."""
        self.piggyback, self._left = piggyback, 0
        self._value: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None

    @eager
    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """Value before the product of one of them."""
        learns, rides = torch.is_grad_enabled(), None
        # Of a forward that not all of them have read, a copy without gradients may be left.
        if self._left == 0 or self._learns is not learns:
            self._learns, self._left, self._value, rides = learns, self.readers, None, self.piggyback
        if self._value is not value:
            self._value, self._copy = value, copy_to_group(value, self._axis, rides)
        copied = self._copy
        assert copied is not None
        self._left -= 1
        if self._left == 0:
            self._value = self._copy = None
        return copied


class _Member(SlicedModule):
    """This rank's part of a module, so that any number of ranks starts with the same model.

    Attributes:
        pair: that it is one of; None: it is in none.
        selection: contraction columns computed this step; None: all.
    """

    weight: nn.Parameter
    selection: ColumnSelection | None = None

    def __init__(self, whole: nn.Module, axis: Axis, slicings: dict[str, Slicing]) -> None:
        super().__init__()
        self.axis, self.slicings = axis, slicings
        self.pair: ParallelPair | None = None
        for name, parameter in whole.named_parameters():
            held = parameter.detach()
            if name in slicings:
                held = slicings[name].part(held, axis.index, axis.size)
            setattr(self, name, nn.Parameter(held.clone(), requires_grad=parameter.requires_grad))

    def cut(self) -> Iterator[tuple[str, nn.Parameter, Slicing]]:
        """Its parameters that are cut, by name, and how."""
        return (
            (name, one, self.slicings[name]) for name, one in self.named_parameters() if name in self.slicings
        )

    def units_at(self, units: int, first: int, count: int) -> dict[str, torch.Tensor]:
        """Weights of ``count`` of its ``units`` from ``first`` on: views, where blocks allow."""
        return {
            name: way.joined(way.by_unit(one, units).narrow(way.dim + 1, first, count))
            for name, one, way in self.cut()
        }

    def _parts(self) -> list[tuple[dict[str, torch.Tensor], ColumnSelection | None]]:
        """Weights of the units that this rank computes, its own and others'; selected are its own columns."""
        pair = self.pair
        if pair is None or not (pair.handed_over or pair.helped):
            return [(dict(self.named_parameters()), self.selection)]
        own = self.units_at(pair.units, 0, pair.units - pair.handed_over)
        place = pair.members.index(self)
        return [(own, self.selection), *((units.tensors[place], None) for units in pair.helped)]


class CutNorm(_Member):
    """An RMS norm of features that are cut: the mean square is of those of all ranks, the weights are cut."""

    def __init__(self, whole: Any, axis: Axis) -> None:
        """Take this rank's features.

        Raises:
            ValueError: they do not divide.
        """
        super().__init__(whole, axis, {"weight": Slicing(dim=0)})
        self._features, self.variance_epsilon = len(whole.weight), whole.variance_epsilon

    def forward(self, value: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """[..., features / t] -> the same, as transformers computes it; gated at first, by silu."""
        hidden = value.float()
        if gate is not None:
            hidden = hidden * functional.silu(gate.float())
        squares = reduce_from_group(hidden.square().sum(-1, keepdim=True), self.axis)
        mean = copy_to_group(squares, self.axis) / self._features
        weight = torch.cat([one["weight"] for one, _ in self._parts()])
        return weight * (hidden * torch.rsqrt(mean + self.variance_epsilon)).to(value.dtype)


class SlicedLinear(_Member):
    """Part of an ``nn.Linear``, or of a map with a transposed weight, [in, out], as transformers' ``Conv1D``.

    Attributes:
        transposed: whether its weight is.
    """

    bias: nn.Parameter | None

    def __init__(self, whole: nn.Module, axis: Axis, slicings: dict[str, Slicing]) -> None:
        transposed = is_conv1d(whole)
        if transposed:
            way = slicings["weight"]
            slicings = slicings | {"weight": dataclasses.replace(way, dim=1 - way.dim)}
        super().__init__(whole, axis, slicings)
        self.transposed = transposed
        if whole.bias is None:
            self.bias = None

    @property
    def matrix(self) -> torch.Tensor:
        """Its weight as [out, in]."""
        return self.as_matrix(self.weight)

    def as_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight of its kind as [out, in]."""
        return weight.t() if self.transposed else weight

    def _product(
        self, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, of: ColumnSelection | None
    ) -> torch.Tensor:
        matrix = self.as_matrix(weight)
        if self.pair is None:
            return functional.linear(value, matrix, bias)
        return product(value, matrix, bias, selection=of, clock=self.pair.clock)


class ColumnLinear(SlicedLinear):
    """Each rank makes some of the output features: weight [out / t, in], bias [out / t]."""

    def __init__(
        self, whole: nn.Module, axis: Axis, *, blocks: int = 1, given: SharedInput | None = None
    ) -> None:
        """Take this rank's output features.

        Args:
            whole: the map, an ``nn.Linear`` or a ``Conv1D`` of transformers.
            axis: the tensor group.
            blocks: as of :class:`Slicing`: 3 for query, key and value, 2 for gates and what they are for.
            given: the input, shared with other maps of it.

        Raises:
            ValueError: the features do not divide.
        """
        slicing = Slicing(dim=0, blocks=blocks)
        super().__init__(whole, axis, {"weight": slicing, "bias": slicing})
        self.blocks = blocks
        self.given = SharedInput(axis) if given is None else given
        self.given.readers += 1

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """[..., in], whole on every rank -> [..., out / t]: of the units that this rank computes."""
        value = self.given(value)
        made = [self._product(value, one["weight"], one.get("bias"), of) for one, of in self._parts()]
        if len(made) == 1:
            return made[0]
        return torch.cat([one.unflatten(-1, (self.blocks, -1)) for one in made], -1).flatten(-2)


class RowLinear(SlicedLinear):
    """Each rank takes some of the input features: weight [out, in / t]; the bias is whole, added once."""

    def __init__(self, whole: nn.Module, axis: Axis) -> None:
        """Take this rank's input features.

        Raises:
            ValueError: the features do not divide.
        """
        super().__init__(whole, axis, {"weight": Slicing(dim=1)})

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """[..., in / t], as the column-cut maps made them -> [..., out], whole on every rank."""
        if self.pair is not None:
            self.pair.rows = value.numel() // value.shape[-1]
        parts = self._parts()
        pieces = value.split([self.as_matrix(one["weight"]).shape[1] for one, _ in parts], -1)
        partial = self._product(pieces[0], parts[0][0]["weight"], None, parts[0][1])
        for piece, (one, of) in zip(pieces[1:], parts[1:], strict=True):
            partial = partial + self._product(piece, one["weight"], None, of)
        summed = reduce_from_group(partial, self.axis)
        return summed if self.bias is None else summed + self.bias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Weights of some units of a pair, as another rank computes with them.

    Attributes:
        first: global number of the first unit.
        count: how many.
        tensors: of each of the pair's members, by the name of the parameter.
    """

    first: int
    count: int
    tensors: tuple[dict[str, torch.Tensor], ...]


class ParallelPair:
    """Column-cut maps of one input and the row-cut one after them, with independent units between.

    Attributes:
        axis: the tensor group.
        linears: the maps; the row-cut one comes last, with its adapter's.
        members: they, and norms of the features between.
        units: of this rank.
        handed_over: how many of its last units others compute, this step.
        helped: units of other ranks that this rank computes, this step.
        clock: times the products.
        rows: positions of the last microbatch, over all of its sequences.
    """

    def __init__(
        self, inner: Sequence[ColumnLinear], *outer: RowLinear, units: int, norms: Sequence[CutNorm] = ()
    ) -> None:
        """Join maps of one group; ``units`` divide the features that are cut."""
        self.axis = outer[0].axis
        self.linears: tuple[SlicedLinear, ...] = (*inner, *outer)
        self.members: tuple[_Member, ...] = (*self.linears, *norms)
        self.units = units
        self.handed_over = 0
        self.helped: tuple[Units, ...] = ()
        self.clock = GemmTimer(torch.device("cpu"))
        self.rows = 1
        self.given = inner[0].given
        for member in self.members:
            member.pair = self

    @property
    def learns(self) -> bool:
        """True if some of its weights have gradients."""
        return any(one.requires_grad for member in self.members for _, one, _ in member.cut())

    @property
    def device(self) -> torch.device:
        """Device of its weights."""
        return self.linears[-1].weight.device

    def compute_whole(self) -> None:
        """Leave nothing out, and compute each unit on its own rank, as between two steps."""
        self.handed_over, self.helped = 0, ()
        self.given.carry(None)
        for linear in self.linears:
            linear.selection = None

    def units_at(self, first: int, count: int) -> Units:
        """The weights of this rank's units ``first`` to ``first + count``."""
        tensors = tuple(member.units_at(self.units, first, count) for member in self.members)
        return Units(first=self.axis.index * self.units + first, count=count, tensors=tensors)

    def unit_numbers(self) -> list[int]:
        """Global numbers of the units that this rank computes, in the order of its features."""
        first = self.axis.index * self.units
        helped = (number for units in self.helped for number in range(units.first, units.first + units.count))
        return [*range(first, first + self.units - self.handed_over), *helped]


def pairs(modules: Sequence[nn.Module]) -> list[ParallelPair]:
    """The pairs inside of layers, in the order of their definition: the same on every rank of the group."""
    parts = (part for module in modules for part in module.modules() if isinstance(part, RowLinear))
    return list(dict.fromkeys(part.pair for part in parts if part.pair is not None))
