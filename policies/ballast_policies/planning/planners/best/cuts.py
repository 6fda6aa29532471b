"""Layers to stages for a fixed placement: all cuts where they are few, else the best found and improved."""

import functools
import itertools
from collections.abc import Sequence
from math import comb

import numpy as np

from ballast_policies.planning.balancers.mixed_gpus import partition_by_rank
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.cost_model import CostModel, Degrees, StageGpus

_MOST_ROUNDS = 60
"""Of improvement; each accepts the best move."""
_WIDE = 24
"""Stages up to which runs of boundaries of any length move together; beyond, of up to four."""
_CELLS = 1 << 19
"""Numbers in an array that is worked on at once: larger ones leave the cache."""


@functools.lru_cache(maxsize=64)
def all_cuts(layers: int, stages: int, *, most: int) -> np.ndarray | None:
    """Bounds of every partition, shape (n, p + 1); None where there are more than ``most``."""
    if comb(layers - 1, stages - 1) > most:
        return None
    cuts = list(itertools.combinations(range(1, layers), stages - 1))
    inner = np.array(cuts, dtype=int).reshape(len(cuts), stages - 1)
    ends = np.full((len(cuts), 1), layers)
    return np.concatenate([np.zeros_like(ends), inner, ends], axis=1)


def best_of_all(
    model: CostModel, degrees: Degrees, gpus: StageGpus, bounds: np.ndarray, limit: float
) -> tuple[float, int, np.ndarray]:
    """The best of every placement with every partition: (seconds, placement, bounds).

    What cannot be below ``limit`` is not played; the seconds are then infinite.
    """
    best, placement, cut = np.inf, 0, bounds[0]
    for index in range(len(gpus.speed)):
        own = gpus.some(index)
        times = model.times(degrees, own, bounds)
        loads, m = times.forward + times.backward, degrees.microbatches
        p = loads.shape[1]
        after = (m - 1) * times.backward + np.maximum(m - p + np.arange(p), 0) * times.forward
        least = np.maximum((m * loads + times.exchange).max(axis=1), loads.sum(axis=1) + after.max(axis=1))
        least[~model.fits(degrees, own, bounds)] = np.inf
        order = np.flatnonzero(least < min(best, limit))
        order = order[np.argsort(least[order], kind="stable")]
        # The likeliest first: what they reach rules most of the others out.
        size = 16
        while len(order):
            chosen, order = order[:size], order[size:]
            seconds = model.step_seconds(degrees, own, bounds[chosen])
            k = int(np.argmin(seconds))
            if seconds[k] < best:
                best, placement, cut = float(seconds[k]), index, bounds[chosen[k]]
            order = order[least[order] < min(best, limit)]
            size = min(2 * size, max(16, _CELLS // p))
    return best, placement, cut


def quick_best(
    model: CostModel, degrees: Degrees, placements: Sequence[StageGpus]
) -> tuple[float, int, np.ndarray] | None:
    """The best of the placements, each cut quickly: (seconds, placement, bounds); None: none fits."""
    cut = [(index, _quick_cut(model, degrees, gpus)) for index, gpus in enumerate(placements)]
    fitting = [(index, bounds) for index, bounds in cut if bounds is not None]
    if not fitting:
        return None
    together = StageGpus.together([placements[index] for index, _ in fitting])
    seconds = model.step_seconds(degrees, together, np.stack([bounds for _, bounds in fitting]))
    k = int(np.argmin(seconds))
    return (float(seconds[k]), *fitting[k]) if np.isfinite(seconds[k]) else None


def _quick_cut(model: CostModel, degrees: Degrees, gpus: StageGpus) -> np.ndarray | None:
    """The partition whose busiest stage is least busy, within the memory; None where none fits."""
    stages = len(gpus.speed)
    if not model.profiled(degrees, gpus.types):
        return None
    busy = model.layer_seconds(degrees, gpus)
    limited = not np.isinf(gpus.memory).all()
    try:
        found = partition_by_rank(
            busy,
            taken=model.stage_bytes(degrees, stages).taken if limited else None,
            memory=gpus.memory.tolist() if limited else None,
        )
    except PlanningError:
        return None
    return np.array(found.bounds)


def improved(
    model: CostModel, degrees: Degrees, gpus: StageGpus, bounds: np.ndarray, seconds: float
) -> tuple[float, np.ndarray]:
    """Boundaries move by a layer, alone or with their neighbours, while the step gets shorter."""
    stages = len(bounds) - 1
    if stages == 1:
        return seconds, bounds
    longest = stages - 1 if stages <= _WIDE else 4
    moves = []
    for first in range(1, stages):
        for end in range(first + 1, min(first + longest, stages) + 1):
            step = np.zeros(stages + 1, dtype=int)
            step[first:end] = 1
            moves += [step, -step]
    every = np.array(moves)
    for _ in range(_MOST_ROUNDS):
        candidates = bounds + every
        candidates = candidates[(np.diff(candidates, axis=1) > 0).all(axis=1)]
        if not len(candidates):
            break
        found = model.step_seconds(degrees, gpus, candidates)
        k = int(np.argmin(found))
        if not found[k] < seconds * (1 - 1e-12):
            break
        seconds, bounds = float(found[k]), candidates[k]
    return seconds, bounds
