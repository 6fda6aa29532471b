"""Two jobs on one GPU take one GPU: sums over jobs count it once."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def one_for_each_gpu(jobs: Iterable[T], shared_gpu: Callable[[T], str]) -> list[T]:
    """The jobs without the second of two on one GPU; the first of them stands for both.

    Args:
        jobs: whatever says where a job runs.
        shared_gpu: the node of the GPU that the job shares, or may share; empty: its GPUs are its own. Nodes
            whose GPU is shared have one.
    """
    found, seen = [], set[str]()
    for job in jobs:
        node = shared_gpu(job)
        if node and node in seen:
            continue
        seen.add(node)
        found.append(job)
    return found
