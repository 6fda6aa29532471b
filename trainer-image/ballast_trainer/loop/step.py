"""A step of training on one rank, and what all ranks agree on after it.

After each step all ranks sum one vector: the ranks told to stop, the newest plan that rank 0 has
seen, the loss, the gradient norm, the seconds and the activation bytes of each layer.  So all ranks
have the same values and act at the same step; rank 0 broadcasts its own decisions there.

With a schedule without a flush, steps overlap until the pipeline is drained: a step is the microbatches of a
batch, as elsewhere, but a rank starts the next one while the others still compute.  After its part of a step
a rank adds its figures to a sum over all ranks, which it reads one step later, so no rank waits for another.
The pipeline drains where all ranks must be at the same step: before layers move or change, for a checkpoint,
when told to stop.  At the steps known from the configuration it drains in any case, so that the weights do
not depend on measurements.
"""

import dataclasses
import logging
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ballast_trainer.device import peak_memory
from ballast_trainer.distributed.process_group import rows_of
from ballast_trainer.layers.optimize import squared_gradient_norm
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.loop.ending import JobEnd
from ballast_trainer.loop.plan_following import PlanFollower
from ballast_trainer.loop.progress import Progress
from ballast_trainer.loop.saving import Saver
from ballast_trainer.pipeline.executor.executor import PeakUsage
from ballast_trainer.pipeline.executor.pipelines import AsynchronousPipeline
from ballast_trainer.pipeline.gradients import buffers_at_start, squared_norm_once
from ballast_trainer.pipeline.layout import is_asynchronous, next_drain

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The values that all ranks have agreed on after a step."""

    stop: bool
    epoch: int
    loss: float
    squared_norm: float
    exchange: bool
    check_rebalance: bool
    save: bool
    written: bool
    end: bool
    probes: list[float]
    peak_flops: float
    peak_memory: int | None
    seconds: list[float]
    bytes: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class _Sum:
    """A sum over all ranks on its way, of a step that took ``seconds``, measured by layer or not."""

    own: dict[str, list[float]]
    tensor: torch.Tensor
    work: Any
    measured: bool
    seconds: float


def _buffers_of(loss: object) -> dict[str, tuple[int, int]]:
    """Versions of the loss's buffers by name, which tell if one was written; none where it is no module."""
    named = loss.named_buffers() if isinstance(loss, nn.Module) else ()
    return {name: (id(buffer), buffer._version) for name, buffer in named}


class TrainingStep:
    """Trains steps of the job."""

    def __init__(self, progress: Progress, saver: Saver, plans: PlanFollower, end: JobEnd) -> None:
        self._model, self._run, self._progress = progress.model, progress.run, progress
        self._saver, self._plans, self._end = saver, plans, end
        self._overlaps = is_asynchronous(self._model.config.pipeline.schedule)
        self._exchange_due = False
        """Some rank wants its tensor group to exchange times before the next step."""
        self._loss_buffers = _buffers_of(self._model.definition.loss)

    def train(self) -> Agreed:
        """Train a step; of a schedule without a flush, all steps until the pipeline is drained.

        Raises:
            TrainerError: gradients are not finite.
        """
        if self._overlaps:
            return self._until_drained()
        model, run, step = self._model, self._run, self._run.step
        began = time.perf_counter()
        self._apply_changes()
        model.prepare_data(step)
        measured = model.profile.wants(step)
        model.meter.start_step(step, by_layer=measured)
        stragglers = model.straggler_mitigation
        stragglers.begin_step(
            step,
            model.layers,
            model.world.tensor,
            microbatches=model.microbatches,
            exchange=self._exchange_due,
        )
        CURRENT_FORWARD.loss_scale = run.loss_scale.value
        buffers = buffers_at_start(model.world, model.layers, model.microbatches)
        loss = model.train_pipeline(step)
        if buffers is not None:
            buffers.merge(model.world.data.all_gather)
        stragglers.finish_step(model.meter.busy_seconds())
        model.complete_gradients()
        agreed = self._agreed(model.world.sum_rows(self._figures(loss, step)))
        self._exchange_due = agreed.exchange
        if stragglers.changed:
            self._progress.event("workload", **stragglers.as_json())
        loss_scale = run.loss_scale.value
        if run.loss_scale.step_is_sound(agreed.squared_norm, step=step):
            self._saver.wait_for_copy()
            model.optimizer_step(step, agreed.squared_norm, loss_scale)
        else:
            model.skip_update()
        self._count(agreed, measured, time.perf_counter() - began)
        return agreed

    def _apply_changes(self) -> None:
        model, step = self._model, self._run.step
        changed = [d for d in model.dynamics if d.apply(step, model.layers, model.world)]
        if any(dynamic.needs_rebuild for dynamic in changed):
            model.rebuild(step)
        if changed:
            model.profile.forget()

    def _count(self, agreed: Agreed, measured: bool, seconds: float) -> None:
        model = self._model
        if measured:
            model.profile.add(agreed.seconds, agreed.bytes, step=self._run.step)
            model.rank_speeds.add(agreed.probes)
        self._tell_loss_that_learns()
        if model.untried is not None:
            model.untried.tell_changed()
            model.untried = None
        self._run.step += 1
        self._progress.step_done(agreed.loss, seconds, agreed.peak_flops, agreed.peak_memory)
        self._plans.monitor.step_done()

    def _tell_loss_that_learns(self) -> None:
        """Warn, once, of a loss whose forward changes its buffers: only those of layers travel."""
        now, before = _buffers_of(self._model.definition.loss), self._loss_buffers
        changed = [name for name, state in now.items() if state != before.get(name)]
        if changed and before:
            logger.warning(
                "the loss (%s) changes %s as it runs, which neither moves nor is saved: another loss after a "
                "move or a restart. To fix: let the last layer have it, as a buffer",
                type(self._model.definition.loss).__name__,
                ", ".join(changed),
            )
            self._loss_buffers = {}

    def _figures(self, loss: float | None, step: int) -> dict[str, list[float]]:
        """This rank's summands of ``step``; ``loss`` is its part of the step's, None where it has none."""
        model = self._model
        # Every rank of a column of the mesh has the stage's loss and seconds: together they count once.
        share = 1 / model.world.mesh.column
        meter, timed = model.meter, 3 * model.definition.layer_count
        layers = model.world.tensor.largest(meter.seconds() + meter.bytes, model.device)
        seconds, kept = layers[:timed], layers[timed:]
        copies, memory = model.copies, [0.0] * model.world.size
        memory[model.world.rank] = float(peak_memory(model.device))
        return {
            "stop": [float(self._saver.stop_votes())],
            "epoch": [float(self._plans.newest_epoch())],
            "loss": [share * loss if loss is not None else 0.0],
            "squared_norm": [squared_norm_once(model.world, model.layers) / copies],
            "exchange": [float(model.straggler_mitigation.wants_exchange)],
            "check_rebalance": [float(self._plans.monitor.due())],
            "peak_flops": [self._progress.own_peak_flops],
            "memory": memory,
            "save": [float(self._saver.wanted())],
            "end": [float(self._end.requested)],
            "written": [float(self._saver.written)],
            "targets": model.batches.compared(step),
            "probes": model.probe_seconds(),
            "seconds": [share * second for second in seconds],
            # Copies of a layer keep equal bytes each, and share the seconds.
            "bytes": [share / copies * count for count in kept],
        }

    def _agreed(self, summed: dict[str, list[float]]) -> Agreed:
        """Figures of all ranks from their sums. Raises DataError: their targets differ."""
        model = self._model
        model.batches.refuse_other_targets(summed["targets"], self._run.step)
        one = {name: row[0] for name, row in summed.items() if row}
        return Agreed(
            stop=one["stop"] >= model.world.size,
            epoch=round(one["epoch"]),
            loss=one["loss"] / self._run.loss_scale.value,
            squared_norm=one["squared_norm"],
            exchange=one["exchange"] > 0,
            check_rebalance=one["check_rebalance"] > 0,
            peak_flops=one["peak_flops"],
            peak_memory=round(max(summed["memory"])) or None,
            save=one["save"] > 0,
            end=one["end"] > 0,
            written=one["written"] >= model.world.size,
            probes=summed["probes"],
            seconds=summed["seconds"],
            bytes=summed["bytes"],
        )

    def _until_drained(self) -> Agreed:
        """Train from the step in force to the next drain.

        Raises:
            TrainerError: a stage's gradients are not finite.
            ScheduleError: more was held than the schedule plans.
        """
        self._apply_changes()
        model, pipeline = self._model, self._pipeline
        model.meter.sums_updates = True
        first = self._run.step
        steps = next_drain(model.config, first) - first
        executor = pipeline.begin(first, steps, batch=model.batch, apply_gradients=self._apply_gradients)
        lead = pipeline.lead(steps)
        agreed: list[Agreed] = []
        sums: deque[_Sum] = deque()
        began = time.perf_counter()
        for step in range(steps):
            if executor.ended:
                break
            measured = model.profile.wants(first + step)
            model.meter.start_step(first + step, by_layer=measured)
            model.meter.optimizer = [0.0] * model.meter.layer_count
            loss = executor.advance()
            now = time.perf_counter()
            sums.append(self._begin_sum(loss, first + step, measured, now - began))
            began = now
            if len(sums) > 1:
                agreed.append(self._settle(sums.popleft()))
                if agreed[-1].stop or agreed[-1].end or self._plans.is_news(agreed[-1].epoch):
                    executor.end_after(step + lead)
        while sums:
            agreed.append(self._settle(sums.popleft()))
        peak_usage = executor.finish()
        pipeline.check(peak_usage, steps)
        self._print_drain(peak_usage)
        stop, epoch = any(one.stop for one in agreed), max(one.epoch for one in agreed)
        return dataclasses.replace(agreed[-1], stop=stop, epoch=epoch)

    @property
    def _pipeline(self) -> AsynchronousPipeline:
        pipeline = self._model.pipeline
        assert isinstance(pipeline, AsynchronousPipeline)
        return pipeline

    def _begin_sum(self, loss: float | None, step: int, measured: bool, seconds: float) -> _Sum:
        own = self._figures(loss, step)
        values = [value for row in own.values() for value in row]
        tensor = torch.tensor(values, dtype=torch.float64, device=self._model.device)
        work = dist.all_reduce(tensor, async_op=True) if self._model.world.size > 1 else None
        return _Sum(own, tensor, work, measured, seconds)

    def _settle(self, summed: _Sum) -> Agreed:
        """Count a step after which all ranks have already continued."""
        if summed.work is not None:
            summed.work.wait()
        agreed = self._agreed(rows_of(summed.tensor.tolist(), summed.own))
        self._count(agreed, summed.measured, summed.seconds)
        return agreed

    def _apply_gradients(self, stage: int, *, step: int, replicas: int) -> None:
        model = self._model
        self._pipeline.sum_over_replicas(stage)
        gradients = [p.grad for p in model.layers.parameters() if p.grad is not None]
        if gradients and replicas > 1:
            torch._foreach_div_(gradients, float(replicas))
        # Parallel pipelines make this stage's update at the same place of their equal schedules.
        model.complete_gradients()
        norm = squared_gradient_norm(model.layers.parameters())
        # Of this stage alone: non-finite gradients must not reach its weights.
        self._run.loss_scale.step_is_sound(norm, step=step)
        model.optimizer_step(step, norm)

    def _print_drain(self, peak_usage: PeakUsage) -> None:
        in_flight: dict[int, int] = {}
        versions: dict[int, int] = {}
        for part in self._model.world.gather(peak_usage):
            in_flight.update(part.in_flight)
            versions.update(part.versions)
        self._progress.event(
            "drain",
            versions_held=[versions[stage] for stage in sorted(versions)],
            in_flight=[in_flight[stage] for stage in sorted(in_flight)],
        )
