"""Schedules with a flush and one or more stages a rank: GPipe, 1F1B, looped breadth first.

Interleaving, with stages of a rank p apart, divides the bubble by the chunks v (dissertation 4.2.2).  Its
zero-bubble form splits each backward into inputs (I) and weights (W); the W of a rank wait ``rank`` turns and
fill its bubbles.  With one chunk that is ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, section 2.1),
which keeps 1F1B's memory.  The orders are torch's, so that a plan checked here runs there.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil

from ballast_policies.planning.schedules.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    check_counts,
    loop_schedule,
)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: m microbatches in flight (GPipe)."""
    return gpipe_replicated([1] * ranks, microbatches)


def gpipe_replicated(replicas: Sequence[int], microbatches: int) -> Schedule:
    """GPipe with stage s on ``replicas[s]`` ranks, microbatch k on replica k mod r."""
    check_counts(stages=len(replicas), microbatches=microbatches, replicas=min(replicas, default=1))

    def order(stage: int, own: Sequence[int]) -> list[Action]:
        return [Action(stage, kind, k) for kind in (Kind.FORWARD, Kind.BACKWARD) for k in own]

    return _replicated("GPipe", replicas, microbatches, order)


def _replicated(
    name: str,
    replicas: Sequence[int],
    microbatches: int,
    order: Callable[[int, Sequence[int]], list[Action]],
) -> Schedule:
    """A schedule with a flush, by the ``order`` of a stage's actions on a replica's own microbatches."""
    stage_ranks = replica_ranks(replicas)
    return Schedule(
        name=name if max(replicas) == 1 else f"{name}-RR",
        microbatches=microbatches,
        stage_ranks=stage_ranks,
        actions=tuple(
            tuple(order(stage, range(replica, microbatches, len(holders))))
            for stage, holders in enumerate(stage_ranks)
            for replica in range(len(holders))
        ),
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

    def order(stage: int, own: Sequence[int]) -> list[Action]:
        return one_stage_order(stage, own, in_flight(replicas, stage))

    return _replicated("1F1B", replicas, microbatches, order)


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


def rounds_of(ranks: int, microbatches: int) -> int | None:
    """Number of equal rounds of at least ``ranks`` microbatches (one, if fewer in all); None: not equal."""
    rounds = max(1, microbatches // ranks)
    return None if microbatches % rounds else rounds


def interleaved_one_forward_one_backward(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over ``chunks`` stages a rank.

    Raises:
        ScheduleError: microbatches do not divide into rounds of about ``ranks``.
    """
    return _interleaved("Interleaved1F1B", ranks, microbatches, chunks, zero_bubble=False)


def interleaved_zero_bubble(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """ZB-H1 where ``chunks`` is 1, its interleaved form otherwise.

    Raises:
        ScheduleError: microbatches do not divide into rounds of about ``ranks``.
    """
    name = "ZeroBubbleH1" if chunks == 1 else "InterleavedZeroBubble"
    return _interleaved(name, ranks, microbatches, chunks, zero_bubble=True)


def _interleaved(name: str, ranks: int, microbatches: int, chunks: int, *, zero_bubble: bool) -> Schedule:
    check_counts(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rounds = rounds_of(ranks, microbatches)
    if rounds is None:
        raise ScheduleError(
            f"{microbatches} microbatches do not divide into {microbatches // ranks} rounds of about {ranks} "
            "(the ranks). "
            f"To fix: use {microbatches - microbatches % ranks} or {microbatches + -microbatches % ranks}"
        )
    rows = [
        _rank_order(rank, ranks, chunks, microbatches, microbatches // rounds, zero_bubble=zero_bubble)
        for rank in range(ranks)
    ]
    return loop_schedule(name, ranks, chunks, microbatches, rows)


def _rank_order(
    rank: int, ranks: int, chunks: int, microbatches: int, per_round: int, *, zero_bubble: bool
) -> list[Action]:
    total = chunks * microbatches
    # The last rank needs per_round forwards of all chunks but the last before its first backward;
    # each rank before it, a way there (and, without split backwards, back) more.
    warm_up = min(total, (chunks - 1) * per_round + (1 if zero_bubble else 2) * (ranks - 1 - rank))
    counts: Counter[tuple[Kind, int]] = Counter()

    def act(kind: Kind, turn: int, *, backwards: bool) -> Action:
        chunk = (turn // per_round) % chunks
        stage = (chunks - 1 - chunk if backwards else chunk) * ranks + rank
        counts[kind, stage] += 1
        return Action(stage, kind, counts[kind, stage] - 1)

    row = [act(Kind.FORWARD, turn, backwards=False) for turn in range(warm_up)]
    weights = 0
    for turn in range(total):
        if warm_up + turn < total:
            row.append(act(Kind.FORWARD, warm_up + turn, backwards=False))
        row.append(act(Kind.BACKWARD_INPUT if zero_bubble else Kind.BACKWARD, turn, backwards=True))
        if zero_bubble and turn >= rank:
            row.append(act(Kind.BACKWARD_WEIGHT, weights, backwards=True))
            weights += 1
    if zero_bubble:
        row += [act(Kind.BACKWARD_WEIGHT, turn, backwards=True) for turn in range(weights, total)]
    return row
