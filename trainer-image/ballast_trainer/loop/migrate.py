"""Live migration: layers move between ranks with parameters, optimizer state and masks.

Only the layers that change ranks travel, point to point, each as one message.  No rank releases a
layer before every rank has received and unpacked all of its new layers; if one fails, all ranks keep
their previous layers.

From ranks that stay, the optimizer's state (two thirds of a layer's bytes for AdamW) goes as a second
message during the next step: forward and backward do not need it.  There is memory for it, and its
description has been read, before any rank releases a layer.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.contract import Stage

from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.layer import OPTIMIZER, Layer, LayerSet
from ballast_trainer.layers.packing import join_bytes, pack, split_bytes, unpack
from ballast_trainer.pipeline.layout import holders_of
from ballast_trainer.profiling.stopwatch import Stopwatch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerMove:
    """Layer ``layer`` goes from rank ``source`` to rank ``target``."""

    layer: int
    source: int
    target: int


_FAILURES = (RuntimeError, ValueError, KeyError, MemoryError)
"""What a rank can survive when it packs, builds or loads a layer."""


class MigrationFailed(RuntimeError):  # noqa: N818
    """A layer could not be moved to some rank; every rank has kept the layers it had."""


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

    @property
    def byte_count(self) -> int:
        """Bytes that this rank sends."""
        return sum(buffer.nbytes for buffer in self.sent.values())

    def start(self, world: World, moves: Sequence[LayerMove], group: Any = None) -> dict[int, _Message]:
        """Send and receive; empty messages do not travel."""
        ranks, found = world.pipeline.ranks, {}
        for number, move in enumerate(moves):
            buffer = self.received.get(number, self.sent.get(number))
            if buffer is None or not buffer.numel():
                continue
            if number in self.received:
                transfer = functools.partial(dist.irecv, src=ranks[move.source])
            else:
                transfer = functools.partial(dist.isend, dst=ranks[move.target])
            found[number] = _Message(buffer, transfer(buffer, group=group, tag=move.layer))
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The result of a migration, over all ranks.

    Attributes:
        moves: the layers that changed ranks.
        byte_count: bytes sent, over the ranks of a pipeline.
    """

    moves: tuple[LayerMove, ...]
    byte_count: int
    _rest: _Messages = dataclasses.field(default_factory=_Messages, repr=False)
    _awaited: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict, repr=False)

    def send_rest(self, world: World, layers: LayerSet, moves: Sequence[LayerMove]) -> None:
        """Start the messages with the optimizers' tensors that were left behind; every rank calls it.

        Args:
            world: the ranks, which may have changed since.
            layers: those that this rank holds; a layer waits for its own where they are needed,
                :meth:`LayerSet.settle` for all.
            moves: as of the migration, ranks in the numbering of ``world``.
        """
        # Through the host and a group of their own: on a GPU the pipeline's messages have an order.
        under_way = self._rest.start(world, moves, world.patient_group)
        layers.under_way += [message.wait for message in under_way.values()]
        for number, awaited in self._awaited.items():
            # Tensors without elements do not travel.
            message = under_way.get(number, _Message(self._rest.received[number], None))
            layers[moves[number].layer].expect(functools.partial(_arrival, message, awaited))


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
    world: World,
    layers: LayerSet,
    moves: Sequence[LayerMove],
    *,
    overlap: Collection[LayerMove] = (),
    watch: Stopwatch | None = None,
) -> Migration:
    """Carry out the moves; collective over the world.

    Args:
        world: the ranks.
        layers: those that this rank holds; those that it sends it keeps, until the caller drops them.
        moves: layer, source and target of each.
        overlap: the moves whose optimizers' tensors stay behind until :meth:`Migration.send_rest`.
        watch: counts the phases.

    Raises:
        MigrationFailed: some rank could not send, receive or unpack a layer; all ranks keep their layers.
        PeerLost: through the caller's :func:`peer_failures`.
    """
    watch = watch or Stopwatch()
    layers.settle()
    now, later = _packed(world, layers, moves, overlap, watch)
    under_way = now.start(world, moves)
    arrived: dict[int, Layer] = {}
    awaited: dict[int, dict[str, torch.Tensor]] = {}
    failure: Exception | None = None
    try:
        # While the bytes travel.
        arrived = {number: layers.make(moves[number].layer) for number in now.received}
    except _FAILURES as error:
        failure = error
    watch.lap("build")
    for message in under_way.values():
        message.wait()
    watch.lap("transfer")
    try:
        for number, layer in arrived.items():
            tensors = unpack(now.received[number].cpu())
            layer.load(
                {n: value if value.is_meta else value.to(world.device) for n, value in tensors.items()}
            )
            waits = {name: value for name, value in tensors.items() if value.is_meta}
            split_bytes(later.received[number], list(waits.values()))
            if waits:
                awaited[number] = waits
                layer.expect(_not_sent)
    except _FAILURES as error:
        failure = error
    watch.lap("load")
    byte_count = _agree(world, moves, failure, now.byte_count + later.byte_count)
    watch.lap("agree")
    layers.hold(arrived.values())
    return Migration(moves=tuple(moves), byte_count=byte_count, _rest=later, _awaited=awaited)


def _not_sent() -> dict[str, torch.Tensor]:
    raise RuntimeError("the optimizer's state of a layer is needed before it was sent")


def _arrival(message: _Message, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(like, split_bytes(message.wait(), list(like.values())), strict=True))


def _agree(world: World, moves: Sequence[LayerMove], failure: Exception | None, byte_count: int = 0) -> int:
    """Agree on whether every rank is without a failure; the ``byte_count`` of a pipeline's ranks. Collective.

    Raises:
        MigrationFailed: on every rank, where ``failure`` is set on one.
    """
    failures, total = world.sum([float(failure is not None), float(byte_count)])
    if failures > 0:
        raise MigrationFailed(f"layers {[m.layer for m in moves]} stay where they were") from failure
    return round(total / world.mesh.column)


def _packed(
    world: World,
    layers: LayerSet,
    moves: Sequence[LayerMove],
    overlap: Collection[LayerMove],
    watch: Stopwatch,
) -> tuple[_Messages, _Messages]:
    """The messages that go now and those that go later, with memory for all.

    Raises:
        MigrationFailed: some rank has no memory for what it sends or receives; no layer was sent.
    """
    now, later, sizes = _Messages(), _Messages(), _Messages()
    failure: Exception | None = None
    for number, move in enumerate(moves):
        # 0 bytes of a layer that cannot be packed.
        if move.source == world.position:
            sizes.sent[number] = torch.zeros(2, dtype=torch.int64)
        elif move.target == world.position:
            sizes.received[number] = torch.zeros(2, dtype=torch.int64, device=world.device)
    try:
        for number, counts in sizes.sent.items():
            move = moves[number]
            state = layers[move.layer].state()
            delayed = [
                name
                for name, value in state.items()
                if move in overlap and name.startswith(OPTIMIZER) and value.dim()
            ]
            message = pack(state, delayed).to(world.device)
            later.sent[number] = join_bytes(state[name] for name in delayed)
            now.sent[number] = message
            counts[0], counts[1] = message.numel(), later.sent[number].numel()
    except _FAILURES as error:
        failure = error
    sizes.sent.update({number: counts.to(world.device) for number, counts in sizes.sent.items()})
    watch.lap("pack")
    for sized in sizes.start(world, moves).values():
        sized.wait()
    try:
        for number, counts in sizes.received.items():
            now_bytes, later_bytes = counts.tolist()
            now.received[number] = torch.empty(now_bytes, dtype=torch.uint8, device=world.device)
            later.received[number] = torch.empty(later_bytes, dtype=torch.uint8)
    except _FAILURES as error:
        failure = error
    _agree(world, moves, failure)
    watch.lap("agree")
    return now, later
