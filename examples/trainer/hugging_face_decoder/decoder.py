"""A Hugging Face-style decoder as a pipeline: embedding, decoder layers, norm and head.

``small`` builds a model of this folder, ``transformers_model`` one of the library where it is
installed; ``adapt`` takes either apart by its attributes.
"""

from typing import Any

import torch
from ballast_trainer.models.gpt import cross_entropy
from ballast_trainer.models.protocol import Model
from torch import nn


class DecoderStep(nn.Module):
    """A decoder layer from one tensor to one tensor: positions and their rotation are made on the spot."""

    def __init__(self, layer: nn.Module, rotary_emb: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.rotary_emb = rotary_emb

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        # Without a mask the attention is causal, with no padding.
        output = self.layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotary_emb(hidden, positions),
            use_cache=False,
        )
        mixed: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return mixed


def adapt(causal_model: Any) -> Model:
    """A model with the attributes of ``LlamaForCausalLM`` as a list of layers.

    Raises:
        ValueError: embedding and head share their weights.
    """
    decoder = causal_model.model
    return Model.from_layers(
        [
            decoder.embed_tokens,
            *(DecoderStep(layer, decoder.rotary_emb) for layer in decoder.layers),
            nn.Sequential(decoder.norm, causal_model.lm_head),
        ],
        loss=cross_entropy,
        family="transformer",
    )


def small(**sizes: int) -> Model:
    """The decoder of this folder."""
    from small_decoder import SmallForCausalLM

    return adapt(SmallForCausalLM(**sizes))


def transformers_model(*, checkpoint: str | None = None, **config: Any) -> Model:
    """``LlamaForCausalLM`` of the transformers library.

    Args:
        checkpoint: a folder (or hub name) to load weights from; None: random weights.
        config: fields of ``LlamaConfig``, where there is no checkpoint.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if checkpoint is not None:
        return adapt(LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa"))
    return adapt(LlamaForCausalLM(LlamaConfig(**config, attn_implementation="sdpa")))
