"""Expert parallelism: the replicas of a stage share its experts' work, and tokens travel to their expert.

Each replica routes its own microbatch.  A first exchange tells how many tokens each expert has on each
replica, a second one (all-to-all) sends every token to the rank that computes its expert, a third one brings
the results back; the backward does the same with gradients.  All replicas run the same microbatch number at
the same time, so the exchanges meet.

Every rank holds the weights of all experts and computes those placed on it; gradients are summed over the
replicas with all others.  So a placement is a list of ranks, and changing it moves no weights: it follows the
tokens of the last step, by the largest first onto the rank that has least (Graham 1969).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ballast_trainer.distributed.axis import Axis

LEAST_GAIN = 0.05
"""Relative fall of the fullest rank's tokens below which experts stay where they are."""


def first_placement(experts: int, ranks: int) -> tuple[int, ...]:
    """The rank of each expert before any token was counted: in turn."""
    return tuple(expert % ranks for expert in range(experts))


def rank_loads(placement: Sequence[int], tokens: Sequence[int], ranks: int) -> list[int]:
    """Tokens of each rank's experts."""
    loads = [0] * ranks
    for rank, count in zip(placement, tokens, strict=True):
        loads[rank] += count
    return loads


def better_placement(placement: tuple[int, ...], tokens: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The rank of each expert by the tokens of the last step, or ``placement`` where that gains little.

    Args:
        placement: in force, by expert.
        tokens: that each expert had, over all ranks.
        ranks: that share the experts.
    """
    found, loads = list(placement), [0] * ranks
    for expert in sorted(range(len(tokens)), key=lambda e: (-tokens[e], e)):
        # Of ranks with as little, the one that has it now.
        rank = min(range(ranks), key=lambda r: (loads[r], r != placement[expert], r))
        found[expert], loads[rank] = rank, loads[rank] + tokens[expert]
    fullest = max(rank_loads(placement, tokens, ranks))
    return tuple(found) if max(loads) < fullest * (1 - LEAST_GAIN) else placement


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of an axis, [sum(sent), D] -> [sum(received), D]."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], axis: Axis
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        return _exchange(rows, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchange(gradient, ctx.received, ctx.sent, ctx.axis), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], axis: Axis) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    axis.count("all_to_all", rows.nbytes)
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=axis.group)
    return out


def expert_output(expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """[n, D] -> [n, D], as a batch of one sequence: an MLP with experts of its own may insist on one."""
    output: torch.Tensor = expert(rows.unsqueeze(0))
    return output.squeeze(0)


@dataclasses.dataclass(slots=True)
class SharedExperts:
    """The experts of a layer over the ranks of an axis.

    Attributes:
        axis: the replicas of the stage.
        placement: the rank of each expert.
        tokens: of each expert over all ranks, since the last :meth:`follow_tokens`.
        computed: tokens that each rank has computed in the newest forward.
        moved: experts that have changed ranks so far.
    """

    axis: Axis
    placement: tuple[int, ...]
    tokens: list[int]
    computed: list[int]
    moved: int = 0

    @classmethod
    def over(cls, axis: Axis, experts: int) -> "SharedExperts":
        """Before any token was counted."""
        return cls(axis, first_placement(experts, axis.size), [0] * experts, [0] * axis.size)

    def run(self, rows: torch.Tensor, expert: torch.Tensor, experts: nn.ModuleList) -> torch.Tensor:
        """The experts' outputs of this rank's rows; collective over the axis.

        Args:
            rows: tokens [N, D].
            expert: of each row, int64 [N].
            experts: all of them.
        """
        count, size = len(experts), self.axis.size
        # Experts by rank, and each rank's in ascending order: the order in which rows travel.
        travel = sorted(range(count), key=lambda e: (self.placement[e], e))
        place = torch.empty(count, dtype=torch.int64)
        place[torch.tensor(travel)] = torch.arange(count)
        order = torch.sort(place.to(expert.device)[expert], stable=True).indices
        mine = torch.bincount(expert, minlength=count)
        by_rank = torch.stack(self.axis.all_gather(mine)).cpu()
        self._count(by_rank)
        sent = rank_loads(self.placement, by_rank[self.axis.index].tolist(), size)
        own = [e for e in travel if self.placement[e] == self.axis.index]
        pieces = [[int(by_rank[source, e]) for e in own] for source in range(size)]
        received = [sum(piece) for piece in pieces]
        arrived = _AllToAll.apply(rows[order], sent, received, self.axis)  # type: ignore[no-untyped-call]
        # From each rank, one piece for each expert: put together by expert.
        parts = arrived.split([length for piece in pieces for length in piece]) if own else ()
        done: list[torch.Tensor] = [arrived] * len(parts)
        for number, e in enumerate(own):
            places = range(number, len(parts), len(own))
            output = expert_output(experts[e], torch.cat([parts[at] for at in places]))
            for at, piece in zip(places, output.split([len(parts[at]) for at in places]), strict=True):
                done[at] = piece
        # A rank without an expert returns nothing, in the same type as the others.
        results = (torch.cat(done) if done else arrived).to(rows.dtype)
        back = _AllToAll.apply(results, received, sent, self.axis)  # type: ignore[no-untyped-call]
        out: torch.Tensor = back[torch.argsort(order)]
        return out

    def follow_tokens(self) -> None:
        """A step of the job is over: place the experts by its tokens; the same on every rank of the axis."""
        if sum(self.tokens) == 0:
            return
        placement = better_placement(self.placement, self.tokens, self.axis.size)
        self.moved += sum(a != b for a, b in zip(placement, self.placement, strict=True))
        self.placement, self.tokens = placement, [0] * len(self.tokens)

    def _count(self, by_rank: torch.Tensor) -> None:
        newest: list[int] = by_rank.sum(0).tolist()
        self.tokens = [a + b for a, b in zip(self.tokens, newest, strict=True)]
        self.computed = rank_loads(self.placement, newest, self.axis.size)
