"""Tied weights over the pipeline: gradients come to the layer that owns a parameter, its weights go back.

After the backward the ranks that have copies send their gradients to the owner (the first of the layers),
which adds them in the order of the ranks and updates the parameter as one process does: its norm counts once,
and one optimizer has its state.  Then the new weights go to the copies, so all have equal bits.  Ranks that
have none of a parameter's layers take no part; layers on one rank need no message.

Megatron-LM and DeepSpeed sum the gradients on every holder and update each copy; here weights travel back
in place of gradients, after the update and not before it: nothing waits for them but the last stage's next
forward, copies need no optimizer state, and an optimizer cannot drive them apart.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.layer import Layer, LayerSet
from ballast_trainer.models.ties import Tie

Holders = Sequence[Sequence[int]]
"""Pipeline positions that hold each layer."""

_FIRST_TAG = 1 << 20
_FLAG, _GRADIENT, _WEIGHT, _KINDS = 0, 1, 2, 3


def gather_gradients(ties: Sequence[Tie], world: World, layers: LayerSet, holders: Holders) -> None:
    """Sum each tied parameter's gradients on the ranks that own it; the copies have none afterwards."""
    for number, tie, held in _shared(ties, layers, Layer.learnt):
        total = _sum_of([parameter.grad for parameter in held])
        for parameter in held:
            parameter.grad = None
        owners = holders[tie[0][0]]
        remote = sorted({holders[layer][0] for layer, _ in tie if not set(owners) & set(holders[layer])})
        if world.position in owners:
            for position in remote:
                total = _sum_of([total, _received_gradient(world, position, number, held[0])])
            held[0].grad = total
        elif world.position in remote:
            flag = torch.tensor([float(total is not None)], device=world.device)
            gradient = torch.zeros_like(held[0]) if total is None else total
            for position in owners:
                _send(world, layers, flag, position, _tag(number, _FLAG))
                _send(world, layers, gradient.contiguous(), position, _tag(number, _GRADIENT))


@torch.no_grad()
def send_weights(ties: Sequence[Tie], world: World, layers: LayerSet, holders: Holders) -> None:
    """Give each tied parameter's weights to its copies; messages are sent in the background."""
    for number, tie, held in _shared(ties, layers, Layer.kept):
        owners = holders[tie[0][0]]
        others = sorted({position for layer, _ in tie for position in holders[layer]}.difference(owners))
        if world.position == owners[0]:
            for position in others:
                _send(world, layers, held[0].detach().contiguous(), position, _tag(number, _WEIGHT))
        elif world.position in others:
            weights = torch.empty_like(held[0], memory_format=torch.contiguous_format)
            _receive(world, weights, owners[0], _tag(number, _WEIGHT)).wait()
            held[0].copy_(weights)
        for copied in held[1:]:
            copied.copy_(held[0])


def _shared(
    ties: Sequence[Tie], layers: LayerSet, of: Callable[[Layer, str], nn.Parameter | None]
) -> Iterator[tuple[int, Tie, list[nn.Parameter]]]:
    """Each tie of which this rank has something: its number, and what ``of`` gives of the layers held."""
    mine = set(layers.indices())
    for number, tie in enumerate(ties):
        found = [of(layers[index], layers[index].tied[number]) for index, _ in tie if index in mine]
        if held := [parameter for parameter in found if parameter is not None]:
            yield number, tie, held


def _sum_of(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Their sum, in the first of them; None where none is there."""
    total: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is None:
            continue
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        total = dense if total is None else total.add_(dense)
    return total


def _received_gradient(world: World, position: int, number: int, like: nn.Parameter) -> torch.Tensor | None:
    flag = torch.empty(1, device=world.device)
    gradient = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    works = [
        _receive(world, flag, position, _tag(number, _FLAG)),
        _receive(world, gradient, position, _tag(number, _GRADIENT)),
    ]
    for work in works:
        work.wait()
    return gradient if flag.item() else None


def _tag(number: int, kind: int) -> int:
    return _FIRST_TAG + _KINDS * number + kind


def _send(world: World, layers: LayerSet, tensor: torch.Tensor, position: int, tag: int) -> None:
    work = dist.isend(tensor, dst=world.pipeline.ranks[position], tag=tag)

    def delivered(tensor: torch.Tensor = tensor) -> None:
        # The tensor lives until it is.
        if work is not None:
            work.wait()

    layers.under_way.append(delivered)


def _receive(world: World, tensor: torch.Tensor, position: int, tag: int) -> Any:
    return dist.irecv(tensor, src=world.pipeline.ranks[position], tag=tag)
