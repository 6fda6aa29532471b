"""Dynamic sparse attention: queries attend to the keys that their content chooses.

The attention of any block is changed that calls torch's ``scaled_dot_product_attention``, causal and without
a mask: the call is answered by :func:`block_attention` or :func:`hash_attention`, for [B, H, S, d] of any
length S.  How much is kept follows from queries and keys, and differs from layer to layer; ``target`` is the
most that may be left out.  Attention is dense while more than ``DENSE_ABOVE`` is kept: choosing costs more
than it saves.

Blocks: block-routed attention with a coverage instead of a count; each block of queries scores pooled keys
and keeps the fewest blocks whose softmax makes up the coverage.

Hash buckets are those of a random rotation (Reformer, section 2), of queries and keys apart as in hash-sparse
flash attention (Pagliardini et al. 2023); a query keeps its own key, so that none is left without.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from ballast_policies.contract.job.dynamics import AttentionSettings, DynamicConfig, Pattern
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ballast_trainer.device import sparse_pays_on
from ballast_trainer.dynamics.block_change import BlockChange, ChangingModule
from ballast_trainer.errors import TrainerError
from ballast_trainer.layers.layer import LayerSet

DENSE_ABOVE = {Pattern.BLOCKS: 0.5, Pattern.HASH: 0.3}
"""Kept fraction above which attention stays dense; above, choosing costs about what it saves
(``benchmarks/trainer/dynamic_models/sparse_attention.py``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attended:
    """Result of an attention over chosen keys.

    Attributes:
        mixed: [B, H, S, dv]; None: more is kept than is worth choosing, so nothing was computed.
        kept: fraction of the causal blocks (or pairs of query and key) that is computed.
    """

    mixed: torch.Tensor | None
    kept: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """An attention call without its vectors; above a kept fraction of ``dense_above`` nothing is computed."""

    scale: float
    dropout: float = 0.0
    dense_above: float = 1.0


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: AttentionCall,
    *,
    size: int,
    coverage: float,
    least: float,
) -> Attended:
    """Attention over chosen blocks of keys.

    Args:
        q: queries [B, H, S, d].
        k: keys [B, H, S, d].
        v: values [B, H, S, dv], often of the same width.
        call: the scores' scale, and above which fraction nothing is computed.
        size: positions in a block; the last may have fewer.
        coverage: of the pooled scores' softmax that each block of queries keeps, its own block among them.
        least: fraction of the blocks up to its own that each keeps in any case.
    """
    shape, length = q.shape, q.shape[2]
    count = math.ceil(length / size)
    q, k, v = (functional.pad(x, (0, 0, 0, count * size - length)).flatten(0, 1) for x in (q, k, v))
    groups = len(q)
    order, keep = _chosen_blocks(q.detach(), k.detach(), size, length, coverage, least, call.scale)
    fraction = float(keep.sum()) / (groups * count * (count + 1) / 2)
    if fraction > call.dense_above:
        return Attended(None, fraction)
    q, k, v = (x.view(groups, count, size, -1) for x in (q, k, v))
    flat_keep = keep.flatten()
    # Blocks of queries that keep about as many are computed together.
    rounded = torch.clamp(2 ** torch.ceil(torch.log2(flat_keep.float())).long(), max=count)
    inside = torch.arange(size, device=q.device)
    rows, parts = [], []
    for each in sorted(set(rounded.tolist())):
        row = (rounded == each).nonzero(as_tuple=True)[0]
        group, block = row // count, row % count
        picked = order[group, block, :each]
        keys, values = (x[group[:, None], picked].flatten(1, 2) for x in (k, v))
        key = (picked[..., None] * size + inside).flatten(1)
        query = block[:, None] * size + inside
        used = (torch.arange(each, device=q.device) < flat_keep[row, None]).repeat_interleave(size, 1)
        allowed = (key[:, None, :] <= query[:, :, None]) & used[:, None, :]
        parts.append(
            functional.scaled_dot_product_attention(
                q[group, block][:, None],
                keys[:, None],
                values[:, None],
                attn_mask=allowed[:, None],
                dropout_p=call.dropout,
                scale=call.scale,
            )[:, 0]
        )
        rows.append(row)
    back = torch.argsort(torch.cat(rows))
    mixed = torch.cat(parts)[back].view(groups, count * size, -1)[:, :length]
    return Attended(mixed.reshape(*shape[:2], length, -1), fraction)


def _chosen_blocks(
    q: torch.Tensor, k: torch.Tensor, size: int, length: int, coverage: float, least: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of keys by preference [G, n, n], own block first, and how many each block of queries keeps."""
    groups, padded, width = q.shape
    count = padded // size
    filled = torch.full((count, 1), float(size), device=q.device)
    filled[-1] = length - (count - 1) * size
    pooled_q, pooled_k = (x.view(groups, count, size, width).sum(2).float() / filled for x in (q, k))
    place = torch.arange(count, device=q.device)
    later, own = place[None, :] > place[:, None], place[None, :] == place[:, None]
    scores = (pooled_q @ pooled_k.transpose(-1, -2) * scale).masked_fill(later, -math.inf)
    shares = torch.softmax(scores, dim=-1)
    order = torch.sort(scores.masked_fill(own, math.inf), dim=-1, descending=True, stable=True).indices
    covered = torch.cumsum(shares.gather(-1, order), dim=-1)
    keep = 1 + (covered < coverage).sum(-1)
    floor = torch.ceil(least * (place + 1)).long()
    return order, torch.minimum(torch.maximum(keep, floor), place + 1)


_MORE = 8


def hash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall, *, rotation: torch.Tensor
) -> Attended:
    """Attention over the keys in a query's bucket, and its own.

    Args as of :func:`block_attention`, and ``rotation`` [d, buckets / 2]: a vector's bucket is the largest of
    its product and of minus that.
    """
    shape, length = q.shape, q.shape[2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    q_bucket, k_bucket = (_bucket(x.detach(), rotation) for x in (q, k))
    # By position, how many keys up to it each bucket has: a query computes those of its own, and its own key.
    count = 2 * rotation.shape[1]
    so_far = functional.one_hot(k_bucket, count).cumsum(1)
    apart = q_bucket != k_bucket
    pairs = so_far.gather(2, q_bucket.unsqueeze(-1)).sum() + apart.sum()
    fraction = float(pairs) / (len(q) * length * (length + 1) / 2)
    if fraction > call.dense_above:
        return Attended(None, fraction)
    # Each sequence and head has buckets of its own; places count through all of them.
    first = torch.arange(len(q), device=q.device)[:, None] * count
    queries, keys = (_Buckets.of(x + first, len(q) * count) for x in (q_bucket, k_bucket))
    # Each query has one more key than its bucket: its own, which may be in another one.  Its score is one
    # more component of the query, its share of the values one more of theirs.
    own_score = (q * k).sum(-1, keepdim=True)
    wide_q = functional.pad(torch.cat([q, own_score], -1), (0, _MORE - 1))
    wide_k, wide_v = (functional.pad(x, (0, _MORE)) for x in (k, v))
    own_key, own_value = (_unit(x.shape[-1], x) for x in (k, v))
    # Buckets of about as many queries and keys are computed together: a crowded one costs no other more.
    sizes = torch.stack([_magnitude(queries.counts), _magnitude(keys.counts)], 1)
    batches = [
        (sizes == size).all(1).nonzero(as_tuple=True)[0]
        for size in torch.unique(sizes[queries.counts > 0], dim=0)
    ]
    query_places, key_places = ([x.members(batch) for batch in batches] for x in (queries, keys))
    parts = []
    for (query, q_valid), (key, k_valid), part_q, own_v, part_k, part_v in zip(
        query_places,
        key_places,
        *(_take(x, query_places) for x in (wide_q, v)),
        *(_take(x, key_places) for x in (wide_k, wide_v)),
        strict=True,
    ):
        allowed = k_valid[:, None, :] & (key[:, None, :] <= query[:, :, None])
        its_own = apart.flatten()[query] | ~q_valid
        found = functional.scaled_dot_product_attention(
            part_q[:, None],
            torch.cat([part_k, own_key.expand(len(key), -1, -1)], 1)[:, None],
            torch.cat([part_v, own_value.expand(len(key), -1, -1)], 1)[:, None],
            attn_mask=torch.cat([allowed, its_own.unsqueeze(-1)], -1)[:, None],
            dropout_p=call.dropout,
            scale=call.scale,
        )[:, 0]
        width = v.shape[-1]
        parts.append((found[..., :width] + found[..., width : width + 1] * own_v)[q_valid])
    rows = torch.cat([query[q_valid] for query, q_valid in query_places])
    mixed = torch.cat(parts).to(v.dtype).index_select(0, torch.argsort(rows))
    return Attended(mixed.view(*shape[:3], -1), fraction)


@dataclasses.dataclass(frozen=True, slots=True)
class _Buckets:
    """Places by bucket; ``counts``: of the places in each bucket [n]."""

    counts: torch.Tensor
    _order: torch.Tensor
    _starts: torch.Tensor

    @classmethod
    def of(cls, bucket: torch.Tensor, count: int) -> Self:
        """Buckets of each place."""
        counts = torch.bincount(bucket.flatten(), minlength=count)
        return cls(counts, torch.argsort(bucket.flatten(), stable=True), counts.cumsum(0) - counts)

    def members(self, buckets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in each of the buckets, in order [n, most], and which of them are no filling."""
        counts = self.counts[buckets, None]
        number = torch.arange(int(counts.max()), device=counts.device)
        places = (self._starts[buckets, None] + number).clamp(max=len(self._order) - 1)
        return self._order[places], number < counts


def _bucket(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    turned = x.float() @ rotation
    return torch.cat([turned, -turned], dim=-1).argmax(-1)


def _magnitude(counts: torch.Tensor) -> torch.Tensor:
    """Equal for counts of less than twice each other."""
    return torch.ceil(torch.log2(counts.float() + 1)).long()


def _unit(width: int, like: torch.Tensor) -> torch.Tensor:
    """The first of the components that are added [1, 1, width + more]."""
    return functional.one_hot(torch.tensor([[width]], device=like.device), width + _MORE).to(like.dtype)


def _take(x: torch.Tensor, places: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Rows at the places of each batch [n, most, d]; at once, so that their gradients are added once."""
    rows = x.flatten(0, 1).index_select(0, torch.cat([each.flatten() for each, _ in places]))
    parts = rows.split([each.numel() for each, _ in places])
    return [part.view(*each.shape, x.shape[-1]) for part, (each, _) in zip(parts, places, strict=True)]


class ChosenAttention(ChangingModule):
    """A module that attends over chosen keys, ``kept``: the fraction in the newest call; 1: dense."""

    def __init__(self, attention: nn.Module, settings: AttentionSettings) -> None:
        super().__init__()
        self.attention = attention
        self.settings = settings
        self.kept = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Output, as of the module that it wraps.

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
        """``scaled_dot_product_attention``'s substitute. Raises TrainerError: not causal self-attention."""
        if attn_mask is not None or not is_causal or q.shape[-2] != k.shape[-2]:
            if q.shape[-2] == 1 and attn_mask is None:
                # One position: there is nothing to choose from.
                return functional.scaled_dot_product_attention(
                    q, k, v, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
                )
            raise TrainerError(
                f"sparseAttention: {type(self.attention).__name__} attends with a mask of its own or not "
                "causally. To fix: scaled_dot_product_attention(..., is_causal=True) without a mask, or "
                "leave sparseAttention out"
            )
        shared = q.shape[1] // k.shape[1]
        if sparse_pays_on(q.device):
            if shared > 1:
                k, v, shared = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), 1
            found = self._chosen(q, k, v, dropout_p, q.shape[-1] ** -0.5 if scale is None else scale)
            if found.mixed is not None:
                self.kept = found.kept
                return found.mixed
        self.kept = 1.0
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout_p, scale=scale, enable_gqa=shared > 1
        )

    def _chosen(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, scale: float
    ) -> Attended:
        settings, least = self.settings, 1 - self.strength
        call = AttentionCall(scale=scale, dropout=dropout, dense_above=DENSE_ABOVE[settings.pattern])
        if settings.pattern == Pattern.BLOCKS:
            return block_attention(
                q, k, v, call, size=settings.block_size, coverage=settings.coverage, least=least
            )
        # Drawn again for each microbatch; the layer's seed makes it the same under every partition.
        rotation = torch.randn(q.shape[-1], settings.buckets // 2, device=q.device)
        found = hash_attention(q, k, v, call, rotation=rotation)
        return found if found.kept >= least else Attended(None, found.kept)


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
        block.set_submodule(path, ChosenAttention(block.get_submodule(path), self._settings))
        return block

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """Fraction of the attention that each layer computes."""
        self._possible = sparse_pays_on(layers.device)
        return {"layers": {index: part.kept for index, part in self.parts(layers)}}

    def idle(self, figures: Mapping[str, Mapping[int, Any]]) -> str:
        """All attention is dense."""
        if any(kept < 1 for kept in figures["layers"].values()):
            return ""
        if not self._possible:
            return "on a GPU dense attention is faster than over chosen keys, and attention is dense"
        return f"content keeps more than {self._dense_above:g} of the keys, and attention is dense"
