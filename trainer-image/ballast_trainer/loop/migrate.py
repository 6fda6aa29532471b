"""Live migration: layers move between ranks with parameters, optimizer state and masks.

Only the layers that change ranks travel, point to point, each as one message.  No rank releases a
layer before every rank has received and unpacked all of its new layers; if one fails, all ranks keep
their previous layers.

Where the ranks stay the same, the optimizer's state (two thirds of a layer's bytes for AdamW) goes as a
second message during the next step: forward and backward do not need it.  There is memory for it, and
its description has been read, before any rank releases a layer.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.contract import Stage

from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.layer import OPTIMIZER, Layer, LayerSet
from ballast_trainer.layers.packing import join_bytes, pack, split_bytes, unpack
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


def migrate(
    world: World, layers: LayerSet, moves: Sequence[LayerMove], *, overlap: bool = False
) -> Migration:
    """Carry out the moves; collective over the world.

    Args:
        world: the ranks.
        layers: those that this rank holds; those that it sends it keeps, until the caller drops them.
        moves: layer, source and target of each.
        overlap: the optimizers' tensors may arrive after this returns; a layer waits for its own where they
            are needed, :meth:`LayerSet.settle` for all.

    Raises:
        MigrationFailed: some rank could not send, receive or unpack a layer; all ranks keep their layers.
        PeerLost: through the caller's :func:`peer_failures`.
    """
    layers.settle()
    now, later, byte_count = _packed(
        world, layers, moves, overlap=overlap and world.patient_group is not None
    )
    arrived: dict[int, Layer] = {}
    awaited: dict[int, dict[str, torch.Tensor]] = {}
    failure: Exception | None = None
    for message in now.start(world, moves).values():
        message.wait()
    try:
        for number, buffer in now.received.items():
            layer, tensors = layers.make(moves[number].layer), unpack(buffer.cpu())
            layer.load(
                {n: value if value.is_meta else value.to(world.device) for n, value in tensors.items()}
            )
            awaited[number] = {name: value for name, value in tensors.items() if value.is_meta}
            split_bytes(later.received[number], list(awaited[number].values()))
            arrived[number] = layer
    except (RuntimeError, ValueError, KeyError) as error:
        failure = error
    _refuse_unless_all(world, moves, failure)
    # Through the host and a group of their own: on a GPU the pipeline's messages have an order.
    under_way = later.start(world, moves, world.patient_group)
    layers.under_way += [message.wait for message in under_way.values()]
    for number, layer in arrived.items():
        if awaited[number]:
            layer.expect(functools.partial(_arrival, under_way[number], awaited[number]))
    layers.hold(arrived.values())
    return Migration(moves=tuple(moves), byte_count=byte_count)


class _Message:
    """A message between two ranks, under way."""

    def __init__(self, buffer: torch.Tensor, work: Any) -> None:
        self._buffer, self._work = buffer, work

    def wait(self) -> torch.Tensor:
        """Its bytes, once it is complete."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._buffer


@dataclasses.dataclass(frozen=True, slots=True)
class _Messages:
    """What this rank sends and receives, by number of the move."""

    sent: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    received: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def start(self, world: World, moves: Sequence[LayerMove], group: Any = None) -> dict[int, _Message]:
        """Send and receive; empty messages do not travel."""
        ranks, found = world.pipeline.ranks, {}
        for number, move in enumerate(moves):
            if move.target == world.position:
                buffer = self.received[number]
                transfer = functools.partial(dist.irecv, src=ranks[move.source])
            elif move.source == world.position:
                buffer = self.sent[number]
                transfer = functools.partial(dist.isend, dst=ranks[move.target])
            else:
                continue
            if buffer.numel():
                found[number] = _Message(buffer, transfer(buffer, group=group, tag=move.layer))
        return found


def _arrival(message: _Message, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(like, split_bytes(message.wait(), list(like.values())), strict=True))


def _refuse_unless_all(world: World, moves: Sequence[LayerMove], failure: Exception | None) -> None:
    """Raise :class:`MigrationFailed` on every rank where ``failure`` is set on one; collective."""
    if world.sum([float(failure is not None)])[0] > 0:
        raise MigrationFailed(f"layers {[m.layer for m in moves]} stay where they were") from failure


def _packed(
    world: World, layers: LayerSet, moves: Sequence[LayerMove], *, overlap: bool
) -> tuple[_Messages, _Messages, int]:
    """The messages that go now and those that go later, with memory for all, and the bytes of all ranks.

    Raises:
        MigrationFailed: some rank has no memory for what it sends or receives; nothing was sent.
    """
    now, later = _Messages(), _Messages()
    sizes = torch.zeros(2, len(moves), dtype=torch.int64, device=world.device)
    failure: Exception | None = None
    try:
        for number, move in enumerate(moves):
            if move.source == world.position:
                state = layers[move.layer].state()
                delayed = [
                    n for n, value in state.items() if overlap and n.startswith(OPTIMIZER) and value.dim()
                ]
                now.sent[number] = pack(state, delayed).to(world.device)
                later.sent[number] = join_bytes(state[name] for name in delayed)
                sizes[0, number], sizes[1, number] = now.sent[number].numel(), later.sent[number].numel()
    except (RuntimeError, MemoryError) as error:
        failure = error
    world.sum_tensor(sizes)
    try:
        for number, move in enumerate(moves):
            if move.target == world.position:
                now_bytes, later_bytes = sizes[:, number].tolist()
                now.received[number] = torch.empty(now_bytes, dtype=torch.uint8, device=world.device)
                later.received[number] = torch.empty(later_bytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:
        failure = error
    _refuse_unless_all(world, moves, failure)
    return now, later, int(sizes.sum())
