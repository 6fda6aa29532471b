"""Live migration: layers move between ranks with parameters, optimizer state and masks.

Only the layers that change ranks travel, point to point, each as one message, after source and target have
agreed that there is room for it.  No rank releases a layer before every rank has received and unpacked all
of its new layers, which is all that the ranks have to agree on together; if one fails, all keep their
previous layers.

From ranks that release the layer and stay, the optimizer's tensors (two thirds of a layer's bytes for AdamW)
follow during the next step: forward and backward do not need them.  They go from where the one optimizer has
them to where the other will, without a copy.  There is memory for them, and their description has been read,
before any rank releases a layer.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.contract.messages import Stage

from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.layer import OPTIMIZER, Layer, LayerSet
from ballast_trainer.layers.packing import as_bytes, pack, unpack
from ballast_trainer.models.deferred import values_follow
from ballast_trainer.pipeline.layout import holders_of
from ballast_trainer.profiling.stopwatch import Stopwatch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerMove:
    """Layer ``layer`` goes from rank ``source`` to rank ``target``."""

    layer: int
    source: int
    target: int


_FAILURES = (RuntimeError, ValueError, KeyError, MemoryError)
"""Errors that a rank can survive when it packs, builds or loads a layer."""


class MigrationFailed(RuntimeError):  # noqa: N818
    """A layer could not be moved to some rank; every rank has kept the layers it had."""


class _Message:
    """Message between two ranks for a move, under way."""

    def __init__(self, parts: list[tuple[torch.Tensor, Any]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        """Wait until it is complete; what is sent lives so long, and stays as it is."""
        for _, work in self._parts:
            if work is not None:
                work.wait()
        self._parts = []


@dataclasses.dataclass(frozen=True, slots=True)
class _Messages:
    """Tensors that this rank sends and receives, by number of the move."""

    sent: dict[int, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    received: dict[int, list[torch.Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def byte_count(self) -> int:
        """Bytes that this rank sends."""
        return sum(part.nbytes for parts in self.sent.values() for part in parts)

    def start(
        self, world: World, moves: Sequence[LayerMove], group: Any = None, *, back: bool = False
    ) -> dict[int, _Message]:
        """Send and receive, ``back`` from targets to sources; what is empty does not travel."""
        ranks, found = world.pipeline.ranks, {}
        for number, move in enumerate(moves):
            parts = self.received.get(number, self.sent.get(number))
            if parts is None:
                continue
            source, target = (move.target, move.source) if back else (move.source, move.target)
            if number in self.received:
                transfer = functools.partial(dist.irecv, src=ranks[source])
            else:
                transfer = functools.partial(dist.isend, dst=ranks[target])
            found[number] = _Message(
                [(part, transfer(part, group=group, tag=move.layer)) for part in parts if part.numel()]
            )
        return found


class _Parcels:
    """Layers on their way between this rank and others, with the messages before, between neighbours alone.

    A source says how many bytes each layer has; a target makes room for them and says so; then they travel.
    Only the end of a migration needs the answer of all ranks.

    Attributes:
        received: numbers of the moves to this rank.
        now, later: messages of this pause, and of the next step.
        failure: why this rank could not pack a layer or make room for one; its bytes do not travel.
    """

    def __init__(self, world: World, moves: Sequence[LayerMove], overlap: Collection[LayerMove]) -> None:
        self._world, self._moves, self._overlap = world, moves, overlap
        sent = [number for number, move in enumerate(moves) if move.source == world.position]
        self.received = [number for number, move in enumerate(moves) if move.target == world.position]
        self.now, self.later = _Messages(), _Messages()
        self.failure: Exception | None = None
        # 0 until it is known that there are bytes, and room for them.
        zero = functools.partial(torch.zeros, 1, dtype=torch.int64, device=world.device)
        self._sizes = _Messages({n: [zero()] for n in sent}, {n: [zero()] for n in self.received})
        self._room = _Messages({n: [zero()] for n in self.received}, {n: [zero()] for n in sent})
        self._sizes_under_way: dict[int, _Message] = {}

    def pack(self, layers: LayerSet) -> None:
        """Pack the layers that this rank sends, and tell their sizes, 0 of one that cannot be packed."""
        try:
            for number, (size,) in self._sizes.sent.items():
                move = self._moves[number]
                state = layers[move.layer].moving_state()
                delayed = [
                    name
                    for name, value in state.items()
                    if move in self._overlap and name.startswith(OPTIMIZER) and value.dim()
                ]
                rest = [as_bytes(state[name].to(self._world.device)) for name in delayed]
                message = pack(state, delayed, device=self._world.device)
                self.now.sent[number] = [message]
                if rest:
                    self.later.sent[number] = rest
                size.fill_(message.numel())
        except _FAILURES as error:
            self.failure = error
        self._sizes_under_way = self._sizes.start(self._world, self._moves)

    def make_room(self) -> None:
        """Make room for what comes, tell its sources, and hear where there is room for what goes."""
        for message in self._sizes_under_way.values():
            message.wait()
        try:
            for number, (size,) in self._sizes.received.items():
                room = torch.empty(int(size), dtype=torch.uint8, device=self._world.device)
                self.now.received[number] = [room]
                self._room.sent[number][0].fill_(1)
        except _FAILURES as error:
            self.failure = self.failure or error
        for message in self._room.start(self._world, self._moves, back=True).values():
            message.wait()
        for number, (found,) in self._room.received.items():
            if not found.item():
                self.now.sent.pop(number, None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A migration's layers that moved, and bytes sent over the ranks of a pipeline."""

    moves: tuple[LayerMove, ...]
    byte_count: int
    _rest: _Messages = dataclasses.field(default_factory=_Messages, repr=False)
    _awaited: dict[int, list[torch.Tensor]] = dataclasses.field(default_factory=dict, repr=False)

    def send_rest(self, world: World, layers: LayerSet, moves: Sequence[LayerMove]) -> None:
        """Start the messages with the optimizers' tensors that were left behind; every rank calls it.

        Args:
            world: the ranks, which may have changed since.
            layers: those that this rank holds; a layer waits for its own where they are needed,
                :meth:`LayerSet.settle` for all.
            moves: as of the migration, ranks in the numbering of ``world``.
        """
        # As the weights have gone; gloo's in a group of their own, beside the next step's messages.
        group = world.patient_group if world.device.type == "cpu" else None
        under_way = self._rest.start(world, moves, group)
        layers.under_way += [message.wait for message in under_way.values()]
        for number, awaited in self._awaited.items():
            arrival = functools.partial(_arrive, under_way[number], self._rest.received[number], awaited)
            layers[moves[number].layer].expect(arrival)


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
    """Carry out the moves; collective over the world. Layers that are sent stay until the caller drops them.

    Of the moves in ``overlap`` the optimizers' tensors stay behind until :meth:`Migration.send_rest`; their
    sources do not change them any more.

    Raises:
        MigrationFailed: some rank could not send, receive or unpack a layer; all ranks keep their layers.
        PeerLost: through the caller's :func:`peer_failures`.
    """
    watch = watch or Stopwatch()
    layers.settle()
    parcels = _Parcels(world, moves, overlap)
    parcels.pack(layers)
    watch.lap("pack")
    arrived: dict[int, Layer] = {}
    awaited: dict[int, list[torch.Tensor]] = {}
    failure: Exception | None = None
    try:
        # While others pack.
        with values_follow():
            arrived = {n: layers.make(moves[n].layer) for n in parcels.received}
    except _FAILURES as error:
        failure = error
    watch.lap("build")
    parcels.make_room()
    watch.lap("agree")
    for message in parcels.now.start(world, moves).values():
        message.wait()
    watch.lap("transfer")
    now, later, failure = parcels.now, parcels.later, failure or parcels.failure
    try:
        for number, layer in arrived.items():
            tensors = unpack(now.received[number][0])
            layer.load(tensors)
            waits = [layer.optimizer_tensor(name) for name, value in tensors.items() if value.is_meta]
            if waits:
                awaited[number], later.received[number] = waits, [as_bytes(value) for value in waits]
                layer.expect(_not_sent)
    except _FAILURES as error:
        failure = failure or error
    watch.lap("load")
    failures, total = world.sum([float(failure is not None), float(now.byte_count + later.byte_count)])
    if failures > 0:
        raise MigrationFailed(f"layers {[m.layer for m in moves]} stay where they were") from failure
    watch.lap("agree")
    layers.hold(arrived.values())
    byte_count = round(total / world.mesh.column)
    return Migration(moves=tuple(moves), byte_count=byte_count, _rest=later, _awaited=awaited)


def _not_sent() -> None:
    raise RuntimeError("the optimizer's state of a layer is needed before it was sent")


def _arrive(message: _Message, received: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> None:
    message.wait()
    for part, value in zip(received, state, strict=True):
        if not value.is_contiguous():
            value.copy_(part.view(value.dtype).reshape(value.shape))
