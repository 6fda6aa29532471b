"""The schedule that a job asks for, and the ranks that hold each of its stages."""

import dataclasses
import math
from collections.abc import Sequence

from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.messages import Stage
from ballast_policies.planning.schedules.registry import DEFAULT_STAGES_PER_RANK, SCHEDULES, build_schedule
from ballast_policies.planning.schedules.schedule import Schedule, ScheduleError

from ballast_trainer.dynamics.schedule import ChangeSteps
from ballast_trainer.errors import ConfigurationError


def is_asynchronous(name: str) -> bool:
    """True if the schedule has no flush."""
    return SCHEDULES.find(name, ScheduleError).asynchronous


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """A schedule by name, and the counts to build it for.

    Attributes:
        name: one of ``ballast_policies.planning.schedules.registry.SCHEDULES``.
        ranks: positions of the pipeline.
        microbatches: per step, of one replica of the pipeline.
        replicas: by stage, how many ranks hold it; empty: one each, or one rank trains alone.
        stages_per_rank: where the schedule leaves it open; None: the default.
    """

    name: str
    ranks: int
    microbatches: int
    replicas: tuple[int, ...] = ()
    stages_per_rank: int | None = None

    @classmethod
    def of(cls, config: JobConfig, ranks: int) -> "ScheduleRequest":
        """The layout of a configuration, over ``ranks`` positions of the pipeline."""
        pipeline = config.pipeline
        return cls(
            name=pipeline.schedule,
            ranks=ranks,
            microbatches=pipeline.microbatches // config.parallelism.data,
            replicas=() if ranks == 1 else pipeline.used_replicas,
            stages_per_rank=pipeline.stages_per_rank,
        )

    @property
    def asynchronous(self) -> bool:
        """True if the schedule has no flush."""
        return is_asynchronous(self.name)

    def one_step(self) -> Schedule:
        """The order of actions of every rank in one step; of a run of one step, where there is no flush.

        Raises:
            ConfigurationError: the counts do not suit the schedule.
        """
        return self.run_of(1) if self.asynchronous else self._built(None)

    def run_of(self, steps: int) -> Schedule:
        """The order of actions of a run of ``steps`` steps between which the pipeline does not drain.

        PipeDream updates a stage after each microbatch (of each of its replicas), 2BW after each step.

        Raises:
            ConfigurationError: the counts do not suit the schedule.
        """
        schedule = self._built(steps)
        held = [len(ranks) for ranks in schedule.stage_ranks]
        unshared = SCHEDULES.find(self.name, ScheduleError).unshared(held, self.microbatches)
        if unshared is not None:
            reason = f"{unshared}. To fix: use {math.lcm(self.microbatches, *held)}"
            raise ConfigurationError("pipeline.microbatches", reason)
        return schedule

    def _built(self, steps: int | None) -> Schedule:
        try:
            return build_schedule(
                self.name,
                ranks=self.ranks,
                microbatches=self.microbatches,
                chunks=self.stages_per_rank or DEFAULT_STAGES_PER_RANK,
                replicas=self.replicas,
                steps=steps,
            )
        except ScheduleError as error:
            field = "pipeline.replicas" if self.replicas else "pipeline.schedule"
            raise ConfigurationError(field, f"{self.name} over {self.ranks} ranks: {error}") from error

    def placement(self) -> tuple[int, ...]:
        """Each stage's first rank; one rank has one stage. Raises ConfigurationError: counts do not suit."""
        if self.ranks == 1:
            return (0,)
        if not self.replicas and SCHEDULES[self.name].microbatch_a_rank:
            unsuited = SCHEDULES[self.name].unsuited(self.ranks, self.microbatches)
            if unsuited is not None:
                reason = f"{self.name}: {unsuited}. To fix: more microbatches, or fewer ranks"
                raise ConfigurationError("pipeline.microbatches", reason)
        return tuple(holders[0] for holders in self.one_step().stage_ranks)


def holders_of(stages: Sequence[Stage], replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """All ranks that hold each stage: a stage's own, and those after it that are its replicas, if any."""
    if not replicas:
        return tuple((stage.rank,) for stage in stages)
    return tuple(
        tuple(range(stage.rank, stage.rank + count)) for stage, count in zip(stages, replicas, strict=True)
    )


LONGEST_RUN = 128
"""Steps after which the pipeline drains anyway: a run is planned and checked as a whole before it starts."""

REBALANCE_EVERY = 20
"""Steps between two decisions to rebalance where the configuration leaves them open."""


def next_drain(config: JobConfig, step: int) -> int:
    """The step before which the pipeline that starts at ``step`` must be empty."""
    ends = [config.total_steps, step + LONGEST_RUN]
    intervals = []
    if config.rebalance.enabled:
        intervals.append(config.rebalance.every_steps or REBALANCE_EVERY)
    if config.repack.enabled:
        intervals.append(config.repack.every_steps)
    if config.checkpoint.path is not None:
        intervals.append(config.checkpoint.steps)
    if config.evaluation is not None:
        intervals.append(config.evaluation.every_steps)
    ends += [(step // interval + 1) * interval for interval in intervals]
    for change in map(ChangeSteps.of, config.dynamics):
        ends += [later for later in range(step + 1, min(ends)) if change.acts_at(later)][:1]
    return min(ends)


def steps_between_drains(config: JobConfig) -> int:
    """Number of steps that share one filling and draining of the pipeline; 1 with a flush."""
    return next_drain(config, 0) if is_asynchronous(config.pipeline.schedule) else 1
