"""Dynamic sparse attention: each block of queries attends to the key blocks that suit it best.

Keys are pooled by blocks; a block of queries scores the pooled keys before it, keeps its own block
and the best others (as in block-routed attention), and attends to those alone.  The number kept in
layer i of L falls from all blocks to ``1 - target * i / (L - 1)`` of them, so deeper layers get
cheaper; attention is dense until that is half or less.  Which blocks are kept follows the data, and
is the same in every process.
"""

import math

import torch
from torch import nn
from torch.nn import functional

from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule
from ballast_trainer.models.gpt import Attention, Block

BLOCK = 16
"""Positions in a block of queries or keys."""


DENSE_ABOVE = 0.5
"""Above this fraction of the key blocks attention stays dense: gathering them costs more than it saves."""


class RoutedAttention(ChangingModule):
    """Causal attention over the key blocks that each query block picks, [B, S, D] -> [B, S, D]."""

    def __init__(self, attention: Attention, depth: float) -> None:
        super().__init__(depth)
        self.attention = attention

    def kept_blocks(self, length: int) -> int:
        """How many key blocks a query block attends to, its own among them."""
        return max(1, math.ceil((1 - self.strength * self.depth) * math.ceil(length / BLOCK)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Dense while most blocks are kept, else over the picked ones."""
        size, length, dim = hidden.shape
        blocks, kept = math.ceil(length / BLOCK), self.kept_blocks(length)
        if kept > DENSE_ABOVE * blocks or length % BLOCK:
            dense: torch.Tensor = self.attention(hidden)
            return dense
        inner = self.attention
        heads, width = inner.heads, dim // inner.heads
        q, k, v = inner.qkv(hidden).view(size, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        shape = (size, heads, blocks, BLOCK, width)
        q, k, v = q.reshape(shape), k.reshape(shape), v.reshape(shape)
        picked, allowed = self._pick(q.detach().mean(3), k.detach().mean(3), kept)
        index = picked[..., None, None].expand(-1, -1, -1, -1, BLOCK, width)
        spread = (size, heads, blocks, blocks, BLOCK, width)
        keys = k.unsqueeze(2).expand(spread).gather(3, index).flatten(3, 4)
        values = v.unsqueeze(2).expand(spread).gather(3, index).flatten(3, 4)
        mixed = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=allowed, dropout_p=inner.dropout if self.training else 0.0
        )
        projected: torch.Tensor = inner.out(
            mixed.reshape(size, heads, length, width).transpose(1, 2).reshape(hidden.shape)
        )
        return projected

    @staticmethod
    def _pick(queries: torch.Tensor, keys: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Picked key blocks [B, H, n, kept], and which of their positions each query may see."""
        blocks = queries.shape[2]
        place = torch.arange(blocks, device=queries.device)
        scores = queries @ keys.transpose(-1, -2)
        later, own = place[None, :] > place[:, None], place[None, :] == place[:, None]
        scores = scores.masked_fill(later, -math.inf).masked_fill(own, math.inf)
        picked = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :kept]
        inside = torch.arange(BLOCK, device=queries.device)
        key = (picked[..., None] * BLOCK + inside).flatten(-2)
        query = place[:, None] * BLOCK + inside
        return picked, key[..., None, :] <= query[None, None, :, :, None]


class SparseAttention(BlockChange):
    """Attention in deeper blocks keeps fewer key blocks."""

    def change_block(self, block: Block, depth: float) -> nn.Module:
        """Replace the attention."""
        assert isinstance(block.attention, Attention)
        block.attention = RoutedAttention(block.attention, depth)
        return block
