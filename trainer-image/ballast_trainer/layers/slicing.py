"""Slices of a parameter over a tensor group: the part of each rank, and the whole from the parts."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ballast_trainer.distributed.axis import Axis


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """A tensor cut along ``dim`` into equal parts, one a rank.

    Attributes:
        dim: the dimension that is cut.
        blocks: how many equal blocks lie one after the other along ``dim``, each of which is cut:
            3 for query, key and value in one matrix, 2 for gates and what they are for, else 1; of unequal
            ones their lengths.
    """

    dim: int
    blocks: int | tuple[int, ...] = 1

    def part(self, whole: torch.Tensor, index: int, size: int) -> torch.Tensor:
        """Part ``index`` of ``size``, a separate tensor. Raises ValueError: the dimension does not divide."""
        length, blocks = whole.shape[self.dim], self.blocks
        if length % (blocks * size) if isinstance(blocks, int) else any(one % size for one in blocks):
            shape = tuple(whole.shape)
            raise ValueError(f"dimension {self.dim} of {shape} does not divide by {blocks} x {size}")
        return torch.cat([block.chunk(size, self.dim)[index] for block in self.split(whole, 1)], self.dim)

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that the parts of all ranks were cut from."""
        cut = zip(*(self.split(part, len(parts)) for part in parts), strict=True)
        return torch.cat([piece for block in cut for piece in block], self.dim)

    def split(self, part: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
        """The blocks of a part of ``size``."""
        if isinstance(self.blocks, int):
            return part.chunk(self.blocks, self.dim)
        blocks: tuple[torch.Tensor, ...] = part.split([one // size for one in self.blocks], self.dim)
        return blocks

    def by_unit(self, part: torch.Tensor, units: int) -> torch.Tensor:
        """A view of a part with ``dim`` as three, [blocks, units, width]; the units are ``dim + 1``."""
        assert isinstance(self.blocks, int)
        view: torch.Tensor = part.unflatten(self.dim, (self.blocks, units, -1))
        return view

    def joined(self, by_unit: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`by_unit`."""
        return by_unit.flatten(self.dim, self.dim + 2)


class SlicedModule(nn.Module):
    """A module (or what has its attributes) with parameters, by name in ``slicings``, cut over ``axis``."""

    axis: Axis
    slicings: dict[str, Slicing]


def axis_of(module: nn.Module) -> Axis:
    """The ranks that a layer is cut over; this one alone where it is whole."""
    return next((child.axis for _, child in _sliced(module)), Axis())


def _sliced(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((prefix, child) for prefix, child in module.named_modules() if hasattr(child, "slicings"))


def slicings(module: nn.Module) -> dict[str, Slicing]:
    """Slicings of a layer's parameters, by their name in the layer; whole ones are left out."""
    found = {}
    for prefix, child in _sliced(module):
        for name, slicing in child.slicings.items():
            found[f"{prefix}.{name}" if prefix else name] = slicing
    return found
