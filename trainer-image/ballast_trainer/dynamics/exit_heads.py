"""Exit heads: a prediction of the model's classes from the states after a block (CALM, section 3.5, softmax).

The head of the model is on the last stage alone.  So each exit has a small one of its own, of low rank, which
learns from the same targets: with weight ``headWeight`` its loss is part of the job's, and also trains the
blocks before it.  That is the weighted sum of the exits' losses of CALM (section 3.3) and BranchyNet.
"""

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.errors import TrainerError
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
        best = torch.softmax(logits.detach(), dim=-1).topk(min(2, logits.shape[-1]), dim=-1).values
        return best[..., 0] - best[..., -1] if logits.shape[-1] > 1 else best[..., 0]

    def loss(self, logits: torch.Tensor, still_in: torch.Tensor) -> torch.Tensor | None:
        """Mean cross-entropy of the positions that are still in; None outside of a step's microbatches.

        Args:
            logits: [B, S, V].
            still_in: bool [B, S].

        Raises:
            TrainerError: the targets are no classes of positions, or outside of V.
        """
        targets = CURRENT_FORWARD.targets()
        if targets is None or not bool(still_in.any()):
            return None
        if targets.shape != logits.shape[:2] or targets.dtype != torch.int64:
            raise TrainerError(
                f"earlyExit: exits by softmax learn from a class for each position, int64 "
                f"{list(logits.shape[:2])}; the targets are {targets.dtype} {list(targets.shape)}. "
                "To fix: exits: {confidence: saturation}, or head"
            )
        wanted = targets[still_in]
        # Positions without a target, as torch marks them.
        if int(wanted.max()) >= logits.shape[-1] or bool(((wanted < 0) & (wanted != -100)).any()):
            raise TrainerError(
                f"earlyExit: targets from {int(wanted.min())} to {int(wanted.max())} are no classes of "
                f"exits.vocabulary: {logits.shape[-1]}. To fix: the number of classes of the model's head"
            )
        if bool((wanted == -100).all()):
            return None
        return functional.cross_entropy(logits[still_in], wanted)
