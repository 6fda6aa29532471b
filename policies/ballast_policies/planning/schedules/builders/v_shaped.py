"""Two stages a rank in the shape of a V: ZB-V with split backwards (Qi et al., section 6), and DualPipeV.

The first and the last stage share rank 0, so that a microbatch turns round without a transfer.  With
equal F, I and W ZB-V has no bubble in the steady state.  DualPipeV has forwards of one leg of the V beside
backwards of the other (DeepSeek's DualPipe, cut in half): torch's runtime may compute a forward and a
backward that stand next to each other at the same time; here, as in the simulator, one follows the other, so
predictions are on the safe side.  The orders are torch's.
"""

import dataclasses
from collections import Counter, deque

from ballast_policies.planning.schedules.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    check_counts,
    v_ranks,
)


def zero_bubble_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank: rank r holds stages r and 2p - 1 - r."""
    check_counts(ranks=ranks, microbatches=microbatches)
    # The order fills the pipeline only from 2p - 1 microbatches on: built for that many, then cut.
    rows = [_rank_order(rank, ranks, max(2 * ranks - 1, microbatches)) for rank in range(ranks)]
    return Schedule(
        name="ZeroBubbleV",
        microbatches=microbatches,
        stage_ranks=v_ranks(ranks),
        actions=tuple(tuple(a for a in row if a.microbatch < microbatches) for row in rows),
        update_every=microbatches,
    )


class _Row:
    """Actions of one rank so far; each kind of a stage takes its microbatches in order."""

    def __init__(self) -> None:
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.actions: list[Action] = []

    def add(self, stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            # A backward is whole, or begins with its inputs' half.
            counted = Kind.BACKWARD_INPUT if kind is Kind.BACKWARD else kind
            self.actions.append(Action(stage, kind, self.done[counted, stage]))
            self.done[counted, stage] += 1


def _rank_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
    row, down, up = _Row(), rank, 2 * ranks - 1 - rank
    for _ in range(2 * (ranks - rank) - 1):
        row.add(down, F)
    for _ in range(rank):
        row.add(up, F)
        row.add(down, F)
    for _ in range(ranks - rank):
        row.add(up, F, I, W)
    while row.done[F, up] < row.done[F, down] or row.done[F, down] < microbatches:
        if row.done[F, down] < microbatches:
            row.add(down, F)
        row.add(down, I, W)
        row.add(up, F, I, W)
    for _ in range(rank):
        row.add(down, I)
        row.add(up, I)
    for _ in range(ranks - rank):
        row.add(down, I, W)
    for stage in (up, down):
        while row.done[W, stage] < row.done[I, stage]:
            row.add(stage, W)
    return row.actions


def dual_pipe_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank: rank r holds stages r and 2p - 1 - r.

    Raises:
        ScheduleError: fewer microbatches than stages.
    """
    check_counts(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"{microbatches} microbatches do not fill the {2 * ranks} stages of DualPipeV. "
            f"To fix: use {2 * ranks} or more"
        )
    return Schedule(
        name="DualPipeV",
        microbatches=microbatches,
        stage_ranks=v_ranks(ranks),
        actions=tuple(tuple(_dual_rank_order(rank, ranks, microbatches)) for rank in range(ranks)),
        update_every=microbatches,
    )


def _dual_rank_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    row, down, up = _Row(), rank, 2 * ranks - 1 - rank
    owed: deque[Action] = deque()

    def backward(stage: int, *, split: bool = False) -> None:
        row.add(stage, Kind.BACKWARD_INPUT if split else Kind.BACKWARD)
        if split:
            owed.append(dataclasses.replace(row.actions[-1], kind=Kind.BACKWARD_WEIGHT))

    def weights() -> None:
        if owed:
            row.actions.append(owed.popleft())

    behind = ranks - rank - 1
    for _ in range(2 * behind):
        row.add(down, Kind.FORWARD)
    for _ in range(rank + 1):
        row.add(down, Kind.FORWARD)
        row.add(up, Kind.FORWARD)
    for _ in range(behind):
        backward(up, split=True)
        weights()
        row.add(up, Kind.FORWARD)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.add(down, Kind.FORWARD)
        backward(up)
        row.add(up, Kind.FORWARD)
        backward(down)
    for _ in range(behind):
        backward(up)
        row.add(up, Kind.FORWARD)
        backward(down)
    # The second half of the drain splits its backwards, so that the W fill the last bubbles.
    half = (rank + 1) // 2
    for turn in range(rank + 1):
        backward(up, split=turn >= half if rank % 2 else turn > half)
        backward(down, split=turn >= half)
    for _ in range(behind):
        weights()
        backward(down, split=True)
    while owed:
        weights()
    return row.actions
