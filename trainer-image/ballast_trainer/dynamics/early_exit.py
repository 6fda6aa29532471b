"""Early exit: positions whose hidden state no longer changes skip the layers that follow.

After each block the positions that the block changed least (cosine of its input and output, the
saturation measure of CALM) exit; their hidden state goes to the head unchanged.  After layer i of L
the fraction ``target * i / (L - 1)`` of the positions has left, so later layers get cheaper.
The mask of exited positions travels as one more channel of the hidden state: shapes between stages
stay fixed.  The same number of positions exits from every sequence, so that the remaining ones form a
dense tensor.
"""

import math

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule
from ballast_trainer.models.gpt import Block


class ExitingBlock(ChangingModule):
    """A block over the positions that are still in, [B, S, D + 1] -> [B, S, D + 1].

    The last channel is 1 where a position has exited, else 0.
    """

    def __init__(self, block: Block, depth: float) -> None:
        super().__init__(depth)
        self.block = block

    def forward(self, marked: torch.Tensor) -> torch.Tensor:
        """Run the block on the remaining positions, then let those that changed least exit."""
        hidden, exited = marked[..., :-1], marked[..., -1].detach()
        length = hidden.shape[1]
        # The same in every sequence: each lets the same number out in each layer.
        staying = length - int(exited[0].sum())
        positions = torch.sort(torch.sort(exited, dim=1, stable=True).indices[:, :staying], dim=1).values
        index = positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        before = hidden.gather(1, index)
        after = self.block(before)
        wanted = math.floor(self.strength * self.depth * length)
        leaving = min(max(0, wanted - (length - staying)), staying - 1)
        if leaving > 0:
            settled = functional.cosine_similarity(before.detach(), after.detach(), dim=-1)
            chosen = torch.sort(settled, dim=1, descending=True, stable=True).indices[:, :leaving]
            exited = exited.scatter(1, positions.gather(1, chosen), 1.0)
        return torch.cat([hidden.scatter(1, index, after), exited.unsqueeze(-1)], dim=-1)


class MarkedStart(nn.Module):
    """The first layer, with the mask channel added: no position has exited."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[B, S] -> [B, S, D + 1]."""
        return functional.pad(self.layer(inputs), (0, 1))


class UnmarkedEnd(nn.Module):
    """The last layer, which sees the hidden states alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, marked: torch.Tensor) -> torch.Tensor:
        """[B, S, D + 1] -> logits."""
        logits: torch.Tensor = self.layer(marked[..., :-1])
        return logits


class EarlyExit(BlockChange):
    """Up to ``target`` of the positions exit before the last layer."""

    def change_block(self, block: Block, depth: float) -> nn.Module:
        """A block that lets positions out."""
        return ExitingBlock(block, depth)

    def change_other(self, module: nn.Module, index: int) -> nn.Module:
        """The first layer adds the channel, the last takes it away."""
        return MarkedStart(module) if index == 0 else UnmarkedEnd(module)
