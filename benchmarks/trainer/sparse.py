"""From which sparsity on a pruned linear layer is faster sparse: forward and backward against dense.

Both layers hold the same weights under the same random mask and take the same input; they are timed
in turn, in one process on one thread, and the median of the pairwise ratios is printed. Above 1 the
sparse layer is the faster one. ``SPARSE_FROM`` in dynamics/pruning/sparse_linear.py is read off here.

    python benchmarks/trainer/sparse.py
"""

import json
import statistics
import time

import torch
from ballast_trainer.dynamics import sparse_linear
from ballast_trainer.dynamics.pruning.sparse_linear import PrunableLinear
from torch import nn

ROUNDS = 15
ROWS = 512
"""Positions of a microbatch, e.g. 2 sequences of 256."""


def seconds(layer, x):
    x = x.detach().requires_grad_()
    began = time.perf_counter()
    layer(x).sum().backward()
    return time.perf_counter() - began


def pruned(dim, mask, *, sparse):
    sparse_linear.SPARSE_FROM = 0.0 if sparse else 2.0
    torch.manual_seed(0)
    layer = PrunableLinear(nn.Linear(dim, 4 * dim))
    layer.prune(mask)
    return layer


def main():
    torch.set_num_threads(1)
    crossover = sparse_linear.SPARSE_FROM
    found = {}
    for dim in (128, 256, 512):
        for sparsity in (0.5, 0.75, 0.85, 0.9, 0.95):
            torch.manual_seed(1)
            mask = torch.rand(4 * dim, dim) >= sparsity
            dense, sparse = pruned(dim, mask, sparse=False), pruned(dim, mask, sparse=True)
            assert dense.values is None
            assert sparse.values is not None
            x = torch.randn(ROWS, dim)
            seconds(dense, x), seconds(sparse, x)
            ratios = [seconds(dense, x) / seconds(sparse, x) for _ in range(ROUNDS)]
            found[f"dim {dim}, sparsity {sparsity}"] = round(statistics.median(ratios), 3)
    print(json.dumps({"benchmark": "trainer_sparse", "sparse_from": crossover, "dense_over_sparse": found}))


if __name__ == "__main__":
    main()
