"""A block over some positions of each sequence, as many as the sequence with the most has."""

from typing import Any

import torch
from torch import nn


def run_at(block: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a block on the chosen positions, which attend among each other; the others keep their states.

    Sequences with fewer are filled up at the end, where causal attention hides the filling.

    Args:
        block: a :class:`~ballast_trainer.models.blocks.TransformerBlock`.
        hidden: [B, S, D].
        chosen: bool [B, S]; at least one.

    Returns:
        The states [B, S, D], of the others unchanged, and the block's output [B, S, D], of the others too.
    """
    typed: Any = block
    longest = int(chosen.sum(1).max())
    if longest == hidden.shape[1]:
        every = torch.arange(longest, device=hidden.device)[None].expand(hidden.shape[0], -1)
        after = typed.run_at(hidden, every)
    else:
        # The chosen ones first, in the order of the sequence.
        order = torch.sort((~chosen).to(torch.int8), dim=1, stable=True).indices[:, :longest]
        index = order.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        part = typed.run_at(hidden.gather(1, index), order)
        after = hidden.to(part.dtype).scatter(1, index, part)
    return torch.where(chosen.unsqueeze(-1), after, hidden.to(after.dtype)), after
