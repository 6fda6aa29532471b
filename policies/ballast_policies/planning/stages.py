"""Conversions between a partition and the stages of a plan, and the first stages of a job.

A :class:`Partition` holds where the layers are cut; a :class:`Stage` of the contract also names the
rank of each part.  The rank of each stage follows from the schedule and is called the placement.
"""

from collections.abc import Sequence

from ballast_policies.contract.messages import Stage
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.partition import Partition, even_partition
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.schedules.builders.synchronous import replica_ranks
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.planning.schedules.schedule import ScheduleError


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
