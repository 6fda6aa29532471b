"""Pipelines that use the executor: replicas of stages with a flush, and schedules without one."""

from collections.abc import Callable

from ballast_policies.planning.schedules.schedule import Schedule, ScheduleError
from ballast_policies.planning.schedules.validate import ScheduleFacts, validate

from ballast_trainer.data.collate import Batch
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.buffers import StepBuffers
from ballast_trainer.pipeline.executor.executor import ApplyGradients, Executor, PeakUsage
from ballast_trainer.pipeline.executor.order import RankOrder
from ballast_trainer.pipeline.gradients import GradientBuckets


class ExecutedPipeline:
    """A schedule with a flush: gradients of a whole step are left in the parameters."""

    def __init__(self, executor: Executor, flush: RankOrder, replicas: Axis) -> None:
        """Prepare for the schedule of one step (``flush``); ``replicas``: of this rank's stages."""
        self._executor, self._flush, self._replicas = executor, flush, replicas

    def run(self, batch: Callable[[], Batch]) -> float | None:
        """Forward and backward of a whole batch; gradients are left in the parameters.

        Args:
            batch: reads inputs and targets; called on ranks of the first and the last stage.

        Returns:
            On a rank of the last stage its replica's part of the mean loss; the parts add up to it.
        """
        executor, stacks = self._executor, self._executor.stacks
        buffers, parts = None, self._replicas.size
        if parts > 1:
            held = (layer for stack in stacks.values() for layer in stack.held)
            modules = (module for layer in held for module in layer.stateful)
            buffers = StepBuffers(
                modules, [range(of, self._flush.microbatches, parts) for of in range(parts)]
            )
        executor.begin(self._flush, executor.meter.step, lambda step: batch())
        loss = executor.advance()
        executor.finish()
        for stage in stacks:
            self.sum_over_replicas(stage)
        if buffers is not None:
            buffers.merge(self._replicas.all_gather)
        return loss

    def sum_over_replicas(self, stage: int) -> None:
        """Sum the gradients of a stage over its replicas; collective over them."""
        GradientBuckets(self._replicas, self._executor.stacks[stage].held).finish()


class AsynchronousPipeline(ExecutedPipeline):
    """A schedule without a flush: the steps of a run overlap.

    :meth:`run` computes one step with a flush, for profiles.
    """

    def __init__(
        self,
        executor: Executor,
        flush: RankOrder,
        replicas: Axis,
        schedule_of_run: Callable[[int], Schedule],
    ) -> None:
        """Prepare; ``schedule_of_run`` is given its number of steps, the rest is as of its base class."""
        super().__init__(executor, flush, replicas)
        self._schedule_of_run = schedule_of_run
        self._orders: dict[int, tuple[RankOrder, ScheduleFacts]] = {}

    def begin(
        self, first_step: int, steps: int, *, batch: Callable[[int], Batch], apply_gradients: ApplyGradients
    ) -> Executor:
        """Start a run of ``steps`` steps; the caller advances it to its end and finishes it.

        ``apply_gradients`` is called for each update, with this rank's gradients in place.

        Raises:
            ConfigurationError: the counts do not suit the schedule.
        """
        if steps not in self._orders:
            order = RankOrder(self._schedule_of_run(steps), self._flush.rank, steps)
            self._orders[steps] = order, validate(order.schedule)
        self._executor.begin(self._orders[steps][0], first_step, batch, apply_gradients)
        return self._executor

    def check(self, peak_usage: PeakUsage, steps: int) -> None:
        """Compare the peak usage of a run of ``steps`` with that of its schedule.

        Raises:
            ScheduleError: more versions or microbatches were held than planned for.
        """
        facts = self._orders[steps][1]
        for name, found, planned in (
            ("microbatches in flight", peak_usage.in_flight, facts.stage_in_flight),
            ("versions of its weights", peak_usage.versions, facts.versions_held),
        ):
            for stage, count in found.items():
                if count > planned[stage]:
                    raise ScheduleError(
                        f"stage {stage} held {count} {name}, the schedule plans {planned[stage]}"
                    )

    def lead(self, steps: int) -> int:
        """Steps past the one that it finishes that a rank may have begun, in a run of ``steps``."""
        return self._orders[steps][0].lead
