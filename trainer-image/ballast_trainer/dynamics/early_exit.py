"""Early exit: positions that are confident of their state skip the layers that follow (CALM, 2022).

A position leaves where its confidence reaches ``exits.threshold``; its hidden state goes to the head
unchanged, and takes no further part in attention.  How many leave, and where, follows from the states: the
loads of the layers are measured, not set.  ``target`` bounds how many of a sequence may be out.

Three measures: ``saturation``, the cosine of a position's state before and after a block (CALM, section 3.5);
``head``, a linear head before each block that learns whether the block would leave the state as it is, and
saves the block too; ``softmax``, by how much the likeliest class of a small exit head is ahead of the next
(CALM's softmax response).  The mask of those that left travels as one more channel of the hidden state, so
shapes between stages stay fixed.

The model's head reads the states of all exits, so its loss trains every exit where positions leave;
``sampled`` lets some leave at a layer drawn at random, which is the weighted sum of the exits' losses,
sampled; the exit heads of ``softmax`` learn from the targets themselves, all of them in every step.

The model's head is on the last stage alone, so each exit of ``softmax`` has a small one of its own, of low
rank. With weight ``headWeight`` its loss is part of the job's, and also trains the blocks before it: the
weighted sum of the exits' losses of CALM (section 3.3) and BranchyNet.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from ballast_policies.contract.job.dynamics import Confidence, DynamicConfig, ExitsSettings
from torch import nn
from torch.nn import functional

from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule, run_at, with_side_loss
from ballast_trainer.dynamics.schedule import whole_units
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.running import CURRENT_FORWARD


class ExitHead(nn.Module):
    """States [B, S, D] -> logits [B, S, V], by a map of rank ``rank``."""

    def __init__(self, width: int, rank: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, min(rank, width), bias=False)
        self.up = nn.Linear(min(rank, width), classes)
        # Nothing is predicted, and no position leaves, before it has learnt.
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits, float32."""
        logits: torch.Tensor = self.up(self.down(self.norm(states))).float()
        return logits

    @staticmethod
    def confidence(logits: torch.Tensor) -> torch.Tensor:
        """Difference between the two largest probabilities, [B, S] (CALM's softmax response)."""
        best = torch.softmax(logits.detach(), dim=-1).topk(2, dim=-1).values
        return best[..., 0] - best[..., 1]

    def loss(self, logits: torch.Tensor, still_in: torch.Tensor) -> torch.Tensor | None:
        """Mean cross-entropy of the positions that are still in; None outside of a step's microbatches.

        Args:
            logits: [B, S, V].
            still_in: bool [B, S].

        Raises:
            TrainerError: the targets are no classes of positions, or outside of V.
        """
        targets = CURRENT_FORWARD.targets()
        if targets is None:
            return None
        if targets.shape != logits.shape[:2] or targets.dtype != torch.int64:
            raise TrainerError(
                f"earlyExit: exits by softmax learn from a class for each position, int64 "
                f"{list(logits.shape[:2])}; the targets are {targets.dtype} {list(targets.shape)}. "
                "To fix: exits: {confidence: saturation}, or head"
            )
        places = still_in.nonzero(as_tuple=True)
        wanted = targets[places]
        # Positions without a target, as torch marks them.
        has_one = wanted != -100
        wrong = has_one & ((wanted < 0) | (wanted >= logits.shape[-1]))
        is_wrong, learns = torch.stack([wrong.any(), has_one.any()]).tolist()
        if is_wrong:
            raise TrainerError(
                f"earlyExit: targets from {int(wanted.min())} to {int(wanted.max())} are no classes of "
                f"exits.vocabulary: {logits.shape[-1]}. To fix: the number of classes of the model's head"
            )
        return functional.cross_entropy(logits[places], wanted) if learns else None


_FIRST_DOUBT = 3.0
"""Minus the first logit of a head: it lets 5 % leave at threshold 0.05, none at 0.95, before it has
learnt."""


class ExitingBlock(ChangingModule):
    """A block over the positions that are still in, [B, S, D + 1] -> [B, S, D + 1].

    The last channel is 1 where a position has left, else 0; with probability ``hazard`` one leaves because it
    was drawn.
    """

    def __init__(self, block: nn.Module, settings: ExitsSettings, *, hazard: float) -> None:
        super().__init__()
        self.block = block
        self._newest: torch.Tensor | None = None
        self._settings = settings
        self._hazard = hazard
        # Of a block that tells it, as those do in which a head is learnt.
        width: Any = getattr(block, "width", None)
        self.head: nn.Linear | None = None
        if settings.confidence == Confidence.HEAD:
            self.head = nn.Linear(width, 1)
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, -_FIRST_DOUBT)
        self.exit_head: ExitHead | None = None
        if settings.confidence == Confidence.SOFTMAX:
            assert settings.vocabulary is not None
            self.exit_head = ExitHead(width, settings.rank, settings.vocabulary)

    def forward(self, marked: torch.Tensor) -> torch.Tensor:
        """Run the block on the remaining positions; before (head) or after it the confident ones leave."""
        before, out = marked[..., :-1], marked[..., -1].detach() > 0.5
        logits = None
        if self.head is not None:
            logits = self.head(before.detach()).squeeze(-1).float()
            out = out | self._leaving(torch.sigmoid(logits.detach()), out)
        # One position of each sequence stays (`_leaving`).
        states, after = run_at(self.block, before, ~out)
        alike = functional.cosine_similarity(before.detach().float(), after.detach().float(), dim=-1)
        if self.exit_head is not None:
            classes = self.exit_head(after)
            loss = self.exit_head.loss(classes, ~out) if torch.is_grad_enabled() else None
            if loss is not None:
                states = with_side_loss(states, self._settings.head_weight * loss)
            out = out | self._leaving(self.exit_head.confidence(classes), out)
        elif logits is None:
            out = out | self._leaving(alike, out)
        elif torch.is_grad_enabled():
            unchanged = (alike >= self._settings.saturation).float()
            loss = functional.binary_cross_entropy_with_logits(logits[~out], unchanged[~out])
            states = with_side_loss(states, self._settings.head_weight * loss)
        self._newest = out
        return torch.cat([states, out.to(states.dtype).unsqueeze(-1)], dim=-1)

    @property
    def left(self) -> float:
        """Fraction of the positions that are out, in the newest forward; waits for the device."""
        return 0.0 if self._newest is None else float(self._newest.float().mean())

    def _leaving(self, confidence: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Mask of the positions that leave [B, S]: the most confident first, as many as may still leave."""
        length = out.shape[1]
        most = min(whole_units(self.strength * length), length - 1)
        if most == 0:
            return torch.zeros_like(out)
        willing = confidence >= self._settings.threshold
        if self._hazard > 0 and self.training:
            drawn = torch.rand(out.shape, device=out.device) < self._hazard
            willing, confidence = willing | drawn, confidence + drawn
        willing = willing & ~out
        order = torch.sort(confidence.masked_fill(~willing, -math.inf), dim=1, descending=True, stable=True)
        place = torch.empty_like(order.indices).scatter(
            1, order.indices, torch.arange(length, device=out.device).expand_as(out)
        )
        return willing & (place < (most - out.sum(1, keepdim=True)))


class MarkedStart(nn.Module):
    """The first layer, with the mask channel added: no position has left."""

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
    """Early exit of up to ``target`` of the positions, before the last layer."""

    measures: str | None = "exits"
    every_layer_between = True
    order = 2
    part = ExitingBlock

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        super().__init__(config, layer_count)
        self._settings = config.exits or ExitsSettings()
        by_state = self._settings.confidence == Confidence.SATURATION
        self.needs = ("run_at",) if by_state else ("run_at", "width")

    def lacks(self, index: int, module: nn.Module) -> str:
        """The ends need nothing."""
        return "" if index in (0, self._layer_count - 1) else super().lacks(index, module)

    def change_block(self, block: nn.Module, index: int) -> nn.Module:
        """The first layer adds the channel, the last takes it away; the blocks between let positions out."""
        if index == 0:
            return MarkedStart(block)
        if index == self._layer_count - 1:
            return UnmarkedEnd(block)
        blocks = self._layer_count - 2
        # Drawn equally often at each of the blocks, of those that are left.
        hazard = self._settings.sampled / blocks / (1 - self._settings.sampled * (index - 1) / blocks)
        return ExitingBlock(block, self._settings, hazard=hazard)

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """Fraction of the positions that are out after each block."""
        return {"layers": {index: part.left for index, part in self.parts(layers)}}

    def idle(self, figures: Mapping[str, Mapping[int, Any]]) -> str:
        """No position is out."""
        return "" if any(figures["layers"].values()) else "no position was confident enough to leave"
