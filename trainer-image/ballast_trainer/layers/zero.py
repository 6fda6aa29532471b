"""ZeRO in a layer: the parts of its parameters that each data replica has.

With ZeRO-1 every replica has all weights and gradients of its layers, and the optimizer's state of its part
(P_os of Rajbhandari et al., arXiv 1910.02054, section 5.1).  An optimizer that updates each number by itself
has an equal part of every parameter.  Of any other a replica has whole parameters, so that matrices stay
matrices.  With ZeRO-3 (P_os+g+p) it has the weights of its part alone, and whole ones of the layer that runs.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ballast_trainer.distributed.axis import Axis, wait_for
from ballast_trainer.layers.optimizer_state import is_plain, kept_elsewhere, update_instead
from ballast_trainer.seeding import host_seeded

_BY_NUMBER: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""Optimizers whose update of a number reads that number, its gradient and its state alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A parameter over the replicas.

    Attributes:
        bounds: by replica, where its part of the flattened parameter begins and ends.
        own: this replica's part, whose gradient is the mean over the replicas: the parameter itself, or a
            view of it, with ZeRO-3 a copy; None where it has nothing of it.
        place: which of how many parts this replica has: of a parameter that one replica has whole, 0 of 1.
    """

    bounds: tuple[tuple[int, int], ...]
    own: nn.Parameter | None
    place: tuple[int, int]

    @property
    def is_cut(self) -> bool:
        """True if each replica has a part."""
        return self.place[1] > 1

    def own_part(self, value: torch.Tensor) -> torch.Tensor:
        """Part of a tensor in the parameter's shape that this replica has: flat, or all.

        Of its part itself: that.
        """
        flat = self.own is not None and value.shape == self.own.shape
        return self.part(value, self.place[0]) if self.is_cut and not flat else value

    @property
    def length(self) -> int:
        """Numbers of a part, with those that fill up the last one; of one that is not cut, all."""
        return max(end - begin for begin, end in self.bounds)

    @property
    def owner(self) -> int:
        """The replica that has it whole."""
        return next(at for at, (begin, end) in enumerate(self.bounds) if end > begin)

    def make_room(self, parameter: nn.Parameter) -> torch.Tensor:
        """Give a parameter its memory back, the values of which are still to come; all of it, flat."""
        numbers = self.length * self.place[1]
        if self.own is not parameter:
            parameter.untyped_storage().resize_(numbers * parameter.element_size())
        return _memory(parameter, numbers)

    def part(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """Part of a replica in a tensor of the parameter's optimizer state, flat or in its shape."""
        begin, end = self.bounds[index]
        return state.reshape(-1)[begin:end]


def shares_of(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    replicas: Axis,
    *,
    layer: int,
    tied: Mapping[int, str],
) -> dict[str, Share]:
    """The share of this replica in each parameter of a layer, the same on every rank of the axis.

    Args:
        parameters: of the layer, by name.
        optimizer: that is to update them.
        replicas: the data axis.
        layer: its index: layers of one matrix have their owners in turn.
        tied: of :class:`~ballast_trainer.layers.layer.Layer`: all layers that have a tied parameter share it
            alike.
    """
    by_number = is_plain(optimizer, _BY_NUMBER)
    number_of = {name: number for number, name in tied.items()}
    loads, found = [0] * replicas.size, {}
    for name, parameter in sorted(parameters.items(), key=lambda item: (-item[1].numel(), item[0])):
        count = parameter.numel()
        # One whose numbers lie in another order has no flat view; of one number state has no shape to cut.
        if by_number and parameter.is_contiguous() and parameter.dim() > 0:
            length = -(-count // replicas.size)
            ends = [min(length * at, count) for at in range(replicas.size + 1)]
            bounds = tuple(itertools.pairwise(ends))
            begin, end = bounds[replicas.index]
            part = parameter.detach().view(-1)[begin:end]
            own = nn.Parameter(part, part.is_floating_point() or part.is_complex()) if end > begin else None
            place = replicas.index, replicas.size
        else:
            owner = min(range(replicas.size), key=lambda at: (loads[at], (at - layer) % replicas.size))
            owner = number_of[name] % replicas.size if name in number_of else owner
            loads[owner] += count
            bounds = tuple((0, count if at == owner else 0) for at in range(replicas.size))
            own = parameter if owner == replicas.index else None
            place = 0, 1
        found[name] = Share(bounds, own, place)
    return found


def take_part(
    optimizer: torch.optim.Optimizer, shares: Mapping[nn.Parameter, Share], copies: Sequence[nn.Parameter]
) -> None:
    """Let an optimizer update a replica's shares of its parameters, and none of the ``copies``.

    What has no share is the replica's alone.
    """

    def own_part(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        is_whole, share = value.shape == parameter.shape and value.dim() > 0, shares[parameter]
        return share.part(value, share.place[0]).clone() if is_whole else value

    owned = {parameter: share.own for parameter, share in shares.items()}
    update_instead(optimizer, owned | dict.fromkeys(copies), own_part)


class WholeWeights:
    """The layer of this rank whose parameters are whole for now (ZeRO-3): one at a time.

    The parameters of the others have no memory.  As in FSDP their storages are emptied and filled again, so
    what autograd has saved of them in a forward is whole again in the backward.
    """

    def __init__(self, replicas: Axis) -> None:
        self._replicas = replicas
        self._layer: Mapping[nn.Parameter, Share] = {}

    def cut(self, shares: Mapping[nn.Parameter, Share]) -> dict[nn.Parameter, Share]:
        """Shares with memory of their own, after which the parameters have none."""
        found = {}
        for parameter, share in shares.items():
            own, values = share.own, parameter.detach()
            # No other parameter's memory, and nothing beside it.
            parameter.data = values.clone() if own is parameter else torch.empty_like(values)
            if own is not None and own is not parameter:
                room = own.detach().new_zeros(share.length)
                room[: own.numel()] = own.detach()
                own = nn.Parameter(room[: own.numel()], own.requires_grad)
            found[parameter] = dataclasses.replace(share, own=own)
            _empty(parameter, found[parameter])
        return found

    @torch.no_grad()
    def of(self, shares: Mapping[nn.Parameter, Share]) -> None:
        """Gather the parameters of a layer, unless it has been the last; collective over the replicas."""
        if shares is self._layer or not shares:
            return
        self.release()
        self._replicas.count(
            "gather_weights", sum(share.own.nbytes for share in shares.values() if share.own is not None)
        )
        works = []
        for parameter, share in shares.items():
            if not parameter.numel():
                continue
            whole = share.make_room(parameter)
            if share.is_cut:
                # No part of it is filled up with zeros, too.
                own = whole.new_zeros(share.length) if share.own is None else _memory(share.own, share.length)
                works.append(dist.all_gather_single(whole, own, group=self._replicas.group, async_op=True))
            else:
                source = self._replicas.ranks[share.owner]
                works.append(dist.broadcast(whole, src=source, group=self._replicas.group, async_op=True))
        wait_for(works)
        self._layer = shares

    def release(self) -> None:
        """Let go of what is whole, which does not follow an update of the parts."""
        for parameter, share in self._layer.items():
            _empty(parameter, share)
        self._layer = {}


@contextlib.contextmanager
def own_parts_in_place(shares: Mapping[nn.Parameter, Share]) -> Iterator[None]:
    """Parameters that have memory, and this replica's parts of their values, for an optimizer to see."""
    for parameter, share in shares.items():
        if share.own is not parameter:
            whole = share.make_room(parameter).zero_()
            if share.own is not None:
                share.part(whole, share.place[0]).copy_(share.own.detach())
    try:
        yield
    finally:
        for parameter, share in shares.items():
            _empty(parameter, share)


def _empty(parameter: nn.Parameter, share: Share) -> None:
    if share.own is not parameter:
        parameter.untyped_storage().resize_(0)


def _memory(parameter: nn.Parameter, length: int) -> torch.Tensor:
    """Memory from a parameter's first number on, flat; its version is not the parameter's."""
    flat = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return flat.set_(parameter.untyped_storage(), parameter.storage_offset(), (length,), (1,))


_Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


_TRIALS = ((4, 64), (256, 3))
"""Sizes of matrices, for what factors large ones alone, and steps, for what mixes numbers after some."""


def _gradients(values: Sequence[torch.Tensor], steps: int) -> list[list[torch.Tensor]]:
    """Gradients of each step, of three sizes in turn, for what limits norms."""
    return [[10.0 ** (2 * (step % 3) - 3) * torch.randn_like(one) for one in values] for step in range(steps)]


def _updates(
    make: _Maker, values: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor | None]]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Changes of parameters of these values by an optimizer's steps; what else they change in it."""
    with host_seeded(0):
        tried = [nn.Parameter(value.detach().clone()) for value in values]
        optimizer = make(tried)
        first = kept_elsewhere(optimizer)
        for each in gradients:
            for parameter, gradient in zip(tried, each, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            optimizer.step()
    now = kept_elsewhere(optimizer)
    changed = {where: value for where, value in now.items() if [value] != [first.get(where)]}
    return [one.detach() - value for one, value in zip(tried, values, strict=True)], changed


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if updates differ by rounding alone, however small they are."""
    return bool((one - other).abs().max() <= 1e-3 * other.abs().max())


def mixes_parameters(make: _Maker, parameters: Sequence[nn.Parameter]) -> bool:
    """True if an optimizer's update of one of these parameters depends on the others' gradients, tried."""
    with host_seeded(0):
        gradients = _gradients(parameters, _TRIALS[0][1])
    together, kept = _updates(make, parameters, gradients)

    def differs(at: int) -> bool:
        own = [[one if one is each[at] else None for one in each] for each in gradients]
        alone, kept_alone = _updates(make, parameters, own)
        return kept_alone != kept or not _alike(alone[at], together[at])

    return any(differs(at) for at in range(len(parameters)))


def mixes_numbers(make: _Maker, device: torch.device) -> bool:
    """True if an optimizer updates parts of a matrix or vector otherwise than in the whole one, tried."""
    return any(_mixes(make, length, steps, device) for length, steps in _TRIALS)


def _mixes(make: _Maker, length: int, steps: int, device: torch.device) -> bool:
    with host_seeded(0):
        # Small, so that small updates are no rounding of theirs.
        values = [0.01 * torch.randn(shape) for shape in ((length, length), (length,))]
        gradients = [[one.to(device) for one in each] for each in _gradients(values, steps)]
    values = [value.to(device) for value in values]
    whole, kept = _updates(make, values, gradients)

    def differs(at: int, dim: int) -> bool:
        def cut(every: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [
                one.chunk(2, dim)[0].contiguous() if place == at else one for place, one in enumerate(every)
            ]

        parts, kept_of_parts = _updates(make, cut(values), [cut(each) for each in gradients])
        # A step size found from all gradients may not have moved yet.
        return kept_of_parts != kept or not _alike(parts[at], cut(whole)[at])

    return any(differs(at, dim) for at, dim in ((0, 0), (0, 1), (1, 0)))
