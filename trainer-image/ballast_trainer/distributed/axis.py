"""The ranks along one axis of the mesh, and collectives among them."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ballast_trainer.distributed.activity import ACTIVITY

Exchange = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(slots=True, kw_only=True)
class Axis:
    """This rank's line of the mesh.

    Layers hold the axes that they communicate over, so a change of the ranks changes the axis in place.

    Attributes:
        ranks: world ranks along the axis, ascending.
        index: which of them this rank is.
        group: their process group; None for the default one, or where this rank is alone.
        calls: number of collectives, by name; every rank of the axis counts the same.
        bytes: bytes that this rank has put into them, by name.
        before_each: called before every collective of a layer; None: nothing.
    """

    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: Any = None
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes: Counter[str] = dataclasses.field(default_factory=Counter)
    before_each: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return len(self.ranks)

    def follow(self, now: "Axis") -> "Axis":
        """Take over the ranks and group of ``now``, of the same size; returns this axis, its counts go on."""
        assert (now.size, now.index) == (self.size, self.index)
        self.ranks, self.group = now.ranks, now.group
        return self

    def count(self, name: str, size: int) -> None:
        """A collective is about to begin: count it, and the bytes that this rank puts into it."""
        if self.before_each is not None:
            self.before_each()
        self.calls[name] += 1
        self.bytes[name] += size

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        """Sum (or largest) over the axis, element-wise, in place; contiguous tensors only."""
        if self.size > 1:
            self.count("all_reduce", tensor.nbytes)
            operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            with ACTIVITY.waiting():
                dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def begin_sum(
        self, parts: torch.Tensor, lengths: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[Any]]:
        """Start a sum over the axis, which is there once the works have ended; ``parts`` is used up.

        Args:
            parts: one-dimensional.
            lengths: by rank, of its part of them: each gets the sum of its own alone.  None: all get all.

        Returns:
            Where the sum will be, and the works to wait for.
        """
        if lengths is None:
            self.count("all_reduce", parts.nbytes)
            return parts, [dist.all_reduce(parts, group=self.group, async_op=True)]
        self.count("reduce_scatter", parts.nbytes)
        if len(set(lengths)) == 1:
            own = parts.new_empty(lengths[0])
            return own, [dist.reduce_scatter_single(own, parts, group=self.group, async_op=True)]
        pieces = list(zip(self.ranks, parts.split(list(lengths)), strict=True))
        works = [dist.reduce(part, rank, group=self.group, async_op=True) for rank, part in pieces]
        return pieces[self.index][1], works

    def gather_parts(self, own: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The one-dimensional parts of all ranks, of these lengths, one after the other."""
        self.count("all_gather", own.nbytes)
        parts = own.new_empty(sum(lengths))
        with ACTIVITY.waiting():
            if len(set(lengths)) == 1:
                dist.all_gather_single(parts, own, group=self.group)
                return parts
            for rank, part in zip(self.ranks, parts.split(list(lengths)), strict=True):
                if rank == self.ranks[self.index]:
                    part.copy_(own)
                dist.broadcast(part, src=rank, group=self.group)
        return parts

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of the rank with index ``source``, in place on the others."""
        if self.size > 1:
            self.count("broadcast", tensor.nbytes)
            with ACTIVITY.waiting():
                dist.broadcast(tensor, src=self.ranks[source], group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of one shape, by index."""
        if self.size == 1:
            return [tensor]
        self.count("all_gather", tensor.nbytes)
        gathered = [torch.empty_like(tensor) for _ in self.ranks]
        with ACTIVITY.waiting():
            dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def largest(self, values: list[float], device: torch.device) -> list[float]:
        """Element-wise largest over the axis; the same floats on each rank."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        largest: list[float] = self.all_reduce(tensor, largest=True).tolist()
        return largest

    def gather_values(self, values: list[float], device: torch.device) -> list[list[float]]:
        """Floats of all ranks, by index."""
        rows = self.all_gather(torch.tensor(values, dtype=torch.float64, device=device))
        return [row.tolist() for row in rows]

    def gather_objects(self, value: Any) -> list[Any]:
        """Values of all ranks, by index."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values


def wait_for(works: Iterable[Any]) -> None:
    """Wait for what was started on an axis."""
    with ACTIVITY.waiting():
        for work in works:
            work.wait()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, there: Exchange, back: Exchange) -> torch.Tensor:
        ctx.back = back
        return there(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None


def exchanged(value: torch.Tensor, there: Exchange, back: Exchange) -> torch.Tensor:
    """Result of ``there`` on a tensor among ranks; ``back`` makes the tensor's gradient of the result's."""
    out: torch.Tensor = _Exchange.apply(value, there, back)  # type: ignore[no-untyped-call]
    return out
