"""A recommender shaped like an autoencoder: from the bytes of a window, the bytes to come.

The history is a bag of items, the hidden layers are wide and residual, and the loss is the
multinomial likelihood of the items that follow: the shape of recommendation models, whose speed on
GPUs follows memory bandwidth rather than arithmetic.
"""

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.data.corpus import VOCABULARY
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.text import check_arguments, text_model


class BagEncoder(nn.Module):
    """Items [B, S] -> hidden [B, D]: the mean of their embeddings."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCABULARY, dim)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.items.weight, std=0.5)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """[B, S] int64 -> [B, D]."""
        hidden: torch.Tensor = self.dropout(self.items(items).mean(dim=1))
        return hidden


class DenseLayer(nn.Module):
    """Residual layer of two wide linear maps, [B, D] -> [B, D]."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, D] -> [B, D]."""
        mixed: torch.Tensor = hidden + self.dropout(self.narrow(torch.tanh(self.widen(self.norm(hidden)))))
        return mixed


class ItemHead(nn.Module):
    """Hidden [B, D] -> one logit per item [B, V]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.scores = nn.Linear(dim, VOCABULARY)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, D] -> [B, V]."""
        logits: torch.Tensor = self.scores(self.norm(hidden))
        return logits


def multinomial_loss(logits: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of the items [B, S] that follow, under one distribution a row [B, V]."""
    return -functional.log_softmax(logits, dim=-1).gather(1, items).mean()


def build_autoencoder(*, layers: int = 8, dim: int = 128, context: int = 32, dropout: float = 0.1) -> Model:
    """A model of ``layers`` layers with bag encoder and head. Raises ValueError: names the bad argument."""
    check_arguments(layers=layers, context=context, dropout=dropout, dim=dim)
    return text_model(
        ("encoder", lambda: BagEncoder(dim, dropout)),
        ("dense layer", lambda _: DenseLayer(dim, dropout)),
        ("head", lambda: ItemHead(dim)),
        family="recommendation",
        layers=layers,
        context=context,
        loss=multinomial_loss,
    )
