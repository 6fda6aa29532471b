"""A row of the table of schedules: builder, stages and requirements of one schedule."""

import dataclasses
from collections.abc import Callable, Sequence

from ballast_policies.planning.schedules.builders.interleaved import rounds_of
from ballast_policies.planning.schedules.schedule import Schedule, loop_ranks

DEFAULT_STAGES_PER_RANK = 2
"""Where the schedule leaves the stages a rank open and ``pipeline.stagesPerRank`` is absent."""


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
        """Whether there are enough microbatches, and they divide over the ranks as the schedule needs it."""
        return self.unsuited(ranks, microbatches) is None

    def unsuited(self, ranks: int, microbatches: int) -> str | None:
        """Why a pipeline of ``ranks`` cannot take so many microbatches; None: it can."""
        if ranks == 1:
            return None
        if self.microbatch_a_rank and microbatches < ranks:
            return f"{microbatches} microbatches a pipeline are fewer than its {ranks} ranks"
        if self.equal_rounds and rounds_of(ranks, microbatches) is None:
            return f"{microbatches} microbatches a pipeline do not divide into rounds of its {ranks} ranks"
        return None

    def unshared(self, replicas: Sequence[int], microbatches: int) -> str | None:
        """Why the replicas of some stage cannot share the microbatches of a step; None: they can.

        Each needs one at least; without a flush an update takes one of each replica.
        """
        if max(replicas, default=1) > microbatches:
            return f"a stage's {max(replicas)} replicas are more than the microbatches, {microbatches}"
        uneven = [count for count in replicas if microbatches % count]
        if self.asynchronous and uneven:
            return f"{microbatches} microbatches do not divide over {uneven[0]} replicas of a stage"
        return None

    def stage_ranks(self, ranks: int, asked: int | None = None) -> tuple[int, ...]:
        """By stage, the first of its ranks; a rank alone has the whole model as one stage."""
        if ranks == 1:
            return (0,)
        return tuple(holders[0] for holders in self.placement(ranks, self.stages_on_a_rank(asked)))
