"""Two ways of handing columns to the other ranks of a group, on real gloo: Wang et al., table I."""

import statistics
import time

import torch
import torch.distributed as dist
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.models.gpt import Block
from ballast_trainer.tensor_parallel.layers import split_layer
from ballast_trainer.tensor_parallel.migration import handed_over, numbers_per_unit
from ballast_trainer.tensor_parallel.parallel_pair import pairs
from tensor_group.shape import BATCH, CONTEXT, HEADS, LATE, RANKS

TABLE_I = {
    "broadcast-reduce": [373, 425, 451, 473, 500],
    "scatter-gather": [373, 478, 627, 796, 963],
}


def table_one(rank, store, dim):
    """Communication of a block and step, one straggler: the two ways of migrating, on real gloo.

    Milliseconds, and megabytes through the late rank by the algorithms' formulas (broadcast by a tree: it
    sends its units once), which no other load disturbs.

    broadcast-reduce is ours: weights by one broadcast, results added locally, gradients on an all-reduce
    that is made anyway (its additional bytes are counted).  scatter-gather sends each helper its part and
    collects its results, for each of the block's four products, forward and backward.
    """
    dist.init_process_group("gloo", store=dist.PrefixStore("collectives", store), rank=rank, world_size=RANKS)
    axis = Axis(ranks=tuple(range(RANKS)), index=rank)
    block = split_layer(Block(dim, HEADS, 0.0), axis)
    found = pairs([block])
    activations = BATCH * CONTEXT * dim
    rows = {name: {"ms": [], "late rank's MB": []} for name in TABLE_I}
    # A ring all-reduce sends and receives 2 (e - 1) / e of a tensor; four of them there are anyway.
    ring = 2 * 2 * (RANKS - 1) / RANKS
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        counts = handed_over(found, fraction)
        numbers = sum(count * numbers_per_unit(pair) for count, pair in zip(counts, found, strict=True))
        for name, work in (("broadcast-reduce", merged), ("scatter-gather", collected)):
            taken = []
            for _ in range(15):
                dist.barrier()
                began = time.perf_counter()
                work(rank, numbers, activations)
                taken.append(1000 * (time.perf_counter() - began))
            rows[name]["ms"].append(round(statistics.median(taken), 2))
        anyway, helpers = ring * 4 * activations, RANKS - 1 if numbers else 0
        through = {
            "broadcast-reduce": anyway + numbers + ring * numbers,
            "scatter-gather": anyway + 2 * numbers + 4 * 2 * helpers * activations,
        }
        for name, count in through.items():
            rows[name]["late rank's MB"].append(round(4 * count / 1e6, 2))
    dist.destroy_process_group()
    return rows


def merged(rank, numbers, activations):
    weights = torch.zeros(max(numbers, 1))
    if numbers:
        dist.broadcast(weights, src=LATE)
    for _ in range(2):
        dist.all_reduce(torch.zeros(activations))
    for _ in range(2):
        dist.all_reduce(torch.zeros(activations + numbers // 2))


def collected(rank, numbers, activations):
    share = torch.zeros(max(1, numbers // (RANKS - 1) // 4))
    result = torch.zeros(activations)
    for _ in range(4):
        if numbers:
            # Each of the four products, forward: weights out, results home; backward: both gradients home.
            late = rank == LATE
            dist.scatter(share, [share] * RANKS if late else None, src=LATE)
            for sent in (result, result, share):
                dist.gather(sent, [torch.empty_like(sent) for _ in range(RANKS)] if late else None, dst=LATE)
    for _ in range(4):
        dist.all_reduce(torch.zeros(activations))
