"""Length from which sparse attention is faster than dense: forward and backward, in turn in one process.

``dense_over_sparse`` above 1: the sparse one is faster (median of the pairwise ratios). Content: ``spread``,
random states; ``crowded``, half of the heads have states that lean one way, so that most of their keys are in
few buckets, or in blocks that look at few others. ``kept``: the fraction of the pairs (or blocks) computed.

    python benchmarks/trainer/dynamic_models/sparse_attention.py [--device cuda]
"""

import json
import statistics
import time

import click
import torch
from ballast_trainer.dynamics.sparse_attention import AttentionCall, block_attention, hash_attention
from torch.nn.functional import scaled_dot_product_attention

ROUNDS = 5
HEADS = {"8 heads of 64": (8, 64), "2 heads of 16": (2, 16)}
LENGTHS = (128, 256, 512, 1024, 2048)
BUCKETS, BLOCK = 16, 64


def content(kind, heads, width, length):
    """Queries, keys and values [1, H, S, d]."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, width) for _ in range(3))
    if kind == "crowded":
        q[:, ::2] += 2 * torch.randn(width)
        k[:, ::2] += 2 * torch.randn(width)
    return q, k, v


def patterns(width, device):
    call = AttentionCall(scale=width**-0.5)
    rotation = torch.randn(width, BUCKETS // 2, generator=torch.Generator().manual_seed(1)).to(device)
    return {
        f"hash, {BUCKETS} buckets": lambda *qkv: hash_attention(*qkv, call, rotation=rotation),
        f"blocks of {BLOCK}": lambda *qkv: block_attention(*qkv, call, size=BLOCK, coverage=0.3, least=0.0),
    }


def seconds(attend, qkv, device):
    inputs = [x.detach().requires_grad_() for x in qkv]
    synchronize(device)
    began = time.perf_counter()
    attend(*inputs).sum().backward()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def dense(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True)


@click.command(help=__doc__)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
def main(device):
    torch.set_num_threads(1)
    for name, (heads, width) in HEADS.items():
        for kind in ("spread", "crowded"):
            for pattern, attend in patterns(width, device).items():
                found = {}
                for length in LENGTHS:
                    qkv = [x.to(device) for x in content(kind, heads, width, length)]

                    def mixed(*inputs, attend=attend):
                        return attend(*inputs).mixed

                    seconds(dense, qkv, device), seconds(mixed, qkv, device)
                    ratios = [
                        seconds(dense, qkv, device) / seconds(mixed, qkv, device) for _ in range(ROUNDS)
                    ]
                    found[length] = {
                        "kept": round(attend(*qkv).kept, 3),
                        "dense_over_sparse": round(statistics.median(ratios), 2),
                    }
                row = {"benchmark": "trainer_attention", "device": device, "heads": name, "content": kind}
                click.echo(json.dumps({**row, "pattern": pattern, "lengths": found}))


if __name__ == "__main__":
    main()
