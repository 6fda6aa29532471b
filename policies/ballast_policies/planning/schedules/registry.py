"""The table of schedules: every name that ``pipeline.schedule`` takes."""

from collections.abc import Sequence

from ballast_policies.planning.schedules.action import ScheduleError
from ballast_policies.planning.schedules.builders.asynchronous import double_buffered, pipedream
from ballast_policies.planning.schedules.builders.dual_pipe import dual_pipe_v
from ballast_policies.planning.schedules.builders.interleaved import (
    interleaved_one_forward_one_backward,
    interleaved_zero_bubble,
)
from ballast_policies.planning.schedules.builders.synchronous import (
    gpipe,
    gpipe_replicated,
    looped_breadth_first,
    one_forward_one_backward,
    one_forward_one_backward_replicated,
)
from ballast_policies.planning.schedules.builders.v_shaped import zero_bubble_v
from ballast_policies.planning.schedules.kind import ScheduleKind
from ballast_policies.planning.schedules.schedule import Schedule, v_ranks
from ballast_policies.registry import Registry

SCHEDULES = Registry(
    "schedule",
    group="ballast.schedules",
    row_type=ScheduleKind,
    rows={
        "1F1B": ScheduleKind(
            summary="Forwards and backwards take turns (PipeDream-Flush): fewer activations in memory.",
            build=lambda ranks, microbatches, _: one_forward_one_backward(ranks, microbatches),
            microbatch_a_rank=True,
            build_replicated=one_forward_one_backward_replicated,
            closed_form=True,
        ),
        "GPipe": ScheduleKind(
            summary="All forwards, then all backwards.",
            build=lambda ranks, microbatches, _: gpipe(ranks, microbatches),
            build_replicated=gpipe_replicated,
            closed_form=True,
        ),
        "LoopedBFS": ScheduleKind(
            summary="Several stages a rank, all microbatches through one before the next.",
            build=looped_breadth_first,
            stages_per_rank=None,
        ),
        "Interleaved1F1B": ScheduleKind(
            summary="1F1B with v stages a rank: the bubble divided by v, v times the messages.",
            build=interleaved_one_forward_one_backward,
            stages_per_rank=None,
            equal_rounds=True,
        ),
        "ZeroBubbleH1": ScheduleKind(
            summary="1F1B whose weight gradients wait and fill the bubble.",
            build=lambda ranks, microbatches, _: interleaved_zero_bubble(ranks, microbatches),
            equal_rounds=True,
            splits_backward=True,
        ),
        "InterleavedZeroBubble": ScheduleKind(
            summary="Several stages a rank, and weight gradients that fill the bubble.",
            build=interleaved_zero_bubble,
            stages_per_rank=None,
            equal_rounds=True,
            splits_backward=True,
        ),
        "ZeroBubbleV": ScheduleKind(
            summary="Two stages a rank, the second on the way back, and weight gradients that fill the "
            "bubble.",
            build=lambda ranks, microbatches, _: zero_bubble_v(ranks, microbatches),
            stages_per_rank=2,
            placement=lambda ranks, _: v_ranks(ranks),
            splits_backward=True,
        ),
        "DualPipeV": ScheduleKind(
            summary="Two stages a rank in a V, forwards of one leg beside backwards of the other.",
            build=lambda ranks, microbatches, _: dual_pipe_v(ranks, microbatches),
            stages_per_rank=2,
            placement=lambda ranks, _: v_ranks(ranks),
            splits_backward=True,
            trained=False,
        ),
        "PipeDream": ScheduleKind(
            summary="No flush: a stage updates its weights after each microbatch, with gradients that are "
            "some updates late.",
            build=lambda ranks, microbatches, _: pipedream([1] * ranks, microbatches),
            asynchronous=True,
            build_replicated=pipedream,
        ),
        "PipeDreamVerticalSync": ScheduleKind(
            summary="The same, every stage as late as the first.",
            build=lambda ranks, microbatches, _: pipedream([1] * ranks, microbatches, vertical_sync=True),
            asynchronous=True,
        ),
        "PipeDream2BW": ScheduleKind(
            summary="No flush: one update a step, on every stage one update late.",
            build=lambda ranks, microbatches, _: double_buffered(ranks, microbatches, update_every=ranks),
            asynchronous=True,
            build_run=lambda ranks, microbatches, steps: double_buffered(
                ranks, steps * microbatches, update_every=microbatches
            ),
        ),
    },
)

DEFAULT_SCHEDULE = next(iter(SCHEDULES.builtin))
"""The schedule of a job that names none."""


def trained_schedules(*, asynchronous: bool | None = None) -> tuple[str, ...]:
    """Ballast's own schedules that the trainer carries out; all, or those with or without a flush."""
    return SCHEDULES.own(lambda kind: kind.trained and asynchronous in (None, kind.asynchronous))


def replicable_schedules() -> tuple[str, ...]:
    """Ballast's own schedules whose stages may be on several ranks."""
    return SCHEDULES.own(lambda kind: kind.build_replicated is not None)


def stages_of(name: str, ranks: int, chunks: int = 1) -> int:
    """How many stages the schedule cuts the model into; ``chunks`` a rank where that is open.

    Raises:
        ScheduleError: the name is unknown.
    """
    return ranks * (SCHEDULES.find(name, ScheduleError).stages_per_rank or chunks)


def build_schedule(
    name: str, *, ranks: int, microbatches: int, chunks: int = 1, replicas: Sequence[int] = ()
) -> Schedule:
    """The schedule ``name``.

    Args:
        name: one of :data:`SCHEDULES`.
        ranks: total; each stage of a replicated pipeline takes one for each of its replicas.
        microbatches: in one step, or in the whole run of a schedule without a flush.
        chunks: stages a rank, where that is open.
        replicas: by stage, how many ranks hold it; none given: one each.

    Raises:
        ScheduleError: the name is unknown, or the counts do not suit the schedule.
    """
    kind = SCHEDULES.find(name, ScheduleError)
    if not replicas:
        return kind.build(ranks, microbatches, chunks)
    if kind.build_replicated is None:
        raise ScheduleError(
            f"{name} has no replicas of a stage. To fix: use one of {', '.join(replicable_schedules())}, "
            "or no replicas"
        )
    if min(replicas) < 1 or sum(replicas) != ranks:
        raise ScheduleError(
            f"replicas {list(replicas)} need {sum(replicas)} ranks, there are {ranks}. "
            "To fix: let the replicas add up to the ranks, each at least 1"
        )
    unshared = kind.unshared(replicas, microbatches)
    if unshared is not None:
        raise ScheduleError(f"{unshared}. To fix: use a multiple of every stage's replicas")
    return kind.build_replicated(replicas, microbatches)
