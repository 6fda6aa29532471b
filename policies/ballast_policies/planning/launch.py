"""The first stages of a gang, and the speed that a pipeline has with them.

A :class:`Partition` holds where the layers are cut; a :class:`Stage` of the contract also names the rank of
each part. The rank of each stage follows from the schedule and is called the placement. Of measured layers
the cut is that of the smallest largest load over the speeds of the ranks, within their memory.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from ballast_policies.contract.messages import Stage
from ballast_policies.planning.balancers.exact import exact_partition, fill_in_order
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.need import MOST_CUTS, bytes_of_cuts, smallest_cut
from ballast_policies.planning.memory.stage_bytes import ROUNDING, bytes_on_positions, stage_bytes
from ballast_policies.planning.partition import Partition, PlanningError, even_partition
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.schedules.builders.synchronous import replica_ranks
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.planning.schedules.schedule import ScheduleError
from ballast_policies.planning.step_time import predict_step_seconds


def stage_placement(
    schedule: str, *, ranks: int, stages_per_rank: int | None = None, replicas: Sequence[int] = ()
) -> tuple[int, ...]:
    """The rank of each stage, in the order of the layers; the first rank of a stage with replicas.

    One rank alone holds the whole model as one stage, whatever the schedule.

    Args:
        schedule: one of :data:`~ballast_policies.planning.schedules.registry.SCHEDULES`.
        ranks: of one pipeline, at least 1.
        stages_per_rank: with a schedule that leaves it open; None: the default.
        replicas: by stage, how many ranks hold it; none given: one each.

    Raises:
        ScheduleError: there is no such schedule.
    """
    if ranks > 1 and any(count != 1 for count in replicas):
        return tuple(holders[0] for holders in replica_ranks(replicas))
    return SCHEDULES.find(schedule, ScheduleError).stage_ranks(ranks, stages_per_rank)


def stages_over(partition: Partition, placement: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of a partition, each on its rank; the inverse of :func:`partition_of`."""
    return tuple(
        Stage(rank=rank, first_layer=partition.bounds[index], end_layer=partition.bounds[index + 1])
        for index, rank in enumerate(placement)
    )


def partition_of(stages: Sequence[Stage]) -> Partition:
    """The partition that stages are made from. Raises PlanningError: there are none."""
    return Partition(bounds=(0, *(stage.end_layer for stage in stages)))


def first_stages(layers: int, placement: Sequence[int], replicas: Sequence[int] = ()) -> tuple[Stage, ...]:
    """The stages of a job whose layers have not been measured: the same number of layers on each.

    A stage with replicas gets as many times the layers, since its ranks share the microbatches.

    Raises:
        PlanningError: fewer layers than stages.
    """
    count = len(placement)
    if len(replicas) == count and any(share != 1 for share in replicas):
        return stages_over(exact_partition([1.0] * layers, count, RankCapacity(speeds=replicas)), placement)
    return stages_over(even_partition(layers, count), placement)


def usable_stages(stages: Sequence[Stage], placement: Sequence[int], layers: int) -> tuple[Stage, ...] | None:
    """A plan's stages where they hold all layers and are placed as the schedule needs; else None."""
    if not stages or stages[-1].end_layer != layers:
        return None
    return tuple(stages) if tuple(stage.rank for stage in stages) == tuple(placement) else None


UNLIMITED_BYTES = 2.0**62
"""Stands for memory that is not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRanks:
    """Placement, memory and speed of the ranks of a launch.

    Attributes:
        placement: rank of each stage, in the order of the layers.
        memory: bytes of each rank's GPU, infinite where it is not known; empty: of none.
        speeds: relative speed of each rank; empty: alike.
    """

    placement: tuple[int, ...]
    memory: tuple[float, ...] = ()
    speeds: tuple[float, ...] = ()


def launch_partition(
    even: tuple[Stage, ...],
    layers: MeasuredLayers,
    form: PipelineForm,
    ranks: LaunchRanks,
    *,
    min_gain: float = 0.05,
) -> tuple[Stage, ...]:
    """The stages of a launch; ``even`` where they fit and nothing that is known wins ``min_gain`` over them.

    Where no cut fits the memory, the one without regard to it: what was measured may be out of date, and the
    trainer's own error says more.

    Args:
        even: of all layers, on the placement of ``ranks``.
        layers: as measured; of another number of layers they count for nothing.
        form: of the pipeline.
        ranks: of one pipeline.
        min_gain: part by which the largest load has to fall.
    """
    placement, before = ranks.placement, partition_of(even)
    count, stages = before.layers, len(placement)
    if count * stages > MOST_CUTS:
        return even
    measured = len(layers.seconds) == count and sum(layers.seconds) > 0
    seconds = layers.seconds if measured else (1.0,) * count
    speeds = [ranks.speeds[rank] if ranks.speeds else 1.0 for rank in placement]
    if len(form.replicas) == stages:
        speeds = [speed * holders for speed, holders in zip(speeds, form.replicas, strict=True)]
    free = RankCapacity(speeds=speeds)
    best: Partition | None = None
    fits: Callable[[Partition], bool] = lambda cut: True  # noqa: E731
    if ranks.memory and len(layers.held_bytes) == count:
        best, fits = cut_within_memory(seconds, speeds, layers, form, ranks)
    if best is None:
        try:
            best, fits = exact_partition(seconds, stages, free), lambda cut: True
        except PlanningError:
            return even
    load_before, load = (float((cut.loads(seconds) / speeds).max()) for cut in (before, best))
    kept = fits(before) and load > load_before * (1 - min_gain)
    return even if kept else stages_over(best, placement)


def cut_within_memory(
    seconds: Sequence[float],
    speeds: Sequence[float],
    layers: MeasuredLayers,
    form: PipelineForm,
    ranks: LaunchRanks,
) -> tuple[Partition | None, Callable[[Partition], bool]]:
    """(the fastest cut that is found to fit, or None; whether a cut fits); ``speeds``: of each stage.

    With several stages a rank, each is given an equal part of its rank's memory; where no such cut fits by
    the forecast, the one that fills the ranks least.
    """
    placement = ranks.placement
    each = {rank: placement.count(rank) for rank in set(placement)}
    numbers = {rank: position for position, rank in enumerate(dict.fromkeys(placement))}
    form = dataclasses.replace(form, positions=len(numbers))
    taken = bytes_of_cuts(layers, form)
    if taken is None:
        counts = form.replicas if len(form.replicas) == form.positions else (1,) * form.positions
        held_by = [slice(rank, rank + count) for rank, count in zip(placement, counts, strict=True)]
        capacity = RankCapacity(
            speeds=speeds,
            memory=[min(map(_known_bytes, ranks.memory[holders])) for holders in held_by],
            stage_bytes=stage_bytes(layers, form),
        )
    else:
        rows = bytes_on_positions(layers, form)
        capacity = RankCapacity(
            speeds=speeds,
            memory=[int(_known_bytes(ranks.memory[rank]) / each[rank]) for rank in placement],
            rank_bytes=[rows[numbers[rank]].tolist() for rank in placement],
        )
    best: Partition | None = None
    with contextlib.suppress(PlanningError):
        best = exact_partition(seconds, len(placement), capacity)
    if taken is None:
        return best, capacity.fits

    def fullness(cut: Partition) -> float:
        return max(size / ranks.memory[rank] for rank, size in enumerate(taken(cut)))

    def fits(cut: Partition) -> bool:
        return fullness(cut) <= ROUNDING

    if best is None or not fits(best):
        best = smallest_cut(layers, form, fullness)
    return best if fits(best) else None, fits


def _known_bytes(memory: float) -> int:
    return int(min(memory, UNLIMITED_BYTES))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankGpu:
    """The GPU of a rank.

    Attributes:
        speed: relative to the others'.
        memory: bytes; infinite: not known.
    """

    speed: float
    memory: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedPipeline:
    """A pipeline with one stage a rank that is to be launched.

    Attributes:
        layers: as measured; empty seconds: all alike; empty bytes: every cut fits.
        count: number of layers.
        form: its number of positions is not read.
        ranks_per_position: that share each position, on GPUs alike.
        cut: the only one that is launched; None: the best.
    """

    layers: MeasuredLayers
    count: int
    form: PipelineForm
    ranks_per_position: int = 1
    cut: Partition | None = None


@functools.lru_cache(maxsize=20_000)
def step_seconds(pipeline: LaunchedPipeline, ranks: tuple[RankGpu, ...]) -> float | None:
    """Seconds of a step under the best cut, in the layers' unit, where a GPU of speed 1 has speed 1.

    With t_i the seconds of rank i's stage on its GPU and m microbatches, a step takes
    ((m - 1) max_i t_i + sum_i t_i) / m: the closed form of GPipe and 1F1B (``planning.step_time``).
    ``ranks``: one for each position.

    None: there are fewer layers than ranks, or no cut fits the memory.
    """
    count = pipeline.count
    if not 1 <= len(ranks) <= count:
        return None
    seconds, speeds = _seconds_of(pipeline), np.array([rank.speed for rank in ranks])
    planned = pipeline.cut is not None and pipeline.cut.ranks == len(ranks)
    if not planned and count * len(ranks) > MOST_CUTS:  # launched with even stages
        loads = np.full(len(ranks), sum(seconds) / len(ranks))
    else:
        found = best_cut(pipeline, ranks)
        if found is None:
            return None
        loads = found.loads(seconds)
    return predict_step_seconds(loads / speeds, max(1, pipeline.form.microbatches))


def best_cut(pipeline: LaunchedPipeline, ranks: Sequence[RankGpu]) -> Partition | None:
    """The cut with the smallest largest load, then the smallest sum of loads; None: none fits the memory.

    Args:
        pipeline: whose own cut is the only one, where it has one for as many ranks.
        ranks: one for each position, no more than there are layers.
    """
    count, layers, seconds = pipeline.count, pipeline.layers, _seconds_of(pipeline)
    speeds = [rank.speed for rank in ranks]
    capacity = RankCapacity(speeds=speeds)
    if len(layers.held_bytes) == count and any(math.isfinite(rank.memory) for rank in ranks):
        capacity = dataclasses.replace(
            capacity,
            memory=[int(min(rank.memory, UNLIMITED_BYTES)) for rank in ranks],
            stage_bytes=stage_bytes(layers, dataclasses.replace(pipeline.form, positions=len(ranks))),
        )
    planned = pipeline.cut if pipeline.cut is not None and pipeline.cut.ranks == len(ranks) else None
    found = planned or _filled(seconds, speeds)
    if found is not None:
        if capacity.memory is None or capacity.fits(found):
            return found
        if planned is not None:
            return None
    with contextlib.suppress(PlanningError):
        return exact_partition(seconds, len(ranks), capacity)
    return None


def _seconds_of(pipeline: LaunchedPipeline) -> tuple[float, ...]:
    """Seconds of its layers; alike where they were not measured."""
    seconds = pipeline.layers.seconds
    known = len(seconds) == pipeline.count and sum(seconds) > 0
    return seconds if known else (1.0,) * pipeline.count


def _filled(seconds: Sequence[float], speeds: Sequence[float]) -> Partition | None:
    """The cut by filling, where speeds fall or rise; None: they do neither."""
    if all(after <= before for before, after in itertools.pairwise(speeds)):
        return fill_in_order(seconds, speeds)
    if all(after >= before for before, after in itertools.pairwise(speeds)):
        return fill_in_order(seconds[::-1], speeds[::-1]).reversed()
    return None
