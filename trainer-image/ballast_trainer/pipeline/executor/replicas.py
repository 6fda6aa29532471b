"""Sum of gradients over the replicas of a stage."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


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


def gather_rows(flat: torch.Tensor, *, group: Any) -> list[torch.Tensor]:
    """A flat tensor of every replica, by replica; collective over the group."""
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, flat, group=group)
    return rows
