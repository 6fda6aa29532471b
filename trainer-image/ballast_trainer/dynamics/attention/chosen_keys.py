"""Causal attention over the keys that the content chooses, for tensors [B, H, S, d] of any length S.

``block_attention`` is block-routed attention with a coverage instead of a count: each block of queries scores
pooled keys and keeps the fewest blocks whose softmax makes up the coverage.  ``hash_attention`` keeps the
keys in a query's bucket of a random rotation (Reformer, section 2), queries and keys hashed apart as in
hash-sparse flash attention (Pagliardini et al. 2023), and the query's own key, so that none is left without.
"""

import dataclasses
import math

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
                q[group, block], keys, values, attn_mask=allowed, dropout_p=dropout, scale=scale
            )
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
    so_far = functional.one_hot(k_bucket, 2 * rotation.shape[1]).cumsum(1)
    pairs = so_far.gather(2, q_bucket.unsqueeze(-1)).sum() + (q_bucket != k_bucket).sum()
    fraction = float(pairs) / (len(q) * length * (length + 1) / 2)
    if fraction > dense_above:
        return Attended(None, fraction)
    mixed = torch.zeros_like(v)
    own_score = (q * k).sum(-1) * scale
    for bucket in range(2 * rotation.shape[1]):
        queries, q_valid = _members(q_bucket == bucket)
        if queries.shape[1] == 0:
            continue
        keys, k_valid = _members(k_bucket == bucket)
        part_q, part_k, part_v, own_v = _take(q, queries), _take(k, keys), _take(v, keys), _take(v, queries)
        allowed = k_valid[:, None, :] & (keys[:, None, :] <= queries[:, :, None])
        # A query's own key may be in another bucket.
        apart = (k_bucket != bucket).gather(1, queries)
        scores = (part_q @ part_k.transpose(-1, -2) * scale).masked_fill(~allowed, -math.inf)
        own = own_score.gather(1, queries).masked_fill(~apart & q_valid, -math.inf).unsqueeze(-1)
        shares = functional.dropout(torch.softmax(torch.cat([scores, own], -1), -1), dropout)
        part = shares[..., :-1] @ part_v + shares[..., -1:] * own_v
        index = queries.unsqueeze(-1).expand(-1, -1, v.shape[-1])
        # What fills up a shorter row adds nothing.
        mixed = mixed.scatter_add(1, index, part.to(mixed.dtype) * q_valid.unsqueeze(-1))
    return Attended(mixed.view(shape[0], shape[1], length, -1), fraction)


def _bucket(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    turned = x.float() @ rotation
    return torch.cat([turned, -turned], dim=-1).argmax(-1)


def _members(inside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the members of each row, in order [G, most], and which of them are no filling."""
    most = int(inside.sum(1).max())
    order = torch.sort((~inside).to(torch.int8), dim=1, stable=True).indices[:, :most]
    return order, inside.gather(1, order)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
