"""The first stages of a launch whose layers have been measured, by this job or by another of its kind.

The cut is that of the smallest largest load over the speeds of the ranks, within their memory.
"""

import dataclasses

from ballast_policies.contract.ranks import Stage
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.launch.memory import MeasuredLayers, PipelineForm, bytes_on_positions
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.stages import partition_of, stages_over

MOST_CUTS = 20_000
"""Stages x layers, beyond which the search would take above a second; stages are even then."""


UNLIMITED_BYTES = 2.0**62
"""Stands for memory that is not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRanks:
    """What is known of the ranks of a launch.

    Attributes:
        placement: rank of each stage, in the order of the layers.
        memory: bytes of each rank's GPU, infinite where it is not known; empty: of none.
        speeds: relative speed of each rank; empty: alike.
    """

    placement: tuple[int, ...]
    memory: tuple[float, ...] = ()
    speeds: tuple[float, ...] = ()


def first_cut(
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
    capacity = free = RankCapacity(speeds=speeds)
    if ranks.memory and len(layers.held_bytes) == count:
        capacity = dataclasses.replace(_limits(layers, form, ranks), speeds=speeds)
    for allowed in (capacity, free):
        try:
            best = exact_partition(seconds, stages, allowed)
        except PlanningError:
            continue
        load_before, load = (float((cut.loads(seconds) / speeds).max()) for cut in (before, best))
        kept = allowed.fits(before) and load > load_before * (1 - min_gain)
        return even if kept else stages_over(best, placement)
    return even


def _limits(layers: MeasuredLayers, form: PipelineForm, ranks: LaunchRanks) -> RankCapacity:
    """Limits by stage: a rank's memory in parts of equal size for each of its stages."""
    placement = ranks.placement
    each = {rank: placement.count(rank) for rank in set(placement)}
    numbers = {rank: position for position, rank in enumerate(dict.fromkeys(placement))}
    rows = bytes_on_positions(layers, dataclasses.replace(form, positions=len(numbers)))
    return RankCapacity(
        memory=[int(min(ranks.memory[rank], UNLIMITED_BYTES) / each[rank]) for rank in placement],
        rank_bytes=[rows[numbers[rank]].tolist() for rank in placement],
    )
