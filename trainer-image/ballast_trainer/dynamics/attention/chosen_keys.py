"""Causal attention over the blocks of keys that the content chooses, for [B, H, S, d] of any length S.

Block-routed attention with a coverage instead of a count: each block of queries scores pooled keys and keeps
the fewest blocks whose softmax makes up the coverage.
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
