"""The job's figures for rank 0's reports and step lines."""

import logging
import math
import time
from collections import deque
from typing import Any

from ballast_policies.contract import Report, Stage
from ballast_policies.planning import imbalance

from ballast_trainer.loop.idle import IdleSeconds, idle_seconds
from ballast_trainer.loop.memory import LayerSizes
from ballast_trainer.loop.replanning import best_step_seconds, layer_sizes
from ballast_trainer.loop.state import TrainingState
from ballast_trainer.models.flops import peak_flops as gpu_peak_flops
from ballast_trainer.models.flops import step_flops
from ballast_trainer.profiling.profile import LayerCosts

logger = logging.getLogger(__name__)

_MEASURED_STEPS = 3
"""Steps measured before a figure of them counts."""
_SPLIT_EVERY = 64
"""Steps after which idle time is split again; in between only where the partition has changed."""


def stages_as_json(stages: tuple[Stage, ...]) -> list[dict[str, int]]:
    """Stages with the keys they have in the plan."""
    return [{"rank": s.rank, "firstLayer": s.first_layer, "endLayer": s.end_layer} for s in stages]


class ProgressTracker:
    """Figures of the running job; the same on every rank, reported by rank 0."""

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self._done: deque[tuple[float, int]] = deque(maxlen=16)
        self._step_seconds: deque[float] = deque(maxlen=8)
        self._costs: LayerCosts | None = None
        # Infinitely negative where unknown, so that the sum over ranks is, too.
        self.own_peak_flops = gpu_peak_flops(training.device, training.config.training.precision) or -math.inf
        self._step_flops: float | None = None
        self._flops_counted = False
        self._idle: tuple[tuple[Stage, ...], IdleSeconds] | None = None
        self.sizes: LayerSizes | None = None
        self._bytes: tuple[int, ...] = ()
        self._weight_bytes: tuple[int, ...] = ()
        self._activation_bytes: tuple[int, ...] | None = None
        self._passing_bytes: tuple[tuple[int, ...], ...] = ((), (), ())
        self._loss: float | None = None
        self._finite_loss = True
        self._rebalances = 0
        self._last_rebalance_step: int | None = None
        self._imbalance_before: float | None = None
        self._imbalance_after: float | None = None
        self._rebalance_pause_ms: float | None = None
        self._checkpoint_seconds: tuple[float, float] | None = None
        self._checkpoint_every_steps: int | None = None
        self.move_seconds: float | None = None
        self.look_seconds = 0.0
        self.reference_step_seconds: float | None = None
        self.resumed_from_step: int | None = None
        self._validation: tuple[int, float] | None = None
        self._told_bad: set[int] = set()
        self._part_of_peak: float | None = None
        self._began = time.monotonic()
        self._trained_seconds = 0.0

    def timing(self) -> tuple[float, float]:
        """When the job began, by the monotonic clock, and the seconds since in which steps ran."""
        return self._began, self._trained_seconds

    def continue_timing(self, began: float, trained_seconds: float) -> None:
        """Count on from :meth:`timing` of before: steps that are done again do not count twice."""
        self._began, self._trained_seconds = began, trained_seconds

    def gather_bytes(self) -> None:
        """Gather the bytes of all layers; collective."""
        self.sizes = sizes = layer_sizes(self._training)
        self._bytes, self._weight_bytes = sizes.bytes, sizes.weight_bytes

    def new_bad_samples(self) -> dict[int, str]:
        """Those left out that this has not returned before, and why."""
        known = self._training.bad_samples
        new = {number: error for number, error in known.items() if number not in self._told_bad}
        self._told_bad.update(new)
        return new

    def step_done(self, loss: float, seconds: float, peak_flops: float) -> dict[str, Any]:
        """Count a step; returns the fields of its line.

        Args:
            loss: of the step.
            seconds: it took.
            peak_flops: operations/s of all ranks by their data sheets; infinitely negative: unknown.
        """
        training = self._training
        self._loss = self._finite(loss)
        self._done.append((time.monotonic(), training.step))
        self._step_seconds.append(seconds)
        self._trained_seconds += seconds
        self._costs = training.profile.costs() or self._costs
        self._activation_bytes = training.profile.activation_bytes() or self._activation_bytes
        self._passing_bytes = training.profile.passing_bytes() or self._passing_bytes
        if self.reference_step_seconds is None and len(training.profile) >= _MEASURED_STEPS:
            costs = training.profile.costs()
            assert costs is not None
            self.reference_step_seconds = best_step_seconds(training, costs)
        awaited = self._last_rebalance_step is not None and self._imbalance_after is None
        if awaited and len(training.profile) >= _MEASURED_STEPS:
            self._imbalance_after = self.imbalance()
        fields: dict[str, Any] = {
            "step": training.step,
            "loss": loss,
            "step_seconds": seconds,
            "stages": stages_as_json(training.stages),
            "epoch": training.plan.epoch,
            "imbalance": self.imbalance(),
            "bubble": self.bubble(),
            **self._explained(),
            **self._achieved(peak_flops),
            "goodput": self.goodput(),
        }
        if training.speed is not None:
            fields["emulated"] = training.speed.factor
        return fields

    def goodput(self) -> float | None:
        """Part of the time since this launch began in which steps ran."""
        passed = time.monotonic() - self._began
        return min(1.0, self._trained_seconds / passed) if self._trained_seconds and passed > 0 else None

    def _finite(self, loss: float) -> float | None:
        """The loss for reports; None where it is not finite, of which the first step of several warns."""
        training, was = self._training, self._finite_loss
        self._finite_loss = math.isfinite(loss)
        if was and not self._finite_loss and training.world.rank == 0:
            logger.warning(
                "the loss of step %d is %s; its gradients are finite, so training continues. To fix: targets "
                "that count in every microbatch (not all of them ignored), or a loss that is finite without",
                training.step,
                loss,
            )
        return loss if self._finite_loss else None

    @property
    def costs(self) -> LayerCosts | None:
        """The newest measured costs of the layers, also right after they were reset."""
        return self._training.profile.costs() or self._costs

    def step_seconds(self) -> tuple[float, ...]:
        """Wall seconds of the last steps under the partition in force."""
        return tuple(self._step_seconds)

    def imbalance(self) -> float:
        """Largest rank load / mean - 1, by the newest measured costs."""
        if self._costs is None:
            return 0.0
        return imbalance(self._training.rank_loads(self._costs))

    def bubble(self) -> float | None:
        """Idle fraction of the ranks' time over the last steps."""
        if self._costs is None or not self._step_seconds:
            return None
        busy = sum(self._costs.total)
        mean = sum(self._step_seconds) / len(self._step_seconds)
        return max(0.0, 1 - busy / (self._training.world.positions * mean))

    def _explained(self) -> dict[str, float | None]:
        """The idle fraction explained by the schedule and the partition; the rest is the runtime's."""
        training = self._training
        if len(training.profile) >= _MEASURED_STEPS and self._costs is not None:
            known = self._idle is not None and self._idle[0] == training.stages
            if not known or len(training.profile) == _MEASURED_STEPS or training.step % _SPLIT_EVERY == 0:
                self._idle = (training.stages, idle_seconds(training, self._costs))
        if self._idle is None or self._idle[0] != training.stages or not self._step_seconds:
            return {"bubble_schedule": None, "bubble_imbalance": None}
        mean, idle = sum(self._step_seconds) / len(self._step_seconds), self._idle[1]
        return {"bubble_schedule": idle.schedule / mean, "bubble_imbalance": idle.imbalance / mean}

    def _achieved(self, peak: float) -> dict[str, float | None]:
        """Operations per second and rank over the last steps, and their part of what the GPUs promise."""
        training = self._training
        # Counted once, on the rank that reports, when the first steps have shown the job to run.
        if not self._flops_counted and training.world.rank == 0 and len(training.profile) >= _MEASURED_STEPS:
            self._flops_counted = True
            own = step_flops(training.model, training.batch_of(training.step - 1)[0])
            self._step_flops = own * training.world.data.size if own is not None else None
        if self._step_flops is None or not self._step_seconds:
            return {"flops_per_second": None, "part_of_peak": None}
        mean = sum(self._step_seconds) / len(self._step_seconds)
        whole = self._step_flops / mean
        self._part_of_peak = whole / peak if peak > 0 else None
        return {"flops_per_second": whole / training.world.size, "part_of_peak": self._part_of_peak}

    def rebalanced(self, before: float, pause_ms: float) -> None:
        """Layers have moved."""
        self._rebalances += 1
        self._last_rebalance_step = self._training.step
        self._imbalance_before, self._imbalance_after = before, None
        self._rebalance_pause_ms = pause_ms
        self.move_seconds = pause_ms / 1000
        self._step_seconds.clear()

    def evaluated(self, loss: float | None) -> None:
        """The loss on the validation data was measured; None: it is not finite."""
        self._validation = (self._training.step, loss) if loss is not None else None
        # The speed of training, without the evaluation.
        self._done.clear()

    def reshaped(self, *, grown: bool = False) -> None:
        """Ranks have left, or joined: then a repack has to keep the speed of the larger gang.

        By the speed of the smaller one, or by that of a job that had just started, the ranks that joined
        would be given back at once.
        """
        self._step_seconds.clear()
        self._done.clear()
        if grown:
            self.reference_step_seconds = None

    def saved(self, seconds: float, every_steps: int | None, *, write_seconds: float) -> None:
        """A checkpoint was written: how long steps wait, the next one's steps, how long it takes to write."""
        self._checkpoint_seconds, self._checkpoint_every_steps = (seconds, write_seconds), every_steps

    def steps_per_second(self) -> float | None:
        """Over the last steps, pauses included."""
        if len(self._done) < 2:
            return None
        (first_at, first), (last_at, last) = self._done[0], self._done[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None

    def report(self) -> Report:
        """The report for the operator."""
        training = self._training
        outputs, gradients, repeated = self._passing_bytes
        return Report(
            epoch=training.plan.epoch,
            step=training.step,
            loss=self._loss,
            steps_per_second=self.steps_per_second(),
            layer_seconds=self._costs.total if self._costs is not None else (),
            layer_forward_seconds=self._costs.forward if self._costs is not None else (),
            layer_optimizer_seconds=self._costs.optimizer if self._costs is not None else (),
            layer_bytes=self._bytes,
            layer_weight_bytes=self._weight_bytes,
            layer_activation_bytes=self._activation_bytes or (),
            layer_output_bytes=outputs,
            layer_gradient_bytes=gradients,
            layer_repeated_bytes=repeated,
            stages=training.stages,
            imbalance=self.imbalance() if self._costs is not None else None,
            bubble=self.bubble(),
            rebalances=self._rebalances,
            last_rebalance_step=self._last_rebalance_step,
            imbalance_before=self._imbalance_before,
            imbalance_after=self._imbalance_after,
            rebalance_pause_ms=self._rebalance_pause_ms,
            checkpoint_step=training.checkpoint_step,
            resumed_from_step=self.resumed_from_step,
            emulated=training.speed.factor if training.speed is not None else None,
            validation_loss=self._validation[1] if self._validation is not None else None,
            validation_step=self._validation[0] if self._validation is not None else None,
            checkpoint_every_steps=self._checkpoint_every_steps,
            checkpoint_seconds=self._checkpoint_seconds[0] if self._checkpoint_seconds else None,
            checkpoint_write_seconds=self._checkpoint_seconds[1] if self._checkpoint_seconds else None,
            bad_samples=len(training.bad_samples),
            part_of_peak=self._part_of_peak,
            goodput=self.goodput(),
        )
