"""Two stages a rank in the shape of a V: ZB-V with split backwards (Qi et al., section 6), and DualPipeV.

The first and the last stage share rank 0, so that a microbatch turns round without a transfer.  With
equal F, I and W ZB-V has no bubble in the steady state.  DualPipeV has forwards of one leg of the V beside
backwards of the other (DeepSeek's DualPipe, cut in half): torch's runtime may compute a forward and a
backward that stand next to each other at the same time; here, as in the simulator, one follows the other, so
predictions are on the safe side.  The orders are torch's.
"""

from collections import deque

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

    def __init__(self, down: int, up: int) -> None:
        self.stages = (down, up)
        self.counts = {(kind, stage): 0 for kind in Kind for stage in self.stages}
        self.actions: list[Action] = []

    def add(self, leg: int, *kinds: Kind) -> None:
        stage = self.stages[leg]
        for kind in kinds:
            self.actions.append(Action(stage, kind, self.counts[kind, stage]))
            self.counts[kind, stage] += 1

    def done(self, leg: int, kind: Kind) -> int:
        return self.counts[kind, self.stages[leg]]


def _rank_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
    down, up = 0, 1
    row = _Row(rank, 2 * ranks - 1 - rank)
    for _ in range(2 * (ranks - rank) - 1):
        row.add(down, F)
    for _ in range(rank):
        row.add(up, F)
        row.add(down, F)
    for _ in range(ranks - rank):
        row.add(up, F, I, W)
    while row.done(up, F) < row.done(down, F) or row.done(down, F) < microbatches:
        if row.done(down, F) < microbatches:
            row.add(down, F)
        row.add(down, I, W)
        row.add(up, F, I, W)
    for _ in range(rank):
        row.add(down, I)
        row.add(up, I)
    for _ in range(ranks - rank):
        row.add(down, I, W)
    for leg in (up, down):
        while row.done(leg, W) < row.done(leg, I):
            row.add(leg, W)
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


class _DualRow:
    """Actions of one rank so far, and the weight gradients still to compute."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.forwards: dict[int, int] = {}
        self.backwards: dict[int, int] = {}
        self.owed: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        done = self.forwards[stage] = self.forwards.get(stage, 0) + 1
        self.actions.append(Action(stage, Kind.FORWARD, done - 1))

    def backward(self, stage: int, *, split: bool = False) -> None:
        done = self.backwards[stage] = self.backwards.get(stage, 0) + 1
        self.actions.append(Action(stage, Kind.BACKWARD_INPUT if split else Kind.BACKWARD, done - 1))
        if split:
            self.owed.append(Action(stage, Kind.BACKWARD_WEIGHT, done - 1))

    def weights(self) -> None:
        if self.owed:
            self.actions.append(self.owed.popleft())


def _dual_rank_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    row, down, up = _DualRow(), rank, 2 * ranks - 1 - rank
    behind = ranks - rank - 1
    for _ in range(2 * behind):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(behind):
        row.backward(up, split=True)
        row.weights()
        row.forward(up)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.forward(down)
        row.backward(up)
        row.forward(up)
        row.backward(down)
    for _ in range(behind):
        row.backward(up)
        row.forward(up)
        row.backward(down)
    # The second half of the drain splits its backwards, so that the W fill the last bubbles.
    half = (rank + 1) // 2
    for turn in range(rank + 1):
        row.backward(up, split=turn >= half if rank % 2 else turn > half)
        row.backward(down, split=turn >= half)
    for _ in range(behind):
        row.weights()
        row.backward(down, split=True)
    while row.owed:
        row.weights()
    return row.actions
