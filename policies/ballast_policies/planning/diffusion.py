"""Diffusion with chain moves: small steps from the partition in force towards an even one.

DynMo's diffusion (supplement, Algorithm 2) moves single layers between any two ranks and so breaks
contiguity.  Here layers only cross boundaries, in chains: a rank hands one layer to its neighbour,
which hands on as many as it must to stay below the largest load, and so on.  (With one layer
handed on everywhere, ranks beside a frozen prefix get stuck: several cheap layers make room for a
dear one; the worst of 300 cases is then 1.29 x optimal.)  A step is taken if the loads, sorted from
the largest, fall in lexicographic order; the best such step first.  Each accepted step lowers that
potential, so it ends.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ballast_policies.planning.partition import Partition, fits


def diffuse(
    partition: Partition,
    seconds: Sequence[float],
    *,
    speeds: Sequence[float] | None = None,
    bytes: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    rank_bytes: Sequence[Sequence[float]] | None = None,
    max_steps: int = 1000,
) -> tuple[Partition, ...]:
    """The partitions passed through, without the first; empty where no step is an improvement.

    Args:
        partition: the one in force.
        seconds: load of each layer.
        speeds: relative speed of each rank.
        bytes: bytes of each layer; only with ``memory``.
        memory: bytes that each rank can hold: no step passes it.
        rank_bytes: what each layer takes on each rank, shape (p, L), if not ``bytes``.
        max_steps: give up after so many.
    """
    passed: list[Partition] = []
    potential = _potential(partition, seconds, speeds)
    while len(passed) < max_steps:
        fitting = (
            p
            for p in _steps(passed[-1] if passed else partition, seconds, speeds)
            if fits(p, bytes, memory, rank_bytes)
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
    """Chains to the right: rank i hands its last layer on; later ranks hand on one, or all they must."""
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
    """Boundary ``first`` moves left by one; each rank behind hands on until it is below ``largest``."""
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
    # Rounded relative to the total, so that float noise is not taken for progress.
    loads = partition.loads(seconds, speeds)
    scale = float(np.sum(loads)) or 1.0
    return tuple(np.round(np.sort(loads)[::-1] / scale, 12).tolist())
