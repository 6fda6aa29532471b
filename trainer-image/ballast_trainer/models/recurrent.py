"""A recurrent byte-level language model: a stack of residual GRU layers."""

import torch
from torch import nn

from ballast_trainer.data.corpus import VOCABULARY
from ballast_trainer.models.gpt import Head
from ballast_trainer.models.loss_weights import counted_targets, cross_entropy
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.text import check_arguments, text_model


class TokenEmbedding(nn.Module):
    """Tokens [B, S] -> hidden [B, S, D]."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S] int64 -> [B, S, D]."""
        hidden: torch.Tensor = self.dropout(self.token(tokens))
        return hidden


class RecurrentLayer(nn.Module):
    """Residual GRU over the sequence, [B, S, D] -> [B, S, D]."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.cell = nn.GRU(dim, dim, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        states, _ = self.cell(self.norm(hidden))
        mixed: torch.Tensor = hidden + self.dropout(states)
        return mixed


def build_recurrent(
    *,
    layers: int = 8,
    dim: int = 96,
    context: int = 16,
    dropout: float = 0.1,
) -> Model:
    """A byte-level recurrent model of ``layers`` layers, two of which are the embedding and the head.

    Raises:
        ValueError: names the argument that no model can be built of.
    """
    check_arguments(layers=layers, context=context, dropout=dropout, dim=dim)
    return text_model(
        ("embedding", lambda: TokenEmbedding(dim, dropout)),
        ("recurrent layer", lambda _: RecurrentLayer(dim, dropout)),
        ("head", lambda: Head(dim)),
        family="recurrent",
        layers=layers,
        context=context,
        loss=cross_entropy,
        loss_weight=counted_targets,
    )
