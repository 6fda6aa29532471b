"""Messages between ranks: sent without waiting, received ahead of need.

A rank waits only for the inputs of its next action; it never waits for the receiver of a message.  So a
schedule that is free of deadlock in simulation is free of it here.

Every rank makes all process groups in one order, as torch requires, once for each default process group.
"""

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.planning.memory.rank_bytes import RECEIVED_AHEAD

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.process_group import new_group
from ballast_trainer.layers.boundaries import Boundary, wire
from ballast_trainer.pipeline.executor.order import Message, RankOrder

Link = tuple[int, bool, int, int]
"""Boundary, whether gradients, source and target: its messages are sent and needed in one order."""

_made: dict[Hashable, Any] = {}
_world: Any = None


def _group(key: Hashable, ranks: Sequence[int], connect: Callable[[Any], None] | None = None) -> Any:
    global _world  # noqa: PLW0603 - groups end with the process group they were made in
    if _world is not dist.group.WORLD:
        _made.clear()
        _world = dist.group.WORLD
    if key not in _made:
        _made[key] = new_group(ranks)
        if connect is not None:
            connect(_made[key])
    return _made[key]


def _connect(source: int, target: int, group: Any) -> None:
    """Send one message over a link that is new.

    NCCL connects two ranks in their first message, and both wait for it. Ranks whose first messages were
    those of a schedule would wait for each other on different links, for ever; links are made in one order.
    """
    if dist.get_rank() in (source, target):
        message = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
        if dist.get_rank() == source:
            dist.send(message, target, group=group)
        else:
            dist.recv(message, source, group=group)


def replica_axis(stage_ranks: Sequence[Sequence[int]], rank: int) -> Axis:
    """``rank`` and its fellow replicas; collective over all ranks."""
    mine = Axis(ranks=(rank,))
    for holders in map(tuple, stage_ranks):
        if len(holders) > 1:
            group = _group(holders, holders)
            if rank in holders:
                mine = Axis(ranks=holders, index=holders.index(rank), group=group)
    return mine


def link_of(message: Message) -> Link:
    """The link that a message takes."""
    return message.boundary, message.backward, message.source, message.target


def links_of(stage_ranks: Sequence[Sequence[int]], microbatches: int) -> tuple[Link, ...]:
    """All links between stages, by their ranks: microbatch k is that of number k mod their count."""
    ends = {
        (boundary, some[k % len(some)], others[k % len(others)])
        for boundary, (some, others) in enumerate(itertools.pairwise(stage_ranks))
        for k in range(microbatches)
    }
    there_and_back = [
        link
        for boundary, one, other in ends
        if one != other
        for link in ((boundary, False, one, other), (boundary, True, other, one))
    ]
    return tuple(sorted(there_and_back))


def link_groups(
    stage_ranks: Sequence[Sequence[int]],
    microbatches: int,
    lines: Sequence[Sequence[int]],
    line: Sequence[int],
) -> Mapping[Link, Any]:
    """The group of each link of this rank's pipeline; collective over all ranks.

    Tags tell messages apart in gloo: one group serves all links.  NCCL has none, and carries out the
    transfers of two ranks in the order of their calls: with a group of two ranks for each direction of each
    boundary that order is the same at both ends.

    Args:
        stage_ranks: by stage, the positions that hold it in each pipeline.
        microbatches: that go through it.
        lines: the ranks of every pipeline by position, in one order everywhere.
        line: this rank's.
    """
    links = links_of(stage_ranks, microbatches)
    if dist.get_backend() == "gloo":
        of_line = {tuple(ranks): _group(("messages", *ranks), sorted(ranks)) for ranks in lines}
        return dict.fromkeys(links, of_line[tuple(line)])
    made = {
        (tuple(ranks), link): _group(
            ("link", *link[:2], ranks[link[2]], ranks[link[3]]),
            sorted(ranks[at] for at in link[2:]),
            functools.partial(_connect, ranks[link[2]], ranks[link[3]]),
        )
        for ranks in lines
        for link in links
    }
    return {link: made[tuple(line), link] for link in links}


class Transport:
    """Point to point, each direction of each link in a separate process group.

    It starts transfers; each object that it returns has ``wait()``.
    """

    def __init__(self, groups: Mapping[Link, Any], line: Sequence[int]) -> None:
        """Prepare; ``line``: the rank at each position of this pipeline."""
        self._groups, self._line = groups, line

    def send(self, tensor: torch.Tensor, message: Message, tag: int) -> Any:
        """Begin to send; the tensor must live until the transfer is waited for."""
        target = self._line[message.target]
        return dist.isend(tensor, dst=target, group=self._groups[link_of(message)], tag=tag)

    def receive(self, into: torch.Tensor, message: Message, tag: int) -> Any:
        """Begin to receive."""
        source = self._line[message.source]
        return dist.irecv(into, src=source, group=self._groups[link_of(message)], tag=tag)


@dataclasses.dataclass(frozen=True, slots=True)
class _Sending:
    message: Message
    tensors: Sequence[torch.Tensor]
    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Links:
    """One rank's messages in one run of a schedule."""

    def __init__(
        self,
        order: RankOrder,
        boundaries: tuple[Boundary, ...],
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._order, self._boundaries = order, boundaries
        self._transport, self._device = transport, device
        self._sending: dict[int, deque[_Sending]] = {}
        self._coming: Iterator[Message] = iter([m for m in order.messages if self._travels(m)])
        self._next: Message | None = next(self._coming, None)
        self._posted: deque[tuple[Sequence[torch.Tensor], Sequence[Any]]] = deque()
        self._most = max((len(boundary.tensors) for boundary in boundaries), default=1)
        self._admitted = 0
        self._end: int | None = None

    def admit(self, microbatches: int) -> None:
        """Microbatches below this number will certainly run: their messages may be awaited."""
        self._admitted = microbatches
        self._post()

    def end_before(self, microbatch: int) -> None:
        """Microbatches from this number on will not run: their messages do not come."""
        self._end = microbatch

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send the result of an action."""
        if self._travels(message):
            tensors = [tensor.detach().contiguous() for tensor in tensors]
            works = [
                self._transport.send(wire(tensor), message, tag)
                for tag, tensor in self._tagged(message, tensors)
            ]
            pending = self._sending.setdefault(message.target, deque())
            pending.append(_Sending(message, tensors, works))

    def receive(self, message: Message) -> Sequence[torch.Tensor]:
        """The input of an action, once received; nothing of gradients that are not computed."""
        if not self._travels(message):
            return ()
        # Messages are received in the order in which they are needed.
        tensors, works = self._posted.popleft()
        for work in works:
            work.wait()
        self._post()
        pending = self._sending.get(message.source, deque())
        while pending and message.shows(pending[0].message):
            pending.popleft().wait()
        return tensors

    def finish(self) -> None:
        """Wait until all messages sent have been received."""
        for pending in self._sending.values():
            while pending:
                pending.popleft().wait()

    def _post(self) -> None:
        while self._next is not None and len(self._posted) < RECEIVED_AHEAD:
            message = self._next
            if self._end is None or message.producer.microbatch < self._end:
                if message.producer.microbatch >= self._admitted:
                    return
                coming = self._boundaries[message.boundary].travelling(backward=message.backward)
                buffers = [sent.empty(self._device) for sent in coming]
                works = [
                    self._transport.receive(wire(buffer), message, tag)
                    for tag, buffer in self._tagged(message, buffers)
                ]
                self._posted.append((buffers, works))
            self._next = next(self._coming, None)

    def _travels(self, message: Message) -> bool:
        return not message.backward or self._boundaries[message.boundary].requires_grad

    def _tagged(self, message: Message, tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """The tensors of a message that have bytes to send, each with its tag."""
        stages = self._order.schedule.stages
        tag = (message.producer.microbatch * stages + message.boundary) * 2 + message.backward
        return [(tag * self._most + i, tensor) for i, tensor in enumerate(tensors) if tensor.numel() > 0]
