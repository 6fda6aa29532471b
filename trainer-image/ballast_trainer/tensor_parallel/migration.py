"""Lightweight migration: other ranks compute units of a straggler, without loss (section IV-A).

Once a step each straggler broadcasts the weights of the units that it hands over, of all pairs in one
message.  A helper computes its share of them and adds the result to its own partial sum before the
forward's all-reduce, as the published method does; the same holds for the input's gradient.  The
weights' gradients ride on the backward's all-reduce of the step's last microbatch.  So a step has one
collective more than without migration, for each late rank.

The published method moves columns of each product by itself, which costs it an exchange for each of a
layer's products; here whole units between two products move, so that the tensors between them never travel.
"""

import dataclasses
from collections.abc import Sequence

import torch
from ballast_policies.planning.tensor_parallel.semi import helper_columns

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.tensor_parallel.parallel_pair import ParallelPair, Units


def numbers_per_unit(pair: ParallelPair) -> int:
    """Weights of one unit of a pair, biases included."""
    inner, outer = pair.inner, pair.outer
    biases = 0 if inner.bias is None else inner.bias.numel()
    return (inner.weight.numel() + biases + outer.weight.numel()) // pair.units


def handed_over(pairs: Sequence[ParallelPair], fraction: float) -> list[int]:
    """How many units of each pair of a layer a rank hands over, for about ``fraction`` of its work there.

    A head is a coarse unit: as many as fit are taken, and inner units of the MLP for the rest.  One
    unit of each pair stays, so that its rank takes part in the backward.
    """
    sizes = [numbers_per_unit(pair) for pair in pairs]
    wanted = fraction * sum(size * pair.units for size, pair in zip(sizes, pairs, strict=True))
    counts = [0] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda number: pairs[number].units)
    for place, number in enumerate(order):
        units, size = pairs[number].units, sizes[number]
        last = place == len(order) - 1
        exact = wanted / size if last else fraction * units
        counts[number] = min(units - 1, int(exact + (0.5 if last else 1e-9)))
        wanted -= counts[number] * size
    return counts


def pack(pair: ParallelPair, units: Units) -> torch.Tensor:
    """Weights (or their gradients) as one row a unit, [count, numbers per unit]."""
    blocks, width = pair.blocks, units.outer.shape[1] // units.count
    parts = [units.inner.view(blocks, units.count, width, -1).transpose(0, 1)]
    if units.inner_bias is not None:
        parts.append(units.inner_bias.view(blocks, units.count, width).transpose(0, 1))
    parts.append(units.outer.t().view(units.count, width, -1))
    return torch.cat([part.reshape(units.count, -1) for part in parts], 1)


def unpack(pair: ParallelPair, rows: torch.Tensor, first: int) -> Units:
    """The reverse of :func:`pack`: separate tensors, laid out for the products."""
    count, features = rows.shape[0], pair.outer.weight.shape[0]
    blocks, width = pair.blocks, pair.outer.weight.shape[1] // pair.units
    biases = 0 if pair.inner.bias is None else blocks * width
    inner, inner_bias, outer = rows.split([blocks * width * features, biases, width * features], 1)
    bias = None
    if biases:
        bias = inner_bias.reshape(count, blocks, width).transpose(0, 1).reshape(-1).clone()
    return Units(
        first=first,
        count=count,
        inner=inner.reshape(count, blocks, width, features).transpose(0, 1).reshape(-1, features).clone(),
        inner_bias=bias,
        outer=outer.reshape(count * width, features).t().contiguous(),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The units of a pair that one late rank hands over, and those that this rank computes of them."""

    source: int
    count: int
    mine: range
    units: Units | None


class GradientReturn:
    """Returns the gradients of a pair's migrated units on the last backward all-reduce of a step.

    Attributes:
        returned: on a late rank, [units handed over, numbers per unit], once they are there.
    """

    def __init__(self, pair: ParallelPair, parts: list[_Part], microbatches: int) -> None:
        self._pair = pair
        self._parts = parts
        self._awaited = microbatches
        self._width = numbers_per_unit(pair)
        self.returned: torch.Tensor | None = None

    def load(self) -> torch.Tensor | None:
        """This rank's gradients for others, zeros in other places; only at the last microbatch."""
        self._awaited -= 1
        if self._awaited > 0:
            return None
        device = self._pair.outer.weight.device
        rows = []
        for part in self._parts:
            whole = torch.zeros(part.count, self._width, device=device)
            if part.units is not None:
                whole[part.mine.start : part.mine.stop] = pack(self._pair, _gradients(part.units))
            rows.append(whole.reshape(-1))
        return torch.cat(rows)

    def unload(self, summed: torch.Tensor) -> None:
        """Take the gradients computed for this rank, if it is late."""
        offset = 0
        for part in self._parts:
            numbers = part.count * self._width
            if part.source == self._pair.axis.index:
                self.returned = summed[offset : offset + numbers].view(part.count, self._width)
            offset += numbers


def _gradients(units: Units) -> Units:
    def of(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    return dataclasses.replace(
        units,
        inner=of(units.inner),
        inner_bias=None if units.inner_bias is None else of(units.inner_bias),
        outer=of(units.outer),
    )


def begin_migration(
    layers: Sequence[Sequence[ParallelPair]], fractions: Sequence[float], axis: Axis, *, microbatches: int
) -> None:
    """Before a step: hand units over for its duration; collective over the axis, one broadcast a late rank.

    Args:
        layers: the pairs of each layer held, the same on all ranks of the axis.
        fractions: by rank, how much of its work others are to do; 0 for ranks that help.
        axis: the tensor group.
        microbatches: of the step, on each replica.
    """
    every = [pair for pairs in layers for pair in pairs]
    for pair in every:
        pair.handed_over, pair.helped, pair.piggyback = 0, (), None
    late = [rank for rank, fraction in enumerate(fractions) if fraction > 0]
    parts: dict[ParallelPair, list[_Part]] = {pair: [] for pair in every}
    for source in late:
        counts = {
            pair: count
            for pairs in layers
            for pair, count in zip(pairs, handed_over(pairs, fractions[source]), strict=True)
            if count > 0
        }
        rows = _broadcast_units(counts, source, axis)
        for pair in counts:
            parts[pair].append(_take_part(pair, rows[pair], source, late, axis))
    for pair, found in parts.items():
        if found and pair.inner.weight.requires_grad:
            pair.piggyback = GradientReturn(pair, found, microbatches)


def _take_part(pair: ParallelPair, rows: torch.Tensor, source: int, late: Sequence[int], axis: Axis) -> _Part:
    """The units of a pair that ``source`` hands over; this rank's share joins its own work for the step."""
    count = len(rows)
    mine = helper_columns(count, ranks=axis.size, straggler=source, rank=axis.index, migrating=late)
    units = None
    if mine:
        first = source * pair.units + pair.units - count + mine.start
        units = unpack(pair, rows[mine.start : mine.stop], first)
        for tensor in units.tensors():
            tensor.requires_grad_(pair.inner.weight.requires_grad)
        pair.helped = (*pair.helped, units)
    if source == axis.index:
        pair.handed_over = count
    return _Part(source=source, count=count, mine=mine, units=units)


def _broadcast_units(
    counts: dict[ParallelPair, int], source: int, axis: Axis
) -> dict[ParallelPair, torch.Tensor]:
    """Rows of the units that ``source`` hands over, by pair, in one broadcast."""
    if not counts:
        return {}
    sizes = [count * numbers_per_unit(pair) for pair, count in counts.items()]
    device = next(iter(counts)).outer.weight.device
    if axis.index == source:
        with torch.no_grad():
            flat = torch.cat(
                [
                    pack(pair, pair.units_at(pair.units - count, count)).reshape(-1)
                    for pair, count in counts.items()
                ]
            )
    else:
        flat = torch.empty(sum(sizes), device=device)
    axis.broadcast(flat, source)
    return {pair: piece.view(counts[pair], -1) for pair, piece in zip(counts, flat.split(sizes), strict=True)}


def finish_migration(layers: Sequence[Sequence[ParallelPair]], *, microbatches: int) -> None:
    """After a step's backward: add the gradients that helpers computed; the mean over the microbatches."""
    for pair in (pair for pairs in layers for pair in pairs):
        piggyback = pair.piggyback
        if isinstance(piggyback, GradientReturn) and piggyback.returned is not None:
            _add_gradients(pair, unpack(pair, piggyback.returned / microbatches, 0))
            piggyback.returned = None


def _add_gradients(pair: ParallelPair, units: Units) -> None:
    """Add gradients of a pair's last units to those of its parameters."""
    first, inner, outer = pair.units - units.count, pair.inner, pair.outer
    shape = (pair.blocks, pair.units, outer.weight.shape[1] // pair.units)
    part = (pair.blocks, units.count, shape[2])
    for parameter, gradient in ((inner.weight, units.inner), (inner.bias, units.inner_bias)):
        if parameter is not None and gradient is not None:
            whole = _gradient_of(parameter)
            whole.view(*shape, -1)[:, first:] += gradient.view(*part, -1)
    _gradient_of(outer.weight)[:, first * shape[2] :] += units.outer


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
