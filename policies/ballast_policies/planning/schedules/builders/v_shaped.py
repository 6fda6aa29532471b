"""ZB-V: two stages a rank in the shape of a V, with split backwards (Qi et al., section 6).

The first and the last stage share rank 0, so that a microbatch turns round without a transfer.  With
equal F, I and W there is no bubble in the steady state.  The order is torch's ZBVZeroBubble.
"""

from ballast_policies.planning.schedules.action import Action, Kind
from ballast_policies.planning.schedules.schedule import Schedule, check_counts, v_ranks


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
