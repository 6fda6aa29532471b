"""Replicas of a stage as a group that sums gradients."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_made: dict[tuple[int, ...], Any] = {}
_world: Any = None


def replica_group(stage_ranks: Sequence[Sequence[int]], rank: int) -> Any:
    """The process group of ``rank``'s fellow replicas, None where it has none; collective over all ranks.

    Groups are made once for the process group that stands: every rank makes all of them, in one order.

    Args:
        stage_ranks: by stage, its ranks.
        rank: this one.
    """
    global _world  # noqa: PLW0603 - groups end with the process group they were made in
    if _world is not dist.group.WORLD:
        _made.clear()
        _world = dist.group.WORLD
    mine = None
    for holders in map(tuple, stage_ranks):
        if len(holders) > 1:
            if holders not in _made:
                _made[holders] = dist.new_group(list(holders))
            if rank in holders:
                mine = _made[holders]
    return mine


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Any) -> None:
    """Replace gradients by their sum over the replicas, as one message; collective over the group.

    A replica that has no gradient of a parameter counts as zero.
    """
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in learning:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in learning if parameter.grad is not None]
    if not gradients:
        return
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    for same in by_type.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in same])
        dist.all_reduce(flat, group=group)
        offset = 0
        for gradient in same:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()
