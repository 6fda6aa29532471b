"""The table of schedules: every name that ``pipeline.schedule`` takes."""

import dataclasses
from collections.abc import Callable, Sequence

from ballast_policies.planning.schedules.builders.asynchronous import double_buffered, pipedream
from ballast_policies.planning.schedules.builders.synchronous import (
    gpipe,
    gpipe_replicated,
    interleaved_one_forward_one_backward,
    interleaved_zero_bubble,
    looped_breadth_first,
    one_forward_one_backward,
    one_forward_one_backward_replicated,
    rounds_of,
)
from ballast_policies.planning.schedules.builders.v_shaped import dual_pipe_v, zero_bubble_v
from ballast_policies.planning.schedules.schedule import Schedule, ScheduleError, loop_ranks, v_ranks
from ballast_policies.registry import Registry

DEFAULT_STAGES_PER_RANK = 2
"""Stages a rank where the schedule leaves them open and ``pipeline.stagesPerRank`` is absent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """The properties of a schedule; operator, trainer, command lines and docs read it here.

    Attributes:
        summary: one sentence for the documentation.
        build: (ranks, microbatches, stages a rank) -> the order of one step; of a run of one step where
            it is asynchronous. The stages a rank count only where they are open.
        stages_per_rank: stages of the model on each rank; None: set by ``pipeline.stagesPerRank``.
        placement: (ranks, stages a rank) -> by stage, the ranks that hold it.
        asynchronous: it has no flush: steps flow into one another, each stage updates its weights on its
            own, and no stage knows the gradient's norm over all of them.
        equal_rounds: microbatches go in equal rounds, each of at least the number of ranks.
        microbatch_a_rank: it is carried out with at least as many microbatches as ranks.
        splits_backward: the gradients of weights are computed apart from those of inputs.
        build_replicated: (replicas of each stage, microbatches) -> order; None: a stage has one rank.
        build_run: asynchronous only: (ranks, microbatches of a step, steps) -> the order of a run; None:
            that of ``build`` with the microbatches of all steps.
        closed_form: ``predict_step_seconds`` gives its step time without a simulation.
        trained: the trainer carries it out; otherwise it is planned and simulated only.
    """

    summary: str
    build: Callable[[int, int, int], Schedule]
    stages_per_rank: int | None = 1
    placement: Callable[[int, int], tuple[tuple[int, ...], ...]] = loop_ranks
    asynchronous: bool = False
    equal_rounds: bool = False
    microbatch_a_rank: bool = False
    splits_backward: bool = False
    build_replicated: Callable[[Sequence[int], int], Schedule] | None = None
    build_run: Callable[[int, int, int], Schedule] | None = None
    closed_form: bool = False
    trained: bool = True

    def stages_on_a_rank(self, asked: int | None = None) -> int:
        """Stages a rank: the schedule's own number, else ``asked``, else the default."""
        return self.stages_per_rank or asked or DEFAULT_STAGES_PER_RANK

    def suits(self, ranks: int, microbatches: int) -> bool:
        """True if there are enough microbatches, and they divide over the ranks as the schedule needs it."""
        return self.unsuited(ranks, microbatches) is None

    def unsuited(self, ranks: int, microbatches: int) -> str | None:
        """Reason that a pipeline of ``ranks`` cannot take so many microbatches; None: it can."""
        if ranks == 1:
            return None
        if self.microbatch_a_rank and microbatches < ranks:
            return f"{microbatches} microbatches a pipeline are fewer than its {ranks} ranks"
        if self.equal_rounds and rounds_of(ranks, microbatches) is None:
            return f"{microbatches} microbatches a pipeline do not divide into rounds of its {ranks} ranks"
        return None

    def unshared(self, replicas: Sequence[int], microbatches: int) -> str | None:
        """Reason that the replicas of some stage cannot share the microbatches of a step; None: they can.

        Each needs one at least; without a flush an update takes one of each replica.
        """
        if max(replicas, default=1) > microbatches:
            return f"a stage's {max(replicas)} replicas are more than the microbatches, {microbatches}"
        uneven = [count for count in replicas if microbatches % count]
        if self.asynchronous and uneven:
            return f"{microbatches} microbatches do not divide over {uneven[0]} replicas of a stage"
        return None

    def stage_ranks(self, ranks: int, asked: int | None = None) -> tuple[int, ...]:
        """First rank of each stage; a rank alone has the whole model as one stage."""
        if ranks == 1:
            return (0,)
        return tuple(holders[0] for holders in self.placement(ranks, self.stages_on_a_rank(asked)))


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
    """Number of stages of the schedule; ``chunks`` a rank where that is open.

    Raises:
        ScheduleError: the name is unknown.
    """
    return ranks * (SCHEDULES.find(name, ScheduleError).stages_per_rank or chunks)


def build_schedule(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    replicas: Sequence[int] = (),
    steps: int | None = None,
) -> Schedule:
    """The schedule ``name``.

    Args:
        name: one of :data:`SCHEDULES`.
        ranks: total; each stage of a replicated pipeline takes one for each of its replicas.
        microbatches: in one step, or in the whole run of a schedule without a flush.
        chunks: stages a rank, where that is open.
        replicas: by stage, how many ranks hold it; none given: one each.
        steps: of a run without a flush, each of which has as many microbatches; None: they are the whole run.

    Raises:
        ScheduleError: the name is unknown, or the counts do not suit the schedule.
    """
    kind = SCHEDULES.find(name, ScheduleError)
    if steps is not None and kind.build_run is not None and not replicas:
        return kind.build_run(ranks, microbatches, steps)
    microbatches *= steps or 1
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
