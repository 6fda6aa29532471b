"""Layers to stages under AMP's step time, exactly (AMP supplement 6.4).

    T = (gas - 1) max_i t_i + sum_i t_i + sum_i e_i

gas microbatches, t_i seconds per microbatch of stage i, e_i of the transfer after it.  AMP's table
dp[layer][cuts][largest stage time to the right] has a column for each possible stage time.  The same
optimum comes from fixing the bottleneck c and finding the least sum with all t_i <= c,

    f[i, j] = min over k of f[i - 1, k] + e_{i-1}(k) + t_i(k..j),   t_i(k..j) <= c

for c upwards from the smallest feasible, until (gas - 1) c alone rules the rest out.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.balancers.mixed_gpus import partition_by_rank
from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.rank_capacity import TakenBytes


def pipeline_seconds(
    partition: Partition, stage_seconds: np.ndarray, boundary_seconds: np.ndarray, microbatches: int
) -> float:
    """T of above.

    Args:
        partition: layers to stages.
        stage_seconds: seconds of one microbatch of each layer on each stage's devices, shape (p, L).
        boundary_seconds: of a transfer after each layer from each stage, shape (p - 1, L - 1).
        microbatches: gas.
    """
    bounds = partition.bounds
    t = [stage_seconds[i, bounds[i] : bounds[i + 1]].sum() for i in range(partition.ranks)]
    e = [boundary_seconds[i, bounds[i + 1] - 1] for i in range(partition.ranks - 1)]
    return float((microbatches - 1) * max(t) + sum(t) + sum(e))


def assign_layers(
    stage_seconds: np.ndarray,
    boundary_seconds: np.ndarray,
    microbatches: int,
    *,
    taken: TakenBytes | None = None,
    memory: Sequence[float] | None = None,
) -> Partition:
    """The contiguous assignment with the least T; arguments as for :func:`pipeline_seconds`.

    Args:
        stage_seconds: see there.
        boundary_seconds: see there.
        microbatches: see there.
        taken: bytes of layers on a stage's devices.
        memory: bytes that each stage's devices hold; needs ``taken``.

    Raises:
        PlanningError: fewer layers than stages, or nothing fits the memory.
    """
    ranks = stage_seconds.shape[0]
    first = partition_by_rank(stage_seconds, taken=taken, memory=memory)
    S = np.concatenate([np.zeros((ranks, 1)), np.cumsum(stage_seconds, axis=1)], axis=1)
    # times[i][k, j]: stage i with layers k..j-1.
    times = S[:, None, :] - S[:, :, None]
    if taken is not None and memory is not None:
        width = times.shape[1]
        end = np.maximum(np.arange(width), 1)
        begin = np.minimum(np.arange(width)[:, None], end - 1)
        held = taken(np.arange(ranks)[:, None, None], begin, end)
        times = np.where(held <= ROUNDING * np.asarray(memory, dtype=float)[:, None, None], times, np.inf)
    # A hair above every candidate, so that a bound equal to a stage's own time admits it.
    smallest = max(times[i, a, b] for i, (a, b) in enumerate(itertools.pairwise(first.bounds))) * (1 + 1e-12)
    best = first
    value = pipeline_seconds(first, stage_seconds, boundary_seconds, microbatches)
    free = _least_sum(times, boundary_seconds, np.inf)
    floor = pipeline_seconds(free, stage_seconds, boundary_seconds, 1)
    candidates = np.unique(times[np.isfinite(times) & (times >= smallest / (1 + 2e-12))])
    for bottleneck in candidates:
        if (microbatches - 1) * bottleneck + floor >= value:
            break
        found = _least_sum(times, boundary_seconds, max(bottleneck * (1 + 1e-12), smallest))
        seconds = pipeline_seconds(found, stage_seconds, boundary_seconds, microbatches)
        if seconds < value:
            best, value = found, seconds
    return best


def _least_sum(times: np.ndarray, boundary_seconds: np.ndarray, bottleneck: float) -> Partition:
    """The least sum f of above; ``bottleneck`` must be feasible."""
    ranks, width, _ = times.shape
    f = np.full(width, np.inf)
    f[0] = 0.0
    cuts = []
    for stage in range(ranks):
        arriving = f.copy()
        if stage:
            arriving[1:-1] += boundary_seconds[stage - 1]
        value = arriving[:, None] + np.where(times[stage] <= bottleneck, times[stage], np.inf)
        value[np.tril_indices(width)] = np.inf
        cuts.append(np.argmin(value, axis=0))
        f = value.min(axis=0)
    bounds = [width - 1]
    for row in reversed(cuts):
        bounds.append(int(row[bounds[-1]]))
    return Partition(bounds=tuple(reversed(bounds)))
