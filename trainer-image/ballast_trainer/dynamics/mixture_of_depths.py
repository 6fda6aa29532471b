"""Mixture of depths (Raposo et al. 2024): a block computes only the positions its router picks.

A routed block scores positions with a learnt router and runs on the best ``1 - target`` of each sequence; the
others pass it by.  The block's output is scaled by the router's score, so that the router learns.  The router
compares positions with later ones, which are not known when text is generated: a predictor learns from each
position alone whether it is picked (section 3.5), and decides in evaluation mode.
"""

from collections.abc import Mapping
from typing import Any

import torch
from ballast_policies.contract.job.dynamics import DepthsSettings, DynamicConfig
from torch import nn
from torch.nn import functional

from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule, run_at, with_side_loss
from ballast_trainer.dynamics.schedule import whole_units
from ballast_trainer.layers.layer import LayerSet


class RoutedBlock(ChangingModule):
    """A block over the positions that its router picks, [B, S, D] -> [B, S, D].

    Attributes, which are on the device:
        computed: fraction of the positions that the block computes, in the newest forward.
        agreement: fraction of the positions for which the predictor says what the router does, in the newest
            forward.
    """

    def __init__(self, block: nn.Module, settings: DepthsSettings) -> None:
        super().__init__()
        width: Any = block.width
        self.block = block
        self.router = nn.Linear(width, 1)
        self.predictor = nn.Linear(width, 1)
        self.agreement, self.computed = torch.tensor(0.0), torch.tensor(1.0)
        self._threshold = settings.threshold
        self._weight = settings.predictor_weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Route, run, put back."""
        scores = self.router(hidden).squeeze(-1)
        most = None
        if self.strength == 0:
            # Every position is computed.
            picked, most = torch.ones_like(scores, dtype=torch.bool), scores.shape[1]
        elif self.training:
            picked, most = self._best(scores.detach())
        else:
            picked = self.predictor(hidden).squeeze(-1) > 0
            if not bool(picked.any()):
                self.computed = torch.tensor(0.0)
                return hidden
        self.computed = picked.float().mean()
        states, after = run_at(self.block, hidden, picked, most)
        weight = torch.sigmoid(scores).unsqueeze(-1)
        mixed = torch.where(picked.unsqueeze(-1), hidden + weight * (after - hidden), states)
        if self.training and torch.is_grad_enabled() and self.strength > 0:
            logits = self.predictor(hidden.detach()).squeeze(-1).float()
            self.agreement = ((logits.detach() > 0) == picked).float().mean()
            loss = functional.binary_cross_entropy_with_logits(logits, picked.float())
            mixed = with_side_loss(mixed, self._weight * loss)
        return mixed

    def _best(self, scores: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Positions that are picked [B, S], and how many of each sequence, where that is known."""
        length = scores.shape[1]
        capacity = max(1, length - whole_units(self.strength * length))
        best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :capacity]
        picked = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
        if self._threshold is None:
            return picked, capacity
        wanted = torch.sigmoid(scores) >= self._threshold
        # The best one of each sequence in any case.
        return (picked & wanted).scatter(1, best[:, :1], True), None


class MixtureOfDepths(BlockChange):
    """Routed blocks pass by ``target`` of the positions."""

    measures: str | None = "routing"
    needs = ("run_at", "width")
    order = 2
    part = RoutedBlock

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        super().__init__(config, layer_count)
        self._settings = config.depths or DepthsSettings()
        self.every_blocks = self._settings.every_blocks

    def change_block(self, block: nn.Module, index: int) -> nn.Module:
        """Wrap it."""
        return RoutedBlock(block, self._settings)

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """Share that each routed block computes, and how often its predictor agrees with its router."""
        return {
            "layers": {index: float(block.agreement) for index, block in self.parts(layers)},
            "computed": {index: float(block.computed) for index, block in self.parts(layers)},
        }

    def idle(self, figures: Mapping[str, Mapping[int, Any]]) -> str:
        """All positions are computed."""
        return "" if any(part < 1 for part in figures["computed"].values()) else "every position is computed"
