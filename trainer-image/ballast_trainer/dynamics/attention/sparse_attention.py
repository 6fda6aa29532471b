"""Dynamic sparse attention: queries attend to the keys that their content chooses.

The attention of any block is changed that calls torch's ``scaled_dot_product_attention``, causal and without
a mask: the call is answered by ``block_attention`` or ``hash_attention``.  How much is kept follows from
queries and keys, and differs from layer to layer; ``target`` is the most that may be left out.
Attention is dense while more than ``DENSE_ABOVE`` is kept: choosing costs more than it saves.
"""

from collections.abc import Mapping
from typing import Any

import torch
from ballast_policies.contract.job.dynamics import AttentionSettings, DynamicConfig, Pattern
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ballast_trainer.device import sparse_pays_on
from ballast_trainer.dynamics.attention.chosen_keys import Attended, block_attention, hash_attention
from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.models.blocks import set_submodule

DENSE_ABOVE = {Pattern.BLOCKS: 0.5, Pattern.HASH: 0.3}
"""Kept fraction above which attention stays dense; above, choosing costs about what it saves
(``benchmarks/trainer/dynamic_models/sparse_attention.py``)."""


class ChosenAttention(ChangingModule):
    """A module whose attention calls are answered over chosen keys.

    Attributes:
        kept: fraction that the newest call computed; 1 where it was dense.
    """

    def __init__(self, attention: nn.Module, settings: AttentionSettings) -> None:
        super().__init__()
        self.attention = attention
        self.settings = settings
        self.kept = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module that it wraps.

        Raises:
            TrainerError: the module does not call ``scaled_dot_product_attention`` as it must.
        """
        if self.strength == 0:
            return self.attention(*args, **kwargs)
        calls = _Calls(self)
        with calls:
            output = self.attention(*args, **kwargs)
        if calls.count == 0:
            raise TrainerError(
                f"sparseAttention: {type(self.attention).__name__} does not call torch.nn.functional."
                "scaled_dot_product_attention, whose calls it changes. To fix: let it, or leave "
                "sparseAttention out"
            )
        return output

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """In place of ``scaled_dot_product_attention``.

        Raises:
            TrainerError: it is not causal self-attention.
        """
        if attn_mask is not None or not is_causal or q.shape[-2] != k.shape[-2]:
            if q.shape[-2] == 1 and attn_mask is None:
                # One position: there is nothing to choose from.
                return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa)
            raise TrainerError(
                f"sparseAttention: {type(self.attention).__name__} attends with a mask of its own or not "
                "causally. To fix: scaled_dot_product_attention(..., is_causal=True) without a mask, or "
                "leave sparseAttention out"
            )
        shared = q.shape[1] // k.shape[1]
        if not sparse_pays_on(q.device):
            self.kept = 1.0
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=dropout_p, scale=scale, enable_gqa=shared > 1
            )
        if shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        found = self._chosen(q, k, v, dropout_p, q.shape[-1] ** -0.5 if scale is None else scale)
        self.kept = 1.0 if found.mixed is None else found.kept
        if found.mixed is None:
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=dropout_p, scale=scale
            )
        return found.mixed

    def _chosen(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, scale: float
    ) -> Attended:
        settings = self.settings
        if settings.pattern == Pattern.BLOCKS:
            return block_attention(
                q,
                k,
                v,
                size=settings.block_size,
                coverage=settings.coverage,
                least=1 - self.strength,
                dense_above=DENSE_ABOVE[Pattern.BLOCKS],
                scale=scale,
                dropout=dropout,
            )
        # Drawn again for each microbatch; the layer's seed makes it the same under every partition.
        rotation = torch.randn(q.shape[-1], settings.buckets // 2, device=q.device)
        found = hash_attention(
            q, k, v, rotation=rotation, dense_above=DENSE_ABOVE[Pattern.HASH], scale=scale, dropout=dropout
        )
        return found if found.kept >= 1 - self.strength else Attended(None, found.kept)


class _Calls(TorchFunctionMode):
    """Answers attention calls in the block that it is entered for."""

    def __init__(self, part: ChosenAttention) -> None:
        super().__init__()
        self.count = 0
        self._part = part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.count += 1
            return self._part.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class SparseAttention(BlockChange):
    """Attention over the keys that the content chooses."""

    measures: str | None = "attention"
    needs = ("attention_path",)
    order = 1
    part = ChosenAttention

    def without_effect(self, total_steps: int) -> str:
        """All stays dense: of a pattern that keeps more than this of the keys nothing is won."""
        least = 1 - self.most_strength(total_steps)
        dense = f"target keeps {least:.2g} of the keys, and attention is dense above {self._dense_above:g}"
        return super().without_effect(total_steps) or ("" if least <= self._dense_above else dense)

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        super().__init__(config, layer_count)
        self._settings = config.attention or AttentionSettings()
        self._dense_above = DENSE_ABOVE[self._settings.pattern]
        self._possible = True

    def change_block(self, block: nn.Module, index: int) -> nn.Module:
        """Wrap the attention."""
        typed: Any = block
        path = typed.attention_path()
        set_submodule(block, path, ChosenAttention(block.get_submodule(path), self._settings))
        return block

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """Fraction of the attention that each layer computes."""
        self._possible = sparse_pays_on(layers.device)
        return {
            "layers": {
                layer.index: module.kept
                for layer in layers
                for module in layer.module.modules()
                if isinstance(module, ChosenAttention)
            }
        }

    def idle(self, figures: Mapping[str, Mapping[int, Any]]) -> str:
        """All attention is dense."""
        if any(kept < 1 for kept in figures["layers"].values()):
            return ""
        if not self._possible:
            return "on a GPU dense attention is faster than over chosen keys, and attention is dense"
        return f"content keeps more than {self._dense_above:g} of the keys, and attention is dense"
