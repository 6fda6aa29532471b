"""The best plan of all: tensor x pipeline x data x microbatch x recomputation x layers x order of the GPUs.

Shapes are taken in the order of their bounds.  Where the placements of a shape and its partitions are few,
all are tried, so that its best is known; else likely placements are cut so that the busiest stage is least
busy.  Once no shape left has a bound below the best plan, the plans found are improved by moving boundaries.
The optimum is at least the least bound of the shapes that were not tried in full:
this is the bound that is printed, and where it is the plan's own step, the plan is optimal.

Layers to stages for a fixed placement: all cuts where they are few, else the best found and improved.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from math import comb

import numpy as np

from ballast_policies.planning.balancers.exact import partition_by_rank
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.best.placements import (
    Placement,
    Shape,
    all_shapes,
    distinct_placements,
    every_placement,
    likely_placements,
)
from ballast_policies.planning.planners.cost_model import CostModel, Degrees, StageGpus
from ballast_policies.planning.planners.layout import Layout

_FEW_PLACEMENTS = 3000
_FEW_CUTS = 10_000
_FEW_PLANS = 150_000
"""Placements, partitions, and pairs of both, up to which a shape is tried in full."""
_MOST_IMPROVED = 3
"""Plans that are improved, the fastest first."""
_MOST_LARGE = 40
"""Shapes tried that are too large to be tried in full."""
_MOST_SHAPES = 1500
"""Shapes looked at; the bound tells what was left."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BestPlans:
    """Result of the search.

    Attributes:
        plans: (seconds of a step, layout), the fastest first, one for each shape.
        bound: seconds; no plan of any of the shapes is faster.
        shapes: how many there are.
    """

    plans: tuple[tuple[float, Layout], ...]
    bound: float
    shapes: int

    @property
    def optimal(self) -> bool:
        """True if the bound proves that the first plan is the best there is."""
        return self.plans[0][0] <= self.bound * (1 + 1e-9)


@dataclasses.dataclass(slots=True)
class _Found:
    seconds: float
    shape: Shape
    placement: Placement
    bounds: np.ndarray
    exact: bool


def plan_best(
    model: CostModel,
    *,
    batch_size: int,
    most_tensor: int,
    top: int = 1,
    others: Iterable[Layout] = (),
) -> BestPlans:
    """The fastest plans, and a bound on how much faster any could be.

    ``most_tensor``: largest tensor-parallel degree; ``top``: how many plans; ``others``: plans of other
    planners to compare with.

    Raises:
        PlanningError: nothing fits the memory.
    """
    model.check_layers_fit(most_tensor=min(most_tensor, model.devices.count), smallest=1)
    # Beyond the GPUs of a server shapes are many, and hardly one is below the best of these.
    usual = min(most_tensor, max(Counter(model.devices.servers).values()))
    first = all_shapes(model, batch_size, usual)
    found, limit, open_bound = _tried(model, first, top)
    shapes = len(first)
    if most_tensor > usual:
        more = all_shapes(model, batch_size, most_tensor, limit=limit, least_tensor=usual + 1)
        shapes += len(more)
        found_more, _, open_more = _tried(model, more, top, limit=limit)
        found, open_bound = found + found_more, min(open_bound, open_more)
    for plan in sorted((each for each in found if not each.exact), key=lambda f: f.seconds)[:_MOST_IMPROVED]:
        gpus = model.stage_gpus(plan.placement)
        plan.seconds, plan.bounds = improved(model, plan.shape.degrees, gpus, plan.bounds, plan.seconds)
    if not shapes:
        raise PlanningError(model.no_degrees)
    if not found:
        raise PlanningError(
            f"none of {shapes} shapes over {model.devices.count} GPUs fits their memory. "
            "To fix: use more GPUs, GPUs with more memory, or a larger --max-tensor"
        )
    every = [
        (each.seconds, each.shape.degrees.layout(each.bounds.tolist(), each.placement)) for each in found
    ]
    judged = ((model.judge(layout), layout) for layout in others)
    every += [(cost.seconds, layout) for cost, layout in judged if cost.fits]
    every.sort(key=lambda plan: plan[0])
    return BestPlans(plans=tuple(every[:top]), bound=min(open_bound, every[0][0]), shapes=shapes)


def _tried(
    model: CostModel, shapes: Sequence[Shape], top: int, limit: float = float("inf")
) -> tuple[list[_Found], float, float]:
    """Plans of shapes whose bound is below the ``top`` best; their limit; the least bound of what is open.

    A shape that is too large to be tried in full is open; of those of the same degrees, the ones with the
    least bounds are tried, and the numbers of stages next to the best ones.
    """
    found: list[_Found] = []
    open_bound, large, of_degrees = np.inf, 0, Counter[Degrees]()
    skipped: dict[tuple[Degrees, int], Shape] = {}

    def attempt(shape: Shape) -> None:
        nonlocal limit, open_bound
        plan, complete = _best_of_shape(model, shape, limit)
        if not complete:
            open_bound = min(open_bound, shape.bound)
        if plan is not None:
            found.append(plan)
            if len(found) >= top:
                limit = min(limit, sorted(each.seconds for each in found)[top - 1])

    for number, shape in enumerate(shapes):
        if shape.bound >= limit:
            break
        if number >= _MOST_SHAPES:
            open_bound = min(open_bound, shape.bound)
            break
        if comb(model.layers - 1, shape.stages - 1) > _FEW_CUTS:
            of_degrees[shape.degrees] += 1
            if of_degrees[shape.degrees] > 1 or large >= _MOST_LARGE:
                skipped[shape.degrees, shape.stages] = shape
                open_bound = min(open_bound, shape.bound)
                continue
            large += 1
        attempt(shape)
    for plan in sorted(found, key=lambda each: each.seconds)[:_MOST_IMPROVED]:
        for stages in (plan.shape.stages - 1, plan.shape.stages + 1, plan.shape.stages // 2):
            near = skipped.pop((plan.shape.degrees, stages), None)
            if near is not None and near.bound < limit:
                attempt(near)
    return found, limit, open_bound


def _best_of_shape(model: CostModel, shape: Shape, limit: float) -> tuple[_Found | None, bool]:
    """The best plan found, and whether all plans of the shape below ``limit`` were tried."""
    degrees, stages = shape.degrees, shape.stages
    cuts = all_cuts(model.layers, stages, most=_FEW_CUTS)
    if cuts is not None:
        most = min(_FEW_PLACEMENTS, max(1, 4 * _FEW_PLANS // len(cuts)))
        placements = every_placement(model.devices, degrees.tensor, degrees.data, stages, most=most)
        if placements is not None:
            if not len(placements):
                return None, True
            gpus, kept = distinct_placements(model.devices, placements)
            if len(kept) * len(cuts) <= _FEW_PLANS:
                seconds, index, bounds = best_of_all(model, degrees, gpus, cuts, limit)
                if not np.isfinite(seconds):
                    return None, True
                placement = placements[kept[index]].tolist()
                found = tuple(tuple(tuple(group) for group in stage) for stage in placement)
                return _Found(seconds, shape, found, bounds, True), True
    likely = likely_placements(model.devices, degrees.tensor, degrees.data, stages)
    best = quick_best(model, degrees, [model.stage_gpus(placement) for placement in likely])
    if best is None:
        return None, False
    return _Found(best[0], shape, likely[best[1]], best[2], False), False


_MOST_ROUNDS = 60
"""Rounds of improvement; each accepts the best move."""
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
    of_microbatch, exchange = model.layer_seconds(degrees, gpus)
    limited = not np.isinf(gpus.memory).all()
    try:
        found = partition_by_rank(
            degrees.microbatches * of_microbatch + exchange,
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
