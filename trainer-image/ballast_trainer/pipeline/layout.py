"""Which rank holds which stage, by schedule: one stage a rank, several that loop or fold back, replicas."""

from collections.abc import Sequence
from math import gcd

from ballast_policies.contract import Stage
from ballast_policies.planning.schedules import (
    DEFAULT_STAGES_PER_RANK,
    SCHEDULES,
    Schedule,
    ScheduleError,
    build_schedule,
    find_schedule,
    trained_schedules,
)

from ballast_trainer.errors import ConfigurationError


def is_asynchronous(name: str) -> bool:
    """Whether the schedule has no flush."""
    return find_schedule(name).asynchronous


def check_schedule(name: str, stages_per_rank: int | None = None) -> None:
    """Refuse a schedule that is not carried out.

    Raises:
        ConfigurationError: the name is unknown, or the schedule has another number of stages a rank.
    """
    try:
        kind = find_schedule(name)
    except ScheduleError as error:
        raise ConfigurationError("pipeline.schedule", str(error).removeprefix("schedule: ")) from error
    if not kind.trained:
        raise ConfigurationError(
            "pipeline.schedule",
            f"{name} is planned and simulated only. To fix: use one of {', '.join(trained_schedules())}",
        )
    if stages_per_rank is not None and kind.stages_per_rank not in (None, stages_per_rank):
        free = [n for n in trained_schedules() if SCHEDULES[n].stages_per_rank is None]
        raise ConfigurationError(
            "pipeline.stagesPerRank",
            f"{stages_per_rank}: {name} has {kind.stages_per_rank} a rank. To fix: leave it out, or take a "
            f"schedule of {', '.join(free)}",
        )


def schedule_of(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    replicas: Sequence[int] = (),
    stages_per_rank: int | None = None,
) -> Schedule:
    """The order of actions of every rank in one step; of a run of one step, where there is no flush.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    if is_asynchronous(name):
        return schedule_of_run(name, ranks=ranks, microbatches=microbatches, steps=1, replicas=replicas)
    try:
        return build_schedule(
            name,
            ranks=ranks,
            microbatches=microbatches,
            chunks=stages_per_rank or DEFAULT_STAGES_PER_RANK,
            replicas=used_replicas(replicas, ranks),
        )
    except ScheduleError as error:
        raise _unsuitable(name, ranks, replicas, error) from error


def schedule_of_run(
    name: str, *, ranks: int, microbatches: int, steps: int, replicas: Sequence[int] = ()
) -> Schedule:
    """The order of actions of a run of steps through which the pipeline never drains.

    PipeDream updates a stage after each microbatch (of each of its replicas), 2BW after each step.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    try:
        build_run = find_schedule(name).build_run
        if build_run is not None and not used_replicas(replicas, ranks):
            schedule = build_run(ranks, microbatches, steps)
        else:
            schedule = build_schedule(
                name, ranks=ranks, microbatches=steps * microbatches, replicas=used_replicas(replicas, ranks)
            )
    except ScheduleError as error:
        raise _unsuitable(name, ranks, replicas, error) from error
    uneven = [held for held in map(len, schedule.stage_ranks) if microbatches % held]
    if uneven:
        reason = (
            f"{microbatches} do not divide over {uneven[0]} replicas of a stage. "
            f"To fix: use {microbatches * uneven[0] // gcd(microbatches, uneven[0])}"
        )
        raise ConfigurationError("pipeline.microbatches", reason)
    return schedule


def _unsuitable(name: str, ranks: int, replicas: Sequence[int], error: ScheduleError) -> ConfigurationError:
    field = "pipeline.replicas" if used_replicas(replicas) else "pipeline.schedule"
    return ConfigurationError(field, f"{name} over {ranks} ranks: {error}")


def used_replicas(replicas: Sequence[int], ranks: int = 0) -> Sequence[int]:
    """The replicas of each stage; empty where every stage has one, or one rank trains alone."""
    return replicas if ranks != 1 and any(count != 1 for count in replicas) else ()


def placement_of(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    replicas: Sequence[int] = (),
    stages_per_rank: int | None = None,
) -> tuple[int, ...]:
    """The rank of each stage, the first of its replicas; one stage where there is one rank.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    if ranks == 1:
        return (0,)
    schedule = schedule_of(
        name, ranks=ranks, microbatches=microbatches, replicas=replicas, stages_per_rank=stages_per_rank
    )
    return tuple(holders[0] for holders in schedule.stage_ranks)


def holders_of(
    stages: Sequence[Stage], replicas: Sequence[int], ranks: int = 0
) -> tuple[tuple[int, ...], ...]:
    """All ranks that hold each stage: a stage's own, and those after it that are its replicas."""
    if not used_replicas(replicas, ranks):
        return tuple((stage.rank,) for stage in stages)
    return tuple(
        tuple(range(stage.rank, stage.rank + count)) for stage, count in zip(stages, replicas, strict=True)
    )
