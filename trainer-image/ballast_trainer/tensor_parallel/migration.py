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
    return sum(one.numel() for member in pair.members for _, one, _ in member.cut()) // pair.units


def handed_over(pairs: Sequence[ParallelPair], fraction: float) -> list[int]:
    """Number of units of each pair of a layer to hand over, for about ``fraction`` of its rank's work.

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
    rows = [
        way.by_unit(tensors[name], units.count).movedim(way.dim + 1, 0).reshape(units.count, -1)
        for member, tensors in zip(pair.members, units.tensors, strict=True)
        for name, _, way in member.cut()
    ]
    return torch.cat(rows, 1)


def unpack(pair: ParallelPair, rows: torch.Tensor, first: int) -> Units:
    """The reverse of :func:`pack`: separate tensors, laid out for the products."""
    count, offset, tensors = len(rows), 0, []
    for member in pair.members:
        found = {}
        for name, one, way in member.cut():
            shape = list(way.by_unit(one, pair.units).shape)
            del shape[way.dim + 1]
            numbers = one.numel() // pair.units
            piece = rows[:, offset : offset + numbers].reshape(count, *shape)
            found[name] = way.joined(piece.movedim(0, way.dim + 1)).clone(
                memory_format=torch.contiguous_format
            )
            offset += numbers
        tensors.append(found)
    return Units(first=first, count=count, tensors=tuple(tensors))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The units of a pair that one late rank hands over, and those that this rank computes of them."""

    source: int
    count: int
    mine: range
    units: Units | None


class GradientReturn:
    """Return of the gradients of a pair's migrated units on the last backward all-reduce of a step.

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
        device = self._pair.device
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

    gradients = tuple({name: of(one) for name, one in tensors.items()} for tensors in units.tensors)
    return dataclasses.replace(units, tensors=gradients)


def begin_migration(
    layers: Sequence[Sequence[ParallelPair]], fractions: Sequence[float], axis: Axis, *, microbatches: int
) -> None:
    """Hand units over for the step that begins; collective over the axis, one broadcast for each late rank.

    Args:
        layers: the pairs of each layer held, the same on all ranks of the axis.
        fractions: by rank, how much of its work others are to do; 0 for ranks that help.
        axis: the tensor group.
        microbatches: of the step, on each replica.
    """
    every = [pair for pairs in layers for pair in pairs]
    for pair in every:
        pair.compute_whole()
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
        if found and pair.learns:
            pair.given.carry(GradientReturn(pair, found, microbatches))


def _take_part(pair: ParallelPair, rows: torch.Tensor, source: int, late: Sequence[int], axis: Axis) -> _Part:
    """The units of a pair that ``source`` hands over; this rank's share joins its own work for the step."""
    count = len(rows)
    mine = helper_columns(count, ranks=axis.size, straggler=source, rank=axis.index, migrating=late)
    units = None
    if mine:
        first = source * pair.units + pair.units - count + mine.start
        units = unpack(pair, rows[mine.start : mine.stop], first)
        for member, tensors in zip(pair.members, units.tensors, strict=True):
            for name, one, _ in member.cut():
                tensors[name].requires_grad_(one.requires_grad)
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
    like = next(iter(counts)).linears[-1].weight
    if axis.index == source:
        with torch.no_grad():
            flat = torch.cat(
                [
                    pack(pair, pair.units_at(pair.units - count, count)).reshape(-1)
                    for pair, count in counts.items()
                ]
            )
    else:
        flat = like.new_empty(sum(sizes))
    axis.broadcast(flat, source)
    return {pair: piece.view(counts[pair], -1) for pair, piece in zip(counts, flat.split(sizes), strict=True)}


def finish_migration(layers: Sequence[Sequence[ParallelPair]]) -> None:
    """Add the gradients that helpers computed, after a step's backward."""
    for pair in (pair for pairs in layers for pair in pairs):
        piggyback = pair.given.piggyback
        if isinstance(piggyback, GradientReturn) and piggyback.returned is not None:
            _add_gradients(pair, unpack(pair, piggyback.returned, 0))
            piggyback.returned = None


def _add_gradients(pair: ParallelPair, units: Units) -> None:
    """Add gradients of a pair's last units to those of its parameters."""
    for member, gradients in zip(pair.members, units.tensors, strict=True):
        for name, parameter, way in member.cut():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            whole = way.by_unit(parameter.grad, pair.units)
            last = whole.narrow(way.dim + 1, pair.units - units.count, units.count)
            last += way.by_unit(gradients[name], units.count)
