"""Live migration: layers move between ranks with parameters, optimizer state and masks.

Only the layers that change ranks travel, point to point, each as one message.  No rank releases a
layer before every rank has received and unpacked all of its new layers; if one fails, all ranks keep
their previous layers.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from ballast_policies.contract import Stage

from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.layer import Layer, LayerSet
from ballast_trainer.layers.packing import pack, unpack
from ballast_trainer.pipeline.layout import holders_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerMove:
    """Layer ``layer`` goes from rank ``source`` to rank ``target``."""

    layer: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The result of a migration, over all ranks.

    Attributes:
        moves: the layers that changed ranks.
        byte_count: bytes sent, over all ranks.
    """

    moves: tuple[LayerMove, ...]
    byte_count: int


class MigrationFailed(RuntimeError):  # noqa: N818
    """A layer could not be moved to some rank; every rank has kept the layers it had."""


def owners(stages: Sequence[Stage], replicas: Sequence[int] = ()) -> dict[int, tuple[int, ...]]:
    """Layer -> ranks, several where its stage has replicas."""
    return {
        layer: holders
        for stage, holders in zip(stages, holders_of(stages, replicas), strict=True)
        for layer in range(stage.first_layer, stage.end_layer)
    }


def plan_moves(
    old: Sequence[Stage], new: Sequence[Stage], replicas: Sequence[int] = ()
) -> tuple[LayerMove, ...]:
    """The layers that come to ranks, by layer; both partitions count ranks in the same numbering."""
    before, after = owners(old, replicas), owners(new, replicas)
    return tuple(
        LayerMove(layer=layer, source=before[layer][0], target=target)
        for layer in sorted(after)
        for target in after[layer]
        if target not in before[layer]
    )


def migrate(world: World, layers: LayerSet, moves: Sequence[LayerMove]) -> Migration:
    """Carry out the moves; collective over the world.

    Args:
        world: the ranks.
        layers: those that this rank holds; those that it sends it keeps, until the caller drops them.
        moves: layer, source and target of each.

    Raises:
        MigrationFailed: some rank could not send, receive or unpack a layer; all ranks keep their layers.
        PeerLost: through the caller's :func:`peer_failures`.
    """
    received, byte_count = _exchange(world, layers, moves)
    arrived: list[Layer] = []
    failure: Exception | None = None
    try:
        for index, buffer in received.items():
            layer = layers.make(index)
            layer.load({name: value.to(world.device) for name, value in unpack(buffer.cpu()).items()})
            arrived.append(layer)
    except (RuntimeError, ValueError, KeyError) as error:
        failure = error
    _refuse_unless_all(world, moves, failure)
    layers.hold(arrived)
    return Migration(moves=tuple(moves), byte_count=byte_count)


def _refuse_unless_all(world: World, moves: Sequence[LayerMove], failure: Exception | None) -> None:
    """Raise :class:`MigrationFailed` on every rank where ``failure`` is set on one; collective."""
    if world.sum([float(failure is not None)])[0] > 0:
        raise MigrationFailed(f"layers {[m.layer for m in moves]} stay where they were") from failure


def _exchange(
    world: World, layers: LayerSet, moves: Sequence[LayerMove]
) -> tuple[dict[int, torch.Tensor], int]:
    """Send and receive layers as bytes: those that this rank receives, and the bytes sent by all ranks.

    Raises:
        MigrationFailed: some rank has no memory for what it sends or receives; nothing was sent.
    """
    device, ranks = world.device, world.pipeline.ranks
    sizes = torch.zeros(len(moves), dtype=torch.int64, device=device)
    packed: dict[int, torch.Tensor] = {}
    received: dict[int, torch.Tensor] = {}
    failure: Exception | None = None
    try:
        for number, move in enumerate(moves):
            if move.source == world.position:
                packed[number] = pack(layers[move.layer].state()).to(device)
                sizes[number] = packed[number].numel()
    except (RuntimeError, MemoryError) as error:
        failure = error
    world.sum_tensor(sizes)
    try:
        for number, move in enumerate(moves):
            if move.target == world.position:
                received[move.layer] = torch.empty(int(sizes[number]), dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as error:
        failure = error
    _refuse_unless_all(world, moves, failure)
    works = []
    for number, move in enumerate(moves):
        if move.target == world.position:
            works.append(dist.irecv(received[move.layer], src=ranks[move.source], tag=move.layer))
        elif move.source == world.position:
            works.append(dist.isend(packed[number], dst=ranks[move.target], tag=move.layer))
    for work in works:
        if work is not None:
            work.wait()
    return received, int(sizes.sum())
