"""Causal attention over the keys that the content chooses, for [B, H, S, d] of any length S.

Blocks: block-routed attention with a coverage instead of a count; each block of queries scores pooled keys
and keeps the fewest blocks whose softmax makes up the coverage.

Hash buckets are those of a random rotation (Reformer, section 2), of queries and keys apart as in hash-sparse
flash attention (Pagliardini et al. 2023); a query keeps its own key, so that none is left without.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True, slots=True)
class Attended:
    """Result of an attention over chosen keys.

    Attributes:
        mixed: [B, H, S, dv]; None: more is kept than is worth choosing, so nothing was computed.
        kept: fraction of the causal blocks (or pairs of query and key) that is computed.
    """

    mixed: torch.Tensor | None
    kept: float


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    size: int,
    coverage: float,
    least: float,
    dense_above: float,
    scale: float,
    dropout: float,
) -> Attended:
    """Attention over chosen blocks of keys.

    Args:
        q: queries [B, H, S, d].
        k: keys [B, H, S, d].
        v: values [B, H, S, dv], often of the same width.
        size: positions in a block; the last may have fewer.
        coverage: of the pooled scores' softmax that each block of queries keeps, its own block among them.
        least: fraction of the blocks up to its own that each keeps in any case.
        dense_above: kept fraction above which nothing is computed.
        scale: of the scores.
        dropout: probability.
    """
    shape, length = q.shape, q.shape[2]
    count = math.ceil(length / size)
    q, k, v = (functional.pad(x, (0, 0, 0, count * size - length)).flatten(0, 1) for x in (q, k, v))
    groups = len(q)
    order, keep = _chosen_blocks(q.detach(), k.detach(), size, length, coverage, least, scale)
    fraction = float(keep.sum()) / (groups * count * (count + 1) / 2)
    if fraction > dense_above:
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
                dropout_p=dropout,
                scale=scale,
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rotation: torch.Tensor,
    dense_above: float,
    scale: float,
    dropout: float,
) -> Attended:
    """Attention over the keys in a query's bucket, and its own.

    Args:
        q: queries [B, H, S, d].
        k: keys [B, H, S, d].
        v: values [B, H, S, dv], often of the same width.
        rotation: [d, buckets / 2]; a vector's bucket is the largest of its product and of minus that.
        dense_above: kept fraction above which nothing is computed.
        scale: of the scores.
        dropout: probability.
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
    if fraction > dense_above:
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
            dropout_p=dropout,
            scale=scale,
        )[:, 0]
        width = v.shape[-1]
        parts.append((found[..., :width] + found[..., width : width + 1] * own_v)[q_valid])
    rows = torch.cat([query[q_valid] for query, q_valid in query_places])
    mixed = torch.cat(parts).to(v.dtype).index_select(0, torch.argsort(rows))
    return Attended(mixed.view(*shape[:3], -1), fraction)


@dataclasses.dataclass(frozen=True, slots=True)
class _Buckets:
    """Places by bucket.

    Attributes:
        counts: of the places in each bucket [n].
    """

    counts: torch.Tensor
    _order: torch.Tensor
    _starts: torch.Tensor

    @classmethod
    def of(cls, bucket: torch.Tensor, count: int) -> Self:
        """Of the bucket of each place."""
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
