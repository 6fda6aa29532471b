"""A small decoder with the attributes of Hugging Face's ``LlamaForCausalLM``, so that nothing is downloaded.

``model.embed_tokens``, ``model.layers[i]`` with ``self_attn``, ``mlp``, ``input_layernorm`` and
``post_attention_layernorm``, ``model.norm``, ``model.rotary_emb``, ``lm_head``; the layers are called as
transformers calls its own.  Grouped-query attention, rotary positions, SwiGLU, RMS norm.
"""

import torch
from torch import nn
from torch.nn import functional


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the positions."""

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [B, S] -> cos, sin [B, S, head_dim], of x's type."""
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels of x [B, H, S, head_dim] by the position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned: torch.Tensor = x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return turned


class Attention(nn.Module):
    """Causal attention in which several query heads share a key and a value."""

    def __init__(self, hidden_size: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden_size // heads
        self.q_proj = nn.Linear(hidden_size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden_size, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        size, length, _ = hidden_states.shape
        split = (size, length, -1, self.head_dim)
        q, k, v = (
            projection(hidden_states).view(split).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *position_embeddings), rotate(k, *position_embeddings)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(size, length, -1))
        return projected


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        mixed: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normed input and added to it."""

    def __init__(self, hidden_size: int, intermediate_size: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(hidden_size, heads, key_value_heads)
        self.mlp = Mlp(hidden_size, intermediate_size)
        self.input_layernorm = nn.RMSNorm(hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        use_cache: bool = False,
    ) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings
        )
        mixed: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return mixed


class Decoder(nn.Module):
    """The ``model`` of ``LlamaForCausalLM``."""

    def __init__(
        self, *, vocab_size: int, hidden_size: int, intermediate_size: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(hidden_size, intermediate_size, heads, max(1, heads // 2)) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden_size)
        self.rotary_emb = RotaryEmbedding(hidden_size // heads)


class SmallForCausalLM(nn.Module):
    """The decoder and its head."""

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        hidden_size: int = 64,
        intermediate_size: int = 176,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 4,
        tie_word_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.model = Decoder(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            layers=num_hidden_layers,
            heads=num_attention_heads,
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tie_word_embeddings:
            # The first stage and the last then train one parameter together.
            nn.init.normal_(self.model.embed_tokens.weight, std=hidden_size**-0.5)
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens [B, S] -> logits [B, S, V], as one module: what the pipeline must equal."""
        hidden: torch.Tensor = self.model.embed_tokens(tokens)
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rotary = self.model.rotary_emb(hidden, position_ids)
        for layer in self.model.layers:
            hidden = layer(hidden, position_embeddings=rotary)
        logits: torch.Tensor = self.lm_head(self.model.norm(hidden))
        return logits
