"""Messages between ranks: sent without waiting, received ahead of need.

A rank waits only for the inputs of its next action; it never waits for the receiver of a message.  So a
schedule that is free of deadlock in simulation is free of it here.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.planning.memory.rank_bytes import RECEIVED_AHEAD

from ballast_trainer.layers.boundaries import Boundary, wire
from ballast_trainer.pipeline.executor.groups import Link, link_of
from ballast_trainer.pipeline.executor.order import Message, RankOrder


class Transport:
    """Point to point, each direction of each link in a separate process group.

    It starts transfers; each object that it returns has ``wait()``.
    """

    def __init__(self, groups: Mapping[Link, Any], line: Sequence[int]) -> None:
        """Prepare.

        Args:
            groups: of each link.
            line: the rank at each position of this pipeline.
        """
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
