"""Schedules with a flush and one or more stages a rank: forward only, GPipe, 1F1B, looped breadth first."""

from collections.abc import Sequence
from math import ceil

from ballast_policies.planning.schedules.action import Action, Kind
from ballast_policies.planning.schedules.schedule import Schedule, check_counts, loop_schedule


def forward_only(ranks: int, microbatches: int) -> Schedule:
    """Evaluation: no backward."""
    check_counts(ranks=ranks, microbatches=microbatches)
    rows = [[Action(rank, Kind.FORWARD, k) for k in range(microbatches)] for rank in range(ranks)]
    return loop_schedule("forwardOnly", ranks, 1, microbatches, rows)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: m microbatches in flight (GPipe)."""
    return gpipe_replicated([1] * ranks, microbatches)


def gpipe_replicated(replicas: Sequence[int], microbatches: int) -> Schedule:
    """GPipe with stage s on ``replicas[s]`` ranks, microbatch k on replica k mod r."""
    check_counts(stages=len(replicas), microbatches=microbatches, replicas=min(replicas, default=1))
    stage_ranks = replica_ranks(replicas)
    rows = [
        [
            Action(stage, kind, k)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for k in range(replica, microbatches, len(holders))
        ]
        for stage, holders in enumerate(stage_ranks)
        for replica in range(len(holders))
    ]
    return Schedule(
        name="GPipe" if max(replicas) == 1 else "GPipe-RR",
        microbatches=microbatches,
        stage_ranks=stage_ranks,
        actions=tuple(tuple(row) for row in rows),
        update_every=microbatches,
    )


def looped_breadth_first(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """GPipe with ``chunks`` stages a rank: each stage does all its microbatches before the next."""
    check_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rows = []
    for rank in range(ranks):
        own = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, Kind.FORWARD, k) for stage in own for k in range(microbatches)]
        backwards = [
            Action(stage, Kind.BACKWARD, k) for stage in reversed(own) for k in reversed(range(microbatches))
        ]
        rows.append(forwards + backwards)
    return loop_schedule("LoopedBFS", ranks, chunks, microbatches, rows)


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """1F1B with a flush (PipeDream-Flush, dissertation 3.2.2): at most p - stage microbatches in flight."""
    return one_forward_one_backward_replicated([1] * ranks, microbatches)


def one_forward_one_backward_replicated(replicas: Sequence[int], microbatches: int) -> Schedule:
    """1F1B-RR with a flush: stage s on ``replicas[s]`` ranks, microbatch k on replica k mod r."""
    check_counts(stages=len(replicas), microbatches=microbatches, replicas=min(replicas, default=1))
    stage_ranks = replica_ranks(replicas)
    rows = [
        one_stage_order(stage, list(range(replica, microbatches, len(holders))), in_flight(replicas, stage))
        for stage, holders in enumerate(stage_ranks)
        for replica in range(len(holders))
    ]
    return Schedule(
        name="1F1B" if max(replicas) == 1 else "1F1B-RR",
        microbatches=microbatches,
        stage_ranks=stage_ranks,
        actions=tuple(tuple(row) for row in rows),
        update_every=microbatches,
    )


def replica_ranks(replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks for the replicas of each stage."""
    ranks, first = [], 0
    for count in replicas:
        ranks.append(tuple(range(first, first + count)))
        first += count
    return tuple(ranks)


def in_flight(replicas: Sequence[int], stage: int) -> int:
    """Microbatches that one replica of ``stage`` has in flight in the steady state.

    ceil(ranks from this stage on / replicas of this stage); for the input stage that is
    PipeDream's NUM_OPT_ACTIVE_MINIBATCHES (dissertation 2.4.2).
    """
    return ceil(sum(replicas[stage:]) / replicas[stage])


def one_stage_order(stage: int, microbatches: Sequence[int], active: int) -> list[Action]:
    """Forwards until ``active`` are in flight, then backward and forward in turn, then the rest."""
    warm_up = min(active - 1, len(microbatches))
    row = [Action(stage, Kind.FORWARD, k) for k in microbatches[:warm_up]]
    for done, microbatch in enumerate(microbatches):
        if warm_up + done < len(microbatches):
            row.append(Action(stage, Kind.FORWARD, microbatches[warm_up + done]))
        row.append(Action(stage, Kind.BACKWARD, microbatch))
    return row
