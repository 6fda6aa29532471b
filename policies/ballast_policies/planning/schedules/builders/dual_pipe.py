"""DualPipeV: forwards of one leg of the V beside backwards of the other (DeepSeek's DualPipe, cut in half).

torch's runtime may compute a forward and a backward that stand next to each other at the same time;
here, as in the simulator, one follows the other, so predictions are on the safe side.  The order is
torch's.
"""

from collections import deque

from ballast_policies.planning.schedules.action import Action, Kind, ScheduleError
from ballast_policies.planning.schedules.schedule import Schedule, check_counts, v_ranks


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
        actions=tuple(tuple(_rank_order(rank, ranks, microbatches)) for rank in range(ranks)),
        update_every=microbatches,
    )


class _Row:
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


def _rank_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    row, down, up = _Row(), rank, 2 * ranks - 1 - rank
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
