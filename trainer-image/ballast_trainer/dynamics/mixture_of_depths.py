"""Mixture of depths (Raposo et al. 2024): a block computes only the positions its router picks.

Each block scores positions with a learnt router and runs on the top ones of each sequence; the
others pass it by.  The block's output is scaled by the router's score, so that the router learns.
The capacity falls from all positions to ``1 - target`` of them, in every other block, as published.
"""

import math

import torch
from torch import nn

from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule
from ballast_trainer.models.gpt import Block


class RoutedBlock(ChangingModule):
    """A block over the positions that its router picks, [B, S, D] -> [B, S, D]."""

    def __init__(self, block: Block, depth: float) -> None:
        super().__init__(depth)
        self.block = block
        self.router = nn.Linear(block.dim, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Route, run, put back."""
        length = hidden.shape[1]
        capacity = max(1, math.ceil((1 - self.strength) * length))
        scores = self.router(hidden).squeeze(-1)
        picked = torch.sort(scores.detach(), dim=1, descending=True, stable=True).indices[:, :capacity]
        # In the order of the sequence, so that attention stays causal.
        positions = torch.sort(picked, dim=1).values
        index = positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        before = hidden.gather(1, index)
        weight = torch.sigmoid(scores.gather(1, positions)).unsqueeze(-1)
        after = before + weight * (self.block(before) - before)
        return hidden.scatter(1, index, after)


class MixtureOfDepths(BlockChange):
    """Every other block passes by up to ``target`` of the positions."""

    def change_block(self, block: Block, depth: float) -> nn.Module:
        """Every other block is routed."""
        index = round(depth * (self._layer_count - 1))
        return RoutedBlock(block, depth) if index % 2 == 0 else block
