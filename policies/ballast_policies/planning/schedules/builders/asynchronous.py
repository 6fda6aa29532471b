"""Schedules without a flush: PipeDream (1F1B-RR with weight stashing or vertical sync) and 2BW.

Updates are separate actions, right after the backward that completes them.  A schedule covers
a run of microbatches; at its end the pipeline drains, in between it never does.
"""

from collections.abc import Sequence

from ballast_policies.planning.schedules.builders.synchronous import in_flight, one_stage_order, replica_ranks
from ballast_policies.planning.schedules.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    WeightRule,
    check_counts,
)


def pipedream(replicas: Sequence[int], microbatches: int, *, vertical_sync: bool = False) -> Schedule:
    """PipeDream: an update after every microbatch of a stage; of each of its replicas, where it has several.

    Replicas of a stage average their gradients, so update u of a stage with r replicas covers
    microbatches u r to u r + r - 1 (dissertation 2.4.2 and 2.4.3).

    Raises:
        ScheduleError: microbatches that the replicas of a stage cannot share evenly, or vertical
            sync of a replicated stage, whose updates count differently from its neighbours'.
    """
    check_counts(stages=len(replicas), microbatches=microbatches, replicas=min(replicas, default=1))
    uneven = [count for count in replicas if microbatches % count]
    if uneven:
        raise ScheduleError(
            f"{microbatches} microbatches do not divide over {uneven[0]} replicas of a stage. "
            "To fix: use a multiple of every stage's replicas"
        )
    if vertical_sync and max(replicas) > 1:
        raise ScheduleError(
            f"vertical sync needs one replica a stage, got {list(replicas)}: stages with different "
            "replicas have different update counts. To fix: use weight stashing"
        )
    stage_ranks = replica_ranks(replicas)
    rows = []
    for stage, holders in enumerate(stage_ranks):
        for replica in range(len(holders)):
            own = list(range(replica, microbatches, len(holders)))
            rows.append(_with_updates(one_stage_order(stage, own, in_flight(replicas, stage)), 1))
    return Schedule(
        name="PipeDream",
        microbatches=microbatches,
        stage_ranks=stage_ranks,
        actions=tuple(tuple(row) for row in rows),
        weights=WeightRule.VERTICAL_SYNC if vertical_sync else WeightRule.STASH,
        update_every=1,
    )


def double_buffered(ranks: int, microbatches: int, *, update_every: int) -> Schedule:
    """PipeDream-2BW: gradients of ``update_every`` microbatches make an update (dissertation 3.2.1).

    Raises:
        ScheduleError: ``update_every`` is below the ranks (two versions would not do), or does not
            divide the microbatches.
    """
    check_counts(ranks=ranks, microbatches=microbatches, update_every=update_every)
    if update_every < ranks:
        raise ScheduleError(
            f"an update every {update_every} microbatches is less than the {ranks} in flight: more than two "
            f"versions would be needed. To fix: update every {ranks} or more"
        )
    if microbatches % update_every:
        raise ScheduleError(
            f"{microbatches} microbatches do not divide into updates of {update_every}. "
            f"To fix: use {microbatches - microbatches % update_every + update_every}"
        )
    rows = [
        _with_updates(one_stage_order(stage, list(range(microbatches)), ranks - stage), update_every)
        for stage in range(ranks)
    ]
    return Schedule(
        name="PipeDream-2BW",
        microbatches=microbatches,
        stage_ranks=replica_ranks([1] * ranks),
        actions=tuple(tuple(row) for row in rows),
        weights=WeightRule.DOUBLE_BUFFERED,
        update_every=update_every,
    )


def _with_updates(row: Sequence[Action], every: int) -> list[Action]:
    """An update after every ``every``-th backward of the row."""
    updated, backwards = [], 0
    for action in row:
        updated.append(action)
        if action.kind is Kind.BACKWARD:
            backwards += 1
            if backwards % every == 0:
                updated.append(Action(action.stage, Kind.UPDATE, backwards // every - 1))
    return updated
