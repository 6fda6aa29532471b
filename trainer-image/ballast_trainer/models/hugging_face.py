"""Decoders of Hugging Face's transformers as pipelines: embedding, decoder layers, norm and head.

Llama, Qwen, Mistral and others with the same attributes, and GPT-2.  ``model.name`` is
``ballast_trainer.models.hugging_face:pretrained`` or ``:from_config``; ``decoder`` takes a module
apart.  Whether the layers one after the other compute what the model computes is tried before they are used.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.gpt import cross_entropy
from ballast_trainer.models.loss_weights import counted_targets
from ballast_trainer.models.protocol import Model

_TRIED_TOKENS = 8


class DecoderLayer(nn.Module):
    """A decoder layer from one tensor to one tensor; makes positions and their rotation itself.

    Attributes:
        width: of the hidden states.
    """

    def __init__(self, layer: nn.Module, rotary_emb: nn.Module | None, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.rotary_emb = rotary_emb
        self.width = width
        # A layer of another kind may not take all of these.
        taken = inspect.signature(layer.forward).parameters
        self._options = {
            name: value
            for name, value in {"attention_mask": None, "use_cache": False}.items()
            if name in taken
        }
        self._takes_positions = "position_ids" in taken

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]; without a mask the attention is causal, with no padding."""
        return self.run_at(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])

    def run_at(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See :class:`~ballast_trainer.models.blocks.TransformerBlock`."""
        options: dict[str, Any] = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = positions
        if self.rotary_emb is not None:
            options["position_embeddings"] = self.rotary_emb(hidden, positions)
        output = self.layer(hidden, **options)
        mixed: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return mixed

    def mlp_path(self) -> str:
        """All families call it so."""
        return "layer.mlp"

    def attention_path(self) -> str:
        """GPT-2 calls it ``attn``, the others ``self_attn``."""
        return "layer.attn" if hasattr(self.layer, "attn") else "layer.self_attn"


class _LearntPositions(nn.Module):
    """GPT-2's embedding of tokens and positions."""

    def __init__(self, tokens: nn.Module, positions: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = tokens, positions, dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S] -> [B, S, D]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: torch.Tensor = self.drop(self.wte(tokens) + self.wpe(places))
        return hidden


def decoder(causal_model: Any, *, tried: bool = True) -> Model:
    """A ``...ForCausalLM`` as a list of layers.

    Args:
        causal_model: with the attributes of ``LlamaForCausalLM`` or of ``GPT2LMHeadModel``.
        tried: whether a few tokens are run through both, once.

    Raises:
        ValueError: it has other attributes, attends through a mask of its own, or its layers compute
            something else than itself.
    """
    name = type(causal_model).__name__
    _refuse_masks(causal_model, name)
    _refuse_router_losses(causal_model, name)
    layers = _llama_like(causal_model) if hasattr(causal_model, "model") else _gpt2_like(causal_model, name)
    if tried:
        _try(causal_model, layers, name)
    known = type(causal_model).__module__.startswith("transformers.models.")
    model = Model.from_layers(
        layers,
        loss=cross_entropy,
        loss_weight=counted_targets,
        family="transformer",
        independent_layers=known,
        whole=causal_model,
    )
    return dataclasses.replace(model, save_whole=functools.partial(_save, causal_model))


def _save(causal_model: Any, found: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write ``causal_model`` with these weights by ``save_pretrained``.

    Raises:
        ConfigurationError: it has not all of them, or others.
    """
    own = {name: value.shape for name, value in causal_model.state_dict().items()}
    other = sorted(own.keys() ^ found.keys())
    other += sorted(name for name in own.keys() & found.keys() if own[name] != found[name].shape)
    if other:
        reason = (
            f"{len(other)} tensors are not those of {type(causal_model).__name__}, e.g. {other[0]}: a change "
            "in dynamics has added or cut them. To fix: safetensors or torch"
        )
        raise ConfigurationError("export.format", reason)
    causal_model.load_state_dict(found)
    causal_model.save_pretrained(path)


def from_config(*, model_type: str, **config: Any) -> Model:
    """A decoder with random weights.

    Args:
        model_type: ``llama``, ``qwen3``, ``gpt2`` and so on, as transformers names it.
        config: fields of the family's configuration; its own defaults count, e.g. tied weights in GPT-2.

    Raises:
        ValueError: it is no decoder whose layers can run one after the other.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if model_type not in CONFIG_MAPPING:
        near = ", ".join(difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=3)) or "llama, gpt2"
        raise ValueError(f"transformers has no model_type {model_type!r}. To fix: e.g. {near}")
    made = AutoConfig.for_model(model_type, **config)
    build: Any = AutoModelForCausalLM
    return decoder(_causal(made, lambda: build.from_config(made, attn_implementation="sdpa")))


def pretrained(*, checkpoint: str) -> Model:
    """A decoder with the weights of a folder that ``save_pretrained`` wrote, or of a name on the hub.

    Raises:
        ValueError: it is no decoder whose layers can run one after the other.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    build: Any = AutoModelForCausalLM
    made = AutoConfig.from_pretrained(checkpoint)
    return decoder(_causal(made, lambda: build.from_pretrained(checkpoint, attn_implementation="sdpa")))


def _causal(config: Any, build: Callable[[], Any]) -> Any:
    """The causal language model of a configuration, which attends by ``scaled_dot_product_attention``.

    Raises:
        ValueError: transformers has none.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        both = " (it has an encoder and a decoder)" if getattr(config, "is_encoder_decoder", False) else ""
        raise ValueError(f"{config.model_type!r} is no decoder that predicts the next token{both}. {_FIX}")
    try:
        return build()
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        reason = f"{config.model_type!r} of this transformers does not attend by scaled_dot_product_attention"
        raise ValueError(f"{reason}. {_FIX}") from error


def _refuse_masks(causal_model: Any, name: str) -> None:
    config = getattr(causal_model, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if kinds or (window is not None and not hasattr(config, "layer_types")):
        what = ", ".join(sorted(kinds)) or f"a sliding window of {window} positions"
        raise ValueError(
            f"{name} attends by {what}: a mask that the whole model makes, which a layer by itself has not. "
            "To fix: sliding_window: null, or another model"
        )
    used = getattr(config, "_attn_implementation", "sdpa")
    if used != "sdpa":
        raise ValueError(f"{name} attends by {used!r}. To fix: load it with attn_implementation='sdpa'")


def _refuse_router_losses(causal_model: Any, name: str) -> None:
    """The whole model adds its routers' loss over all layers, of which a layer by itself knows nothing."""
    if getattr(getattr(causal_model, "config", None), "output_router_logits", False):
        raise ValueError(
            f"{name} adds a loss of its routers (output_router_logits: true), which would be lost: it is "
            "computed over all layers together, and a rank has a few. To fix: output_router_logits: false"
        )


def _llama_like(causal_model: Any) -> list[nn.Module]:
    inner = causal_model.model
    needed = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = [f"model.{name}" for name in needed if not hasattr(inner, name)]
    missing += [name for name in ("lm_head",) if not hasattr(causal_model, name)]
    _refuse_missing(causal_model, missing)
    width = inner.embed_tokens.weight.shape[1]
    return [
        inner.embed_tokens,
        *(DecoderLayer(layer, inner.rotary_emb, width) for layer in inner.layers),
        nn.Sequential(inner.norm, causal_model.lm_head),
    ]


def _gpt2_like(causal_model: Any, name: str) -> list[nn.Module]:
    if not hasattr(causal_model, "transformer"):
        raise ValueError(f"{name} has neither model (as Llama) nor transformer (as GPT-2). {_FIX}")
    inner = causal_model.transformer
    missing = [f"transformer.{n}" for n in ("wte", "wpe", "drop", "h", "ln_f") if not hasattr(inner, n)]
    _refuse_missing(causal_model, missing)
    width = inner.wte.weight.shape[1]
    return [
        _LearntPositions(inner.wte, inner.wpe, inner.drop),
        *(DecoderLayer(layer, None, width) for layer in inner.h),
        nn.Sequential(inner.ln_f, causal_model.lm_head),
    ]


_FIX = "To fix: give the layers to Model.from_layers (docs/trainer-models.md, A model of your own)"


def _refuse_missing(causal_model: Any, missing: list[str]) -> None:
    if missing:
        raise ValueError(f"{type(causal_model).__name__} has no {', no '.join(missing)}. {_FIX}")


@torch.no_grad()
def _try(causal_model: Any, layers: list[nn.Module], name: str) -> None:
    embedding = causal_model.get_input_embeddings() if hasattr(causal_model, "get_input_embeddings") else None
    size: int = next((layers[0] if embedding is None else embedding).parameters()).shape[0]
    modules = [causal_model, *layers]
    modes = [(module, module.training) for whole in modules for module in whole.modules()]
    device = next(causal_model.parameters()).device
    tokens = torch.arange(_TRIED_TOKENS, device=device)[None] * 7 % size
    try:
        for module in modules:
            module.eval()
        whole = causal_model(tokens)
        whole = getattr(whole, "logits", whole)
        value = tokens
        for layer in layers:
            value = layer(value)
    finally:
        for module, mode in modes:
            module.training = mode
    apart = float((value - whole).abs().max())
    if not apart <= 1e-3 * max(1.0, float(whole.abs().max())):
        raise ValueError(
            f"the layers of {name} one after the other do not compute what it computes: its logits are up to "
            f"{apart:.3g} apart. {_FIX}"
        )
