"""Interleaved 1F1B and its zero-bubble form: several stages a rank, p apart.

Interleaving divides the bubble by the chunks v (dissertation 4.2.2).  The zero-bubble form splits
each backward into inputs (I) and weights (W); the W of a rank wait ``rank`` turns and fill its
bubbles.  With one chunk that is ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, section 2.1),
which keeps 1F1B's memory.  The orders are torch's, so that a plan checked here runs there.
"""

from collections import Counter

from ballast_policies.planning.schedules.action import Action, Kind, ScheduleError
from ballast_policies.planning.schedules.schedule import Schedule, check_counts, loop_schedule


def rounds_of(ranks: int, microbatches: int) -> int | None:
    """How many equal rounds of at least ``ranks`` the microbatches make (one, if fewer); None: none."""
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
