"""Sparsity from which a pruned linear layer is faster sparse: forward and backward against dense.

Both layers hold the same weights under the same random mask and take the same input; they are timed
in turn, in one process on one thread, and the median of the pairwise ratios is printed. Above 1 the
sparse layer is the faster one. ``SPARSE_FROM`` in dynamics/pruning/sparse_linear.py is read off here.

    python benchmarks/trainer/sparse.py [--device cuda]
"""

import argparse
import json
import statistics
import time

import torch
from ballast_trainer.dynamics.pruning import sparse_linear
from ballast_trainer.dynamics.pruning.sparse_linear import PrunableLinear
from torch import nn

ROUNDS = 15
ROWS, DIMS = {"cpu": 512, "cuda": 8192}, {"cpu": (128, 256, 512), "cuda": (1024, 4096)}
"""Positions of a microbatch, e.g. 2 sequences of 256; and widths of the layer's input."""


def seconds(layer, x, precision):
    x = x.detach().requires_grad_()
    wait = torch.cuda.synchronize if x.is_cuda else int
    wait()
    began = time.perf_counter()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        layer(x).sum().backward()
    wait()
    return time.perf_counter() - began


def pruned(dim, mask, *, sparse):
    sparse_linear.SPARSE_FROM = 0.0 if sparse else 2.0
    # On a GPU a job computes densely, by what is measured here.
    sparse_linear.sparse_pays_on = lambda _: True
    torch.manual_seed(0)
    layer = PrunableLinear(nn.Linear(dim, 4 * dim).to(mask.device))
    layer.prune(mask)
    return layer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=list(ROWS), default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    crossover = sparse_linear.SPARSE_FROM
    found = {}
    for dim in DIMS[device]:
        for sparsity in (0.5, 0.75, 0.85, 0.9, 0.95, 0.99):
            torch.manual_seed(1)
            mask = torch.rand(4 * dim, dim, device=device) >= sparsity
            dense, sparse = pruned(dim, mask, sparse=False), pruned(dim, mask, sparse=True)
            assert dense.values is None
            assert sparse.values is not None
            x = torch.randn(ROWS[device], dim, device=device)
            # Autocast does not change sparse products: they compute in fp32.
            for precision in ("fp32",) if device == "cpu" else ("fp32", "bf16"):
                seconds(dense, x, precision), seconds(sparse, x, precision)
                ratios = [seconds(dense, x, precision) / seconds(sparse, x, precision) for _ in range(ROUNDS)]
                found[f"dim {dim}, sparsity {sparsity}, {precision}"] = round(statistics.median(ratios), 3)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    line = {"benchmark": "trainer_sparse", "device": name, "sparse_from": crossover}
    print(json.dumps({**line, "dense_over_sparse": found}))


if __name__ == "__main__":
    main()
