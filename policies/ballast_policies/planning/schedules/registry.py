"""Schedules by the names that ``pipeline.schedule`` takes."""

from collections.abc import Callable, Sequence

from ballast_policies.planning.schedules.action import ScheduleError
from ballast_policies.planning.schedules.asynchronous import double_buffered, pipedream
from ballast_policies.planning.schedules.dual_pipe import dual_pipe_v
from ballast_policies.planning.schedules.interleaved import (
    interleaved_one_forward_one_backward,
    interleaved_zero_bubble,
)
from ballast_policies.planning.schedules.schedule import Schedule
from ballast_policies.planning.schedules.synchronous import (
    gpipe,
    gpipe_replicated,
    looped_breadth_first,
    one_forward_one_backward,
    one_forward_one_backward_replicated,
)
from ballast_policies.planning.schedules.v_shaped import zero_bubble_v

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "1F1B": lambda ranks, microbatches, chunks: one_forward_one_backward(ranks, microbatches),
    "GPipe": lambda ranks, microbatches, chunks: gpipe(ranks, microbatches),
    "LoopedBFS": looped_breadth_first,
    "Interleaved1F1B": interleaved_one_forward_one_backward,
    "ZeroBubbleH1": lambda ranks, microbatches, chunks: interleaved_zero_bubble(ranks, microbatches),
    "InterleavedZeroBubble": interleaved_zero_bubble,
    "ZeroBubbleV": lambda ranks, microbatches, chunks: zero_bubble_v(ranks, microbatches),
    "DualPipeV": lambda ranks, microbatches, chunks: dual_pipe_v(ranks, microbatches),
    "PipeDream": lambda ranks, microbatches, chunks: pipedream([1] * ranks, microbatches),
    "PipeDreamVerticalSync": lambda ranks, microbatches, chunks: pipedream(
        [1] * ranks, microbatches, vertical_sync=True
    ),
    "PipeDream2BW": lambda ranks, microbatches, chunks: double_buffered(
        ranks, microbatches, update_every=ranks
    ),
}
"""Name -> builder of (ranks, microbatches, chunks); chunks count where a rank may hold several stages."""

REPLICATED: dict[str, Callable[[Sequence[int], int], Schedule]] = {
    "1F1B": one_forward_one_backward_replicated,
    "GPipe": gpipe_replicated,
    "PipeDream": pipedream,
}
"""Name -> builder of (replicas of each stage, microbatches), where a stage may be on several ranks."""

CHUNKS_OF = {"ZeroBubbleV": 2, "DualPipeV": 2}
"""Stages a rank, where the schedule fixes them."""

TAKES_CHUNKS = frozenset({"LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"})
"""Schedules whose stages a rank are free."""


def stages_of(name: str, ranks: int, chunks: int = 1) -> int:
    """How many stages the schedule cuts the model into.

    Raises:
        ScheduleError: the name is unknown.
    """
    _check_name(name)
    return ranks * CHUNKS_OF.get(name, chunks if name in TAKES_CHUNKS else 1)


def build_schedule(
    name: str, *, ranks: int, microbatches: int, chunks: int = 1, replicas: Sequence[int] = ()
) -> Schedule:
    """The schedule ``name``.

    Args:
        name: one of :data:`SCHEDULES`.
        ranks: all of them; each stage of a replicated pipeline takes as many as it has replicas.
        microbatches: in one step, or in the whole run of a schedule without a flush.
        chunks: stages a rank, where that is free.
        replicas: by stage, how many ranks hold it; none given: one each.

    Raises:
        ScheduleError: the name is unknown, or the counts do not suit the schedule.
    """
    _check_name(name)
    if not replicas:
        return SCHEDULES[name](ranks, microbatches, chunks)
    if name not in REPLICATED:
        raise ScheduleError(
            f"{name} knows no replicas of a stage. To fix: use one of {', '.join(REPLICATED)}, or no replicas"
        )
    if min(replicas) < 1 or sum(replicas) != ranks:
        raise ScheduleError(
            f"replicas {list(replicas)} need {sum(replicas)} ranks, there are {ranks}. "
            "To fix: let the replicas add up to the ranks, each at least 1"
        )
    uneven = [count for count in replicas if microbatches % count]
    if uneven:
        raise ScheduleError(
            f"{microbatches} microbatches do not divide over {uneven[0]} replicas of a stage. "
            "To fix: use a multiple of every stage's replicas"
        )
    return REPLICATED[name](replicas, microbatches)


def _check_name(name: str) -> None:
    if name not in SCHEDULES:
        raise ScheduleError(f"{name!r} is not a schedule. To fix: use one of {', '.join(SCHEDULES)}")
