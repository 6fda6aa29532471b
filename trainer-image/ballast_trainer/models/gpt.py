"""A GPT-like decoder over bytes: pre-norm blocks of causal attention and a four times wider MLP.

Layer 0 embeds, the last layer is norm and head, those between are the blocks.
"""

import math

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.data.corpus import VOCABULARY
from ballast_trainer.models.loss_weights import counted_targets, cross_entropy
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.text import check_arguments, text_model


class Embedding(nn.Module):
    """Tokens [B, S] -> hidden [B, S, D], with learnt positions."""

    def __init__(self, dim: int, context: int, dropout: float, std: float = 0.02) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=std)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S] int64 -> [B, S, D]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: torch.Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return hidden


class Attention(nn.Module):
    """Causal self-attention [B, S, D] -> [B, S, D]."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        size, length = hidden.shape[:2]
        q, k, v = self.qkv(hidden).view(size, length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        mixed = self.attend(q, k, v)
        projected: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(size, length, -1))
        return projected

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [B, H, S, head_dim] -> [B, H, S, head_dim], of any heads."""
        mixed: torch.Tensor = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return mixed


class Mlp(nn.Module):
    """Two linear maps with a GELU between, position by position."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        mixed: torch.Tensor = self.down(functional.gelu(self.up(hidden)))
        return mixed


class Block(nn.Module):
    """One pre-norm transformer block [B, S, D] -> [B, S, D]."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.width = dim
        self.attention_norm = nn.LayerNorm(dim)
        self.attention: nn.Module = Attention(dim, heads, dropout)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp: nn.Module = Mlp(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        mixed: torch.Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return mixed

    def run_at(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The block over some positions, which it does not encode: the embedding has."""
        mixed: torch.Tensor = self(hidden)
        return mixed

    def mlp_path(self) -> str:
        """See :class:`~ballast_trainer.models.blocks.TransformerBlock`."""
        return "mlp"

    def attention_path(self) -> str:
        """See :class:`~ballast_trainer.models.blocks.TransformerBlock`."""
        return "attention"


class Head(nn.Module):
    """Hidden [B, S, D] -> logits [B, S, V]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, V]."""
        logits: torch.Tensor = self.out(self.norm(hidden))
        return logits


def build_gpt(
    *,
    layers: int = 10,
    dim: int = 128,
    heads: int = 4,
    context: int = 32,
    dropout: float = 0.1,
    tied: bool = False,
    depth_scaled: bool = False,
    embedding_std: float = 0.02,
) -> Model:
    """A byte-level GPT of ``layers`` layers, two of which are the embedding and the head.

    Args:
        layers: of the model.
        dim: width of the hidden states.
        heads: of the attention.
        context: longest sequence.
        dropout: probability.
        tied: the head's weight is that of the embedding of tokens.
        depth_scaled: the initial weights of the l-th block are divided by the square root of l (DS-Init,
            Zhang et al. 2019, section 4), so that deep blocks change little at first.
        embedding_std: standard deviation of the tokens' initial vectors (GPT-2: 0.02, T5: 1).

    Raises:
        ValueError: names the argument that no model can be built of.
    """
    check_arguments(layers=layers, context=context, dropout=dropout, dim=dim, heads=heads)
    usable = isinstance(embedding_std, int | float) and not isinstance(embedding_std, bool)
    if not usable or not 0 < embedding_std < math.inf:
        raise ValueError(f"embedding_std {embedding_std!r} is no number above 0")
    if dim % heads:
        raise ValueError(f"dim {dim} is not a multiple of {heads} heads")

    def build_block(index: int) -> nn.Module:
        block = Block(dim, heads, dropout)
        if depth_scaled:
            with torch.no_grad():
                for module in block.modules():
                    if isinstance(module, nn.Linear):
                        module.weight.div_(index**0.5)
        return block

    return text_model(
        ("embedding", lambda: Embedding(dim, context, dropout, embedding_std)),
        ("block", build_block),
        ("head", lambda: Head(dim)),
        family="transformer",
        layers=layers,
        context=context,
        loss=cross_entropy,
        loss_weight=counted_targets,
        tied=[((0, "token.weight"), (layers - 1, "out.weight"))] if tied else (),
    )
