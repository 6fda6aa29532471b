"""Attention over chosen keys equals dense attention under its mask, at any length, and costs less."""

import math

import pytest
import torch
from ballast_policies.contract.job.dynamics import AttentionSettings
from ballast_trainer.dynamics.sparse_attention import (
    AttentionCall,
    ChosenAttention,
    _bucket,
    block_attention,
    hash_attention,
)
from ballast_trainer.models.gpt import Attention
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode


def vectors(length, *, grouped=4.0, width=8, values=8):
    """Queries, keys and values whose queries look at some keys much more than at others."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, size) for size in (width, width, values))
    topics = torch.randint(0, 4, (length,))
    centres = torch.randn(4, width)
    return q + grouped * centres[topics], k + grouped * centres[topics], v


def blocks(q, k, v, *, size, coverage=0.6, least=0.0):
    return block_attention(q, k, v, AttentionCall(scale=0.3), size=size, coverage=coverage, least=least)


@pytest.mark.parametrize(("length", "size"), [(64, 16), (61, 8), (5, 8), (1, 4), (33, 1)])
def test_blocks_equal_dense_attention_under_their_mask(length, size):
    """Own block and the fewest others that make up the coverage; the last block may be short."""
    q, k, v = vectors(length, values=5)
    found = blocks(q, k, v, size=size)
    count = math.ceil(length / size)
    starts = range(0, length, size)
    pooled_q, pooled_k = (torch.stack([x[:, :, s : s + size].mean(2) for s in starts], 2) for x in (q, k))
    mask = torch.zeros(2, 3, length, length, dtype=torch.bool)
    kept = 0
    for b in range(2):
        for h in range(3):
            for i in range(count):
                scores = (pooled_k[b, h, : i + 1] @ pooled_q[b, h, i]) * 0.3
                shares = torch.softmax(scores, 0)
                order = [i, *sorted(range(i), key=lambda j: -float(scores[j]))]
                covered = 0.0
                for j in order:
                    mask[b, h, i * size : (i + 1) * size, j * size : (j + 1) * size] = True
                    kept += 1
                    covered += float(shares[j])
                    if covered >= 0.6:
                        break
    mask &= torch.ones(length, length, dtype=torch.bool).tril()
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(found.mixed, expected, atol=1e-4, rtol=1e-4)
    assert found.kept == pytest.approx(kept / (6 * count * (count + 1) / 2))


@pytest.mark.parametrize("length", [64, 61, 1])
def test_hashing_equals_dense_attention_among_equal_buckets(length):
    """Keys of the query's bucket before it, and its own."""
    q, k, v = vectors(length, values=5)
    rotation = torch.randn(8, 3)
    found = hash_attention(q, k, v, AttentionCall(scale=0.3), rotation=rotation)
    mask = _bucket(q, rotation)[..., :, None] == _bucket(k, rotation)[..., None, :]
    mask = mask.tril() | torch.eye(length, dtype=torch.bool)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(found.mixed, expected, atol=1e-5, rtol=1e-5)
    assert found.kept == pytest.approx(float(mask.sum()) / (6 * length * (length + 1) / 2))


@pytest.mark.parametrize("pattern", ["blocks", "hash"])
def test_it_is_causal_and_differentiable(pattern):
    """A change of later positions changes no earlier output; all three inputs get gradients."""
    q, k, v = (x.requires_grad_() for x in vectors(45))
    rotation = torch.randn(8, 2)

    def attend(q, k, v):
        if pattern == "blocks":
            return blocks(q, k, v, size=8).mixed
        return hash_attention(q, k, v, AttentionCall(scale=0.3), rotation=rotation).mixed

    before = attend(q, k, v)
    later = [torch.cat([x[:, :, :24], x[:, :, 24:] + 3.0], 2) for x in (q, k, v)]
    torch.testing.assert_close(attend(*later)[:, :, :24], before[:, :, :24], atol=1e-5, rtol=1e-5)
    before.sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0 for x in (q, k, v))


@pytest.mark.parametrize("pattern", ["blocks", "hash"])
def test_content_decides_how_much_is_computed(pattern):
    """States in groups look at fewer blocks, and at more of their bucket; the products shrink with it."""

    def cost(grouped):
        q, k, v = vectors(256, grouped=grouped)
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            if pattern == "blocks":
                # Blocks of one topic each.
                order = torch.argsort(q[0, 0, :, 0])
                q, k = q[:, :, order], k[:, :, order]
                found = blocks(q, k, v, size=16, coverage=0.9)
            else:
                rotation = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
                found = hash_attention(q, k, v, AttentionCall(scale=0.3), rotation=rotation)
        return found.kept, counter.get_total_flops()

    grouped, spread = cost(6.0), cost(0.01)
    less, more = (grouped, spread) if pattern == "blocks" else (spread, grouped)
    assert less[0] < 0.7 * more[0]
    assert less[1] < more[1]


def test_least_bounds_what_is_left_out():
    """A target of a quarter keeps three quarters of the blocks of each query, whatever its content."""
    q, k, v = vectors(128)
    assert blocks(q, k, v, size=8, coverage=1e-6).kept < 0.15
    assert blocks(q, k, v, size=8, coverage=1e-6, least=0.75).kept >= 0.75


def test_a_module_attends_densely_until_the_change_begins_and_where_choosing_does_not_pay():
    """Bit for bit as without the change."""
    attention = Attention(16, 2, 0.0)
    hidden = torch.randn(2, 40, 16)
    part = ChosenAttention(attention, AttentionSettings(block_size=4, coverage=1.0))
    assert torch.equal(part(hidden), attention(hidden))
    part.strength = 1.0
    assert torch.equal(part(hidden), attention(hidden)) and part.kept == 1.0
    part.settings = AttentionSettings(block_size=4, coverage=0.05)
    assert not torch.equal(part(hidden), attention(hidden)) and part.kept < 0.5
