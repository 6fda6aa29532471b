"""Diffusion with chain moves: small steps from the partition in force towards an even one.

DynMo's diffusion (supplement, Algorithm 2) moves single layers between any two ranks and so breaks
contiguity.  Here layers only cross boundaries, in chains: a rank passes one layer to its neighbour,
which passes as many as it must to stay below the largest load, and so on.  (If every rank passed
exactly one layer, ranks beside a frozen prefix would get stuck, where several cheap layers must make
room for an expensive one; the worst of 300 cases is then 1.29 x optimal.)  A step is taken if the
loads, sorted from the largest, fall in lexicographic order; the best such step first.  Each accepted
step lowers that potential, so the loop ends.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ballast_policies.planning.partition import Partition
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity


def diffuse(
    partition: Partition,
    seconds: Sequence[float],
    capacity: RankCapacity = UNLIMITED,
    *,
    max_steps: int = 1000,
) -> tuple[Partition, ...]:
    """The partitions passed through, without the first; empty where no step is an improvement.

    Args:
        partition: the one in force.
        seconds: load of each layer.
        capacity: speed and memory of the ranks; no step exceeds the memory.
        max_steps: the most steps to take.

    Raises:
        PlanningError: memory without bytes, or shapes that do not match.
    """
    speeds = capacity.speeds
    passed: list[Partition] = []
    potential = _potential(partition, seconds, speeds)
    while len(passed) < max_steps:
        fitting = (
            p for p in _steps(passed[-1] if passed else partition, seconds, speeds) if capacity.fits(p)
        )
        best = min(fitting, key=lambda p: _potential(p, seconds, speeds), default=None)
        if best is None or not _potential(best, seconds, speeds) < potential:
            break
        potential = _potential(best, seconds, speeds)
        passed.append(best)
    return tuple(passed)


def _steps(
    partition: Partition, seconds: Sequence[float], speeds: Sequence[float] | None
) -> Iterator[Partition]:
    """All partitions one chain move away, to the right and (by mirroring) to the left."""
    yield from _chains(partition, seconds, speeds)
    mirrored_speeds = None if speeds is None else speeds[::-1]
    for mirrored in _chains(_mirror(partition), seconds[::-1], mirrored_speeds):
        yield _mirror(mirrored)


def _mirror(partition: Partition) -> Partition:
    return Partition(bounds=tuple(partition.layers - bound for bound in reversed(partition.bounds)))


def _chains(
    partition: Partition, seconds: Sequence[float], speeds: Sequence[float] | None
) -> Iterator[Partition]:
    """Chains to the right: rank i passes its last layer on; later ranks pass one, or as many as they must."""
    largest = float(partition.loads(seconds, speeds).max())
    for first in range(1, partition.ranks):
        bounds = list(partition.bounds)
        for boundary in range(first, partition.ranks):
            bounds[boundary] -= 1
            if bounds[boundary] <= bounds[boundary - 1]:
                break
            yield Partition(bounds=tuple(bounds))
        yield from _forced_chain(list(partition.bounds), first, largest, seconds, speeds)


def _forced_chain(
    bounds: list[int], first: int, largest: float, seconds: Sequence[float], speeds: Sequence[float] | None
) -> Iterator[Partition]:
    """Boundary ``first`` moves left by one; each later rank passes layers until it is below ``largest``."""
    bounds[first] -= 1
    if bounds[first] <= bounds[first - 1]:
        return
    for rank in range(first, len(bounds) - 1):
        speed = 1.0 if speeds is None else speeds[rank]
        load = sum(seconds[bounds[rank] : bounds[rank + 1]]) / speed
        if load < largest * (1 - 1e-12):
            yield Partition(bounds=tuple(bounds))
            return
        if rank == len(bounds) - 2:
            return
        while load >= largest * (1 - 1e-12):
            bounds[rank + 1] -= 1
            if bounds[rank + 1] <= bounds[rank]:
                return
            load -= seconds[bounds[rank + 1]] / speed


def _potential(
    partition: Partition, seconds: Sequence[float], speeds: Sequence[float] | None
) -> tuple[float, ...]:
    # Rounded relative to the total, so that rounding errors do not count as progress.
    loads = partition.loads(seconds, speeds)
    scale = float(np.sum(loads)) or 1.0
    return tuple(np.round(np.sort(loads)[::-1] / scale, 12).tolist())
