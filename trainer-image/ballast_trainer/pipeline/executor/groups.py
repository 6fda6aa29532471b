"""Process groups of a pipeline: a stage's replicas, and those that carry messages.

Every rank makes all groups in one order, as torch requires, once for each default process group.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ballast_policies.planning.schedules.schedule import Schedule

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.process_group import new_group
from ballast_trainer.pipeline.executor.order import Message

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
    """``rank`` and its fellow replicas; collective over all ranks.

    Args:
        stage_ranks: by stage, its ranks.
        rank: this one.
    """
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


def links_of(schedule: Schedule) -> tuple[Link, ...]:
    """All links of a schedule."""
    ends = {
        (boundary, schedule.rank_of(boundary, k), schedule.rank_of(boundary + 1, k))
        for boundary in range(schedule.stages - 1)
        for k in range(schedule.microbatches)
    }
    there_and_back = [
        link
        for boundary, one, other in ends
        if one != other
        for link in ((boundary, False, one, other), (boundary, True, other, one))
    ]
    return tuple(sorted(there_and_back))


def link_groups(
    schedule: Schedule, lines: Sequence[Sequence[int]], line: Sequence[int]
) -> Mapping[Link, Any]:
    """The group of each link of this rank's pipeline; collective over all ranks.

    Tags tell messages apart in gloo: one group serves all links.  NCCL has none, and carries out the
    transfers of two ranks in the order of their calls: with a group of two ranks for each direction of each
    boundary that order is the same at both ends.

    Args:
        schedule: of each pipeline; its ranks are positions.
        lines: the ranks of every pipeline by position, in one order everywhere.
        line: this rank's.
    """
    links = links_of(schedule)
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
