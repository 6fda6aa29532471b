"""An all-reduce for short vectors, by a binomial tree of messages.

gloo's all-reduce is a ring: 2 (n - 1) hops one after another, each of which wakes a process.  For
the short vector that ranks agree on after every step a tree's 2 log2 n hops are several times
faster (``benchmarks/trainer/agreement.py``).
"""

import torch
import torch.distributed as dist

_TAG = 1 << 21
"""Apart from the tags of layers that move, of schedules and of timed links."""


def tree_sum(tensor: torch.Tensor, *, rank: int, size: int) -> torch.Tensor:
    """Sum a tensor over the ranks of the default group, in place; collective.

    A binomial tree with rank 0 at its root: up to it the sums, down from it the total.  So all ranks
    hold the same floats, added in the same order every time.

    Args:
        tensor: of the same shape and type on each rank, contiguous.
        rank: this one.
        size: of all ranks.
    """
    theirs = torch.empty_like(tensor)
    distance = 1
    while distance < size and not rank & distance:
        if rank + distance < size:
            dist.recv(theirs, rank + distance, tag=_TAG)
            tensor += theirs
        distance *= 2
    if rank > 0:
        dist.send(tensor, rank - distance, tag=_TAG)
        dist.recv(tensor, rank - distance, tag=_TAG)
    sending = []
    while distance > 1:
        distance //= 2
        if rank + distance < size:
            sending.append(dist.isend(tensor, rank + distance, tag=_TAG))
    for work in sending:
        if work is not None:
            work.wait()
    return tensor
