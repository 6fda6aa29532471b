"""Which rank holds which stage, by schedule: one stage a rank, or several that loop or fold back."""

from ballast_policies.contract import Stage
from ballast_policies.planning import Partition
from ballast_policies.planning.schedules import Schedule, ScheduleError, build_schedule

from ballast_trainer.errors import ConfigurationError

CHUNKS = 2
"""Stages a rank, in schedules that give a rank several."""

FLUSHING = (
    "1F1B",
    "GPipe",
    "LoopedBFS",
    "Interleaved1F1B",
    "ZeroBubbleH1",
    "InterleavedZeroBubble",
    "ZeroBubbleV",
)
"""Schedules that this runtime carries out: some of those in planning that keep the weights in a step."""


def check_schedule(name: str) -> None:
    """Refuse a schedule that is not carried out.

    Raises:
        ConfigurationError: the name is unknown, or of a schedule without a flush.
    """
    if name not in FLUSHING:
        raise ConfigurationError.unknown("pipeline.schedule", name, FLUSHING)


def schedule_of(name: str, *, ranks: int, microbatches: int) -> Schedule:
    """The order of actions of every rank.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    try:
        return build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=CHUNKS)
    except ScheduleError as error:
        raise ConfigurationError("pipeline.schedule", f"{name} over {ranks} ranks: {error}") from error


def placement_of(name: str, *, ranks: int, microbatches: int) -> tuple[int, ...]:
    """The rank of each stage; one stage where there is one rank.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    if ranks == 1:
        return (0,)
    return tuple(
        holders[0] for holders in schedule_of(name, ranks=ranks, microbatches=microbatches).stage_ranks
    )


def stages_over(partition: Partition, placement: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages of a partition, each on its rank."""
    return tuple(
        Stage(rank=rank, first_layer=partition.bounds[index], end_layer=partition.bounds[index + 1])
        for index, rank in enumerate(placement)
    )
