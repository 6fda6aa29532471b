"""Mixture of experts: each position goes to one of several MLPs; the fullest determines the cost.

The experts of a layer run as one batched product over as many slots as the fullest expert has
positions, which is also the cost of grouped kernels and expert-parallel ranks: routing imbalance costs
compute.  From ``startStep`` to ``endStep`` the capacity of an expert tightens from all positions
towards the mean, ``mean * experts ** (1 - target)``; positions over an expert's capacity pass the
layer by (Switch Transformer).
The router is trained by the gate, its imbalance measured as fullest expert over mean and printed as
``tokenImbalance`` each time the trainer looks whether to rebalance.
"""

import math

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.models.gpt import Block

EXPERTS = 4


class Experts(ChangingModule):
    """Top-1 routed MLPs of half the dense one's width, [..., D] -> [..., D].

    Attributes:
        token_imbalance: positions of the fullest expert over the mean, in the newest forward.
    """

    def __init__(self, dim: int, depth: float) -> None:
        super().__init__(depth)
        self.router = nn.Linear(dim, EXPERTS)
        bound = dim**-0.5
        self.up = nn.Parameter(torch.empty(EXPERTS, dim, 2 * dim).uniform_(-bound, bound))
        self.down = nn.Parameter(torch.empty(EXPERTS, 2 * dim, dim).uniform_(-bound / 2, bound / 2))
        self.token_imbalance = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Route each position, run the experts over the fullest one's slots, put back."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        gates = torch.softmax(self.router(flat), dim=-1)
        gate, expert = gates.max(dim=-1)
        counts = torch.bincount(expert, minlength=EXPERTS)
        self.token_imbalance = float(counts.max()) * EXPERTS / len(flat)
        limit = math.ceil(len(flat) / EXPERTS * EXPERTS ** (1 - self.strength))
        slots = min(int(counts.max()), limit)
        # A position's place in its expert's queue is how many before it chose the same.
        order = torch.sort(expert, stable=True).indices
        place = torch.empty_like(expert)
        place[order] = (
            torch.arange(len(flat), device=flat.device) - (torch.cumsum(counts, 0) - counts)[expert[order]]
        )
        kept = place < slots
        row = expert[kept] * slots + place[kept]
        queue = flat.new_zeros(EXPERTS * slots, flat.shape[-1]).index_copy(0, row, flat[kept])
        wide = functional.gelu(torch.bmm(queue.view(EXPERTS, slots, -1), self.up))
        out = torch.bmm(wide, self.down).view(EXPERTS * slots, -1)
        position = kept.nonzero(as_tuple=True)[0]
        mixed = torch.zeros_like(flat).index_copy(0, position, out[row] * gate[kept].unsqueeze(-1))
        return mixed.view_as(hidden)


class MixtureOfExperts(BlockChange):
    """Every other block's MLP becomes experts with a capacity that tightens."""

    measures: str | None = "tokenImbalance"

    def measured(self, layers: LayerSet) -> dict[int, float]:
        """Positions of the fullest expert over the mean, in each layer's newest microbatch."""
        return {
            layer.index: module.token_imbalance
            for layer in layers
            for module in layer.module.modules()
            if isinstance(module, Experts)
        }

    def change_block(self, block: Block, depth: float) -> nn.Module:
        """Replace the MLP of every other block."""
        index = round(depth * (self._layer_count - 1))
        if index % 2 == 0:
            block.mlp = Experts(block.dim, depth)
        return block
