"""Training with a schedule without a flush: steps overlap until the pipeline is drained.

A step is the microbatches of a batch, as elsewhere, but a rank starts the next one while the others
still compute.  After its part of a step a rank adds its figures to a sum over all ranks, which it
reads one step later, so no rank waits for another.  The pipeline drains where all ranks must be at
the same step: before layers move or change, for a checkpoint, when told to stop.  At the steps known
from the configuration it drains in any case, so that the weights do not depend
on measurements.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from ballast_trainer.layers.optimize import optimizer_step, squared_gradient_norm
from ballast_trainer.loop.state import TrainingState
from ballast_trainer.pipeline.executor.drains import next_drain
from ballast_trainer.pipeline.executor.executor import PeakUsage
from ballast_trainer.pipeline.executor.pipelines import AsynchronousPipeline
from ballast_trainer.pipeline.gradients import average_over_replicas

Agreed = TypeVar("Agreed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The end of a step on one rank.

    Attributes:
        measured: whether its seconds were measured by layer.
        seconds: since the end of the one before.
    """

    measured: bool
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Sum:
    """A sum over all ranks on its way."""

    tensor: torch.Tensor
    work: Any
    done: StepDone

    def wait(self) -> list[float]:
        if self.work is not None:
            self.work.wait()
        values: list[float] = self.tensor.tolist()
        return values


class AsynchronousRuns(Generic[Agreed]):
    """Runs of steps between two drains."""

    def __init__(
        self,
        training: TrainingState,
        *,
        figures: Callable[[float | None], list[float]],
        agree: Callable[[list[float], StepDone], Agreed],
        must_drain: Callable[[Agreed], bool],
        event: Callable[..., None],
    ) -> None:
        """Prepare.

        Args:
            training: the job.
            figures: this rank's summands after its part of a step, given its loss.
            agree: counts a step as done, given the sum of all ranks' figures.
            must_drain: whether the agreed values require all ranks at one step.
            event: prints that the pipeline has drained.
        """
        self._training = training
        self._figures, self._agree = figures, agree
        self._must_drain, self._event = must_drain, event

    def until_drained(self) -> list[Agreed]:
        """Train from the step in force to the next drain; returns the agreed values of each step.

        Raises:
            TrainerError: a stage's gradients are not finite.
            ScheduleError: more was held than the schedule plans.
        """
        training, pipeline = self._training, self._pipeline
        training.meter.sums_updates = True
        first = training.step
        steps = next_drain(training.config, first) - first
        executor = pipeline.begin(
            first, steps, batch=training.batch_of, apply_gradients=self._apply_gradients
        )
        lead = pipeline.lead(steps)
        agreed: list[Agreed] = []
        sums: deque[_Sum] = deque()
        began = time.perf_counter()
        for step in range(steps):
            if executor.ended:
                break
            measured = training.profile.wants(first + step)
            training.meter.start_step(first + step, by_layer=measured)
            training.meter.optimizer = [0.0] * training.meter.layer_count
            loss = executor.advance()
            now = time.perf_counter()
            sums.append(self._begin_sum(loss, StepDone(measured=measured, seconds=now - began)))
            began = now
            if len(sums) > 1:
                agreed.append(self._settle(sums.popleft()))
                if self._must_drain(agreed[-1]):
                    executor.end_after(step + lead)
        while sums:
            agreed.append(self._settle(sums.popleft()))
        peak_usage = executor.finish()
        pipeline.check(peak_usage, steps)
        self._print_drain(peak_usage)
        return agreed

    @property
    def _pipeline(self) -> AsynchronousPipeline:
        pipeline = self._training.pipeline
        assert isinstance(pipeline, AsynchronousPipeline)
        return pipeline

    def _begin_sum(self, loss: float | None, done: StepDone) -> _Sum:
        training = self._training
        tensor = torch.tensor(self._figures(loss), dtype=torch.float64, device=training.device)
        work = dist.all_reduce(tensor, async_op=True) if training.world.size > 1 else None
        return _Sum(tensor, work, done)

    def _settle(self, summed: _Sum) -> Agreed:
        return self._agree(summed.wait(), summed.done)

    def _apply_gradients(self, stage: int, *, step: int, microbatches: int) -> None:
        training, meter = self._training, self._training.meter
        self._pipeline.sum_over_replicas(stage)
        gradients = [p.grad for p in training.layers.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, float(microbatches))
        # Parallel pipelines make this stage's update at the same place of their equal schedules.
        average_over_replicas(training.world, training.layers)
        for dynamic in training.dynamics:
            dynamic.after_backward(training.layers)
        norm = squared_gradient_norm(training.layers.parameters())
        # Of this stage alone: non-finite gradients must not reach its weights.
        training.loss_scale.step_is_sound(norm, step=step)
        optimizer_step(
            training.layers,
            training.config.training,
            meter,
            step=step,
            total_steps=training.config.total_steps,
            squared_norm=norm,
        )
        for dynamic in training.dynamics:
            dynamic.after_optimizer(training.layers)

    def _print_drain(self, peak_usage: PeakUsage) -> None:
        in_flight: dict[int, int] = {}
        versions: dict[int, int] = {}
        for part in self._training.world.gather(peak_usage):
            in_flight.update(part.in_flight)
            versions.update(part.versions)
        self._event(
            "drain",
            versions_held=[versions[stage] for stage in sorted(versions)],
            in_flight=[in_flight[stage] for stage in sorted(in_flight)],
        )
