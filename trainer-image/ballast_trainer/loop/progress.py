"""The job's figures, and what rank 0 prints of them and sends to the operator."""

import dataclasses
import logging
import math
import time
from collections import deque
from typing import Any

from ballast_policies.contract.limits import LONGEST_REASON
from ballast_policies.contract.messages import Ack, ExitReason, Proposal, Report, Stage, Tried
from ballast_policies.planning.launch import partition_of
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.planning.partition import imbalance
from ballast_policies.planning.schedules.costs import stage_costs
from ballast_policies.planning.schedules.simulate import split_bubble
from ballast_policies.planning.step_time import predict_step_seconds

from ballast_trainer.channel.base import Messages
from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.checkpoints.memory_copies import LostRanks
from ballast_trainer.dynamics.mixture_of_experts import TOKEN_IMBALANCE, own_experts
from ballast_trainer.dynamics.protocol import Dynamic, gathered
from ballast_trainer.loop.replanning import LayerSizes, best_step_seconds
from ballast_trainer.loop.reshape import ReshapeResult
from ballast_trainer.loop.state import ModelState, RunState
from ballast_trainer.models.flops import peak_flops as gpu_peak_flops
from ballast_trainer.models.flops import step_flops
from ballast_trainer.profiling.profile import LayerCosts
from ballast_trainer.reporting.console import Reporter, SilentReporter

logger = logging.getLogger(__name__)

_MEASURED_STEPS = 3
"""Steps measured before a figure of them counts."""
_SPLIT_EVERY = 64
"""Steps after which idle time is split again; in between only where the partition has changed."""


def stages_as_json(stages: tuple[Stage, ...]) -> list[dict[str, int]]:
    """Stages with the keys they have in the plan."""
    return [{"rank": s.rank, "firstLayer": s.first_layer, "endLayer": s.end_layer} for s in stages]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """The end of a rank's part: the reason, and the steps of the job done."""

    reason: ExitReason
    step: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IdleSeconds:
    """Seconds per step that a rank of the mean is idle, by measured costs of the layers.

    Attributes:
        schedule: idle time of the schedule with the same work on even stages.
        imbalance: idle time that uneven stages add, and rebalancing can recover. A little below 0 where few
            microbatches fill a pipeline of uneven stages faster.
    """

    schedule: float
    imbalance: float


def idle_seconds(model: ModelState, costs: LayerCosts) -> IdleSeconds:
    """The idle time that the schedule and the partition in force explain.

    Schedules with a flush are simulated; without one the closed form of a run between two drains is used.
    """
    positions = model.world.positions
    request = model.schedule_request(positions)
    if positions == 1:
        return IdleSeconds(schedule=0.0, imbalance=0.0)
    busy = sum(costs.forward + costs.backward) / positions
    if request.asynchronous:
        loads, microbatches = model.rank_loads(costs), model.microbatches_per_drain
        mean = sum(loads) / positions
        even = predict_step_seconds([mean] * positions, microbatches)
        return IdleSeconds(schedule=even - mean, imbalance=predict_step_seconds(loads, microbatches) - even)
    split = split_bubble(
        request.one_step(),
        stage_costs(
            partition_of(model.stages),
            forward_seconds=costs.forward,
            backward_seconds=costs.backward,
            microbatches=model.microbatches,
        ),
    )
    own = busy * split.inherent / (1 - split.inherent)
    return IdleSeconds(schedule=own, imbalance=busy * split.idle / (1 - split.idle) - own)


class Progress:
    """Figures of the running job, the same on every rank; rank 0 prints them and sends them.

    Attributes:
        model, run: whose figures they are.
        channel: sends messages to the operator; None on other ranks.
        sizes: of all layers as the launch began; None: not known yet.
        deciding_seconds: of this launch, spent on decisions to rebalance.
        moving_seconds: spent on moving layers and building pipelines anew for rebalances.
    """

    def __init__(
        self,
        model: ModelState,
        run: RunState,
        reporter: Reporter | None = None,
        channel: ChannelThread | None = None,
    ) -> None:
        """Begin to count; ``reporter`` prints, None: nothing is printed."""
        self.model, self.run = model, run
        self._reporter = reporter or SilentReporter()
        self.channel = channel
        self._done: deque[tuple[float, int]] = deque(maxlen=16)
        self._step_seconds: deque[float] = deque(maxlen=8)
        self._costs: LayerCosts | None = None
        # Infinitely negative where unknown, so that the sum over ranks is, too.
        self.own_peak_flops = gpu_peak_flops(model.device, model.config.training.precision) or -math.inf
        self._step_flops: float | None = None
        self._flops_counted = False
        self._idle: tuple[tuple[Stage, ...], IdleSeconds] | None = None
        self.sizes: LayerSizes | None = None
        self._bytes = MeasuredLayers()
        self._loss: float | None = None
        self._finite_loss = True
        self._report = Report(epoch=run.plan.epoch, step=run.step, loss=None, steps_per_second=None)
        """Has the newest figures of moves, evaluations, checkpoints and the speed; the others are added."""
        self.move_seconds: float | None = None
        self.look_seconds = 0.0
        self.reference_step_seconds: float | None = None
        self.resumed_from_step: int | None = None
        self._told_bad: set[int] = set()
        self.deciding_seconds = self.moving_seconds = 0.0
        self._began = time.monotonic()
        self._trained_seconds = 0.0

    def timing(self) -> tuple[float, float]:
        """Start of the job, by the monotonic clock, and the seconds since in which steps ran."""
        return self._began, self._trained_seconds

    def continue_timing(self, began: float, trained_seconds: float) -> None:
        """Count on from :meth:`timing` of before: steps that are done again do not count twice."""
        self._began, self._trained_seconds = began, trained_seconds

    def step_done(
        self, loss: float, seconds: float, peak_flops: float, peak_memory: int | None = None
    ) -> None:
        """Count a step, print it and tell the operator.

        ``peak_flops``: operations/s of all ranks by their data sheets; infinitely negative: unknown.
        ``peak_memory``: most bytes that tensors have taken at once on the fullest rank; None on the CPU.
        """
        model = self.model
        for number, error in model.batches.bad_samples.items():
            if number not in self._told_bad:
                self._told_bad.add(number)
                self.event("badSample", sample=number, error=error)
        self._loss = self._finite(loss)
        self._done.append((time.monotonic(), self.run.step))
        self._step_seconds.append(seconds)
        self._trained_seconds += seconds
        self._costs = model.profile.costs() or self._costs
        self._bytes = model.profile.bytes() or self._bytes
        if self.reference_step_seconds is None and len(model.profile) >= _MEASURED_STEPS:
            costs = model.profile.costs()
            assert costs is not None
            self.reference_step_seconds = best_step_seconds(model, costs)
        awaited = self._report.rebalances and self._report.imbalance_after is None
        if awaited and len(model.profile) >= _MEASURED_STEPS:
            self._note(imbalance_after=self.imbalance())
        self._count_flops(peak_flops)
        fields: dict[str, Any] = {
            "step": self.run.step,
            "loss": loss,
            "step_seconds": seconds,
            "stages": stages_as_json(model.stages),
            "epoch": self.run.plan.epoch,
            "imbalance": self.imbalance(),
            "bubble": self.bubble(),
            **self._explained(),
            "flops_per_second": self._report.flops_per_second,
            "part_of_peak": self._report.part_of_peak,
            "peak_memory_bytes": peak_memory,
            "goodput": self.goodput(),
        }
        if model.speed is not None:
            fields["emulated"] = model.speed.factor
        self._reporter.step(**fields)
        self.tell()

    def goodput(self) -> float | None:
        """Part of the time since this launch began in which steps ran."""
        passed = time.monotonic() - self._began
        return min(1.0, self._trained_seconds / passed) if self._trained_seconds and passed > 0 else None

    def _finite(self, loss: float) -> float | None:
        """The loss for reports; None where it is not finite, of which the first step of several warns."""
        model, was = self.model, self._finite_loss
        self._finite_loss = math.isfinite(loss)
        if was and not self._finite_loss and model.world.rank == 0:
            logger.warning(
                "the loss of step %d is %s; its gradients are finite, so training continues. To fix: targets "
                "that count in every microbatch (not all of them ignored), or a loss that is finite without",
                self.run.step,
                loss,
            )
        return loss if self._finite_loss else None

    @property
    def costs(self) -> LayerCosts | None:
        """The newest measured costs of the layers, also right after they were reset."""
        return self.model.profile.costs() or self._costs

    def step_seconds(self) -> tuple[float, ...]:
        """Wall seconds of the last steps under the partition in force."""
        return tuple(self._step_seconds)

    def imbalance(self) -> float:
        """Largest rank load / mean - 1, by the newest measured costs."""
        if self._costs is None:
            return 0.0
        return imbalance(self.model.rank_loads(self._costs))

    def bubble(self) -> float | None:
        """Idle fraction of the ranks' time over the last steps."""
        if self._costs is None or not self._step_seconds:
            return None
        busy = sum(self._costs.total)
        mean = sum(self._step_seconds) / len(self._step_seconds)
        return max(0.0, 1 - busy / (self.model.world.positions * mean))

    def _explained(self) -> dict[str, float | None]:
        """The idle fraction explained by the schedule and the partition; the rest is the runtime's."""
        model = self.model
        if len(model.profile) >= _MEASURED_STEPS and self._costs is not None:
            known = self._idle is not None and self._idle[0] == model.stages
            if not known or len(model.profile) == _MEASURED_STEPS or self.run.step % _SPLIT_EVERY == 0:
                self._idle = (model.stages, idle_seconds(model, self._costs))
        if self._idle is None or self._idle[0] != model.stages or not self._step_seconds:
            return {"bubble_schedule": None, "bubble_imbalance": None}
        mean, idle = sum(self._step_seconds) / len(self._step_seconds), self._idle[1]
        return {"bubble_schedule": idle.schedule / mean, "bubble_imbalance": idle.imbalance / mean}

    def _count_flops(self, peak: float) -> None:
        """Operations per second and rank over the last steps, and their part of what the GPUs promise."""
        model = self.model
        # Counted once, on the rank that reports, when the first steps have shown the job to self.run.
        if not self._flops_counted and model.world.rank == 0 and len(model.profile) >= _MEASURED_STEPS:
            self._flops_counted = True
            own = step_flops(model.definition, model.batch(self.run.step - 1)[0])
            self._step_flops = own * model.world.data.size if own is not None else None
        if self._step_flops is not None and self._step_seconds:
            whole = self._step_flops / (sum(self._step_seconds) / len(self._step_seconds))
            part = whole / peak if peak > 0 else None
            self._note(flops_per_second=whole / model.world.size, part_of_peak=part)

    def looked(self, seconds: float) -> None:
        """A decision on a rebalance took so long, including the wait for rank 0's."""
        self.look_seconds = seconds
        self.deciding_seconds += seconds

    def rebalanced(self, before: float, pause_ms: float) -> None:
        """Layers have moved."""
        self.moving_seconds += pause_ms / 1000
        self._note(
            rebalances=self._report.rebalances + 1,
            last_rebalance_step=self.run.step,
            imbalance_before=before,
            imbalance_after=None,
            rebalance_pause_ms=pause_ms,
        )
        self.move_seconds = pause_ms / 1000
        self._step_seconds.clear()

    def evaluated(self, loss: float | None) -> None:
        """The loss on the validation data was measured; None: it is not finite."""
        self._note(validation_loss=loss, validation_step=self.run.step if loss is not None else None)
        # The speed of model, without the evaluation.
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
        self._note(
            checkpoint_seconds=seconds,
            checkpoint_write_seconds=write_seconds,
            checkpoint_every_steps=every_steps,
            not_saved="",
        )

    def not_saved(self, why: str) -> None:
        """A checkpoint failed; the first reason is told, by the last report too, until one is written."""
        if not self._report.not_saved:
            self._note(not_saved=why[:LONGEST_REASON])
            self.tell()

    def steps_per_second(self) -> float | None:
        """Speed over the last steps, pauses included."""
        if len(self._done) < 2:
            return None
        (first_at, first), (last_at, last) = self._done[0], self._done[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None

    def tried(self, results: tuple[Tried, ...], kept: int | None) -> None:
        """The plan's candidates have come so far; ``kept``: the one that goes on."""
        self._note(tried=results, kept=kept)
        if results:
            self.tell(now=True)

    def _note(self, **figures: Any) -> None:
        """Figures of the report, which stay until there are newer ones."""
        self._report = self._report.replace(**figures)

    def report(self) -> Report:
        """The report for the operator."""
        model, costs, sizes = self.model, self._costs, self.sizes
        return self._report.replace(
            epoch=self.run.plan.epoch,
            step=self.run.step,
            loss=self._loss,
            steps_per_second=self.steps_per_second(),
            layer_seconds=costs.total if costs is not None else (),
            layer_forward_seconds=costs.forward if costs is not None else (),
            layer_optimizer_seconds=costs.optimizer if costs is not None else (),
            layer_bytes=sizes.bytes if sizes is not None else (),
            layer_weight_bytes=sizes.weight_bytes if sizes is not None else (),
            layer_activation_bytes=self._bytes.activation_bytes,
            layer_output_bytes=self._bytes.output_bytes,
            layer_gradient_bytes=self._bytes.gradient_bytes,
            layer_repeated_bytes=self._bytes.repeated_bytes,
            stages=model.stages,
            imbalance=self.imbalance() if costs is not None else None,
            bubble=self.bubble(),
            checkpoint_step=self.run.checkpoint_step,
            resumed_from_step=self.resumed_from_step,
            emulated=model.speed.factor if model.speed is not None else None,
            bad_samples=len(model.batches.bad_samples),
            goodput=self.goodput(),
            slow_ranks=model.rank_speeds.slow([rank.gpu_type for rank in self.run.plan.ranks]),
        )

    def event(self, name: str, **fields: Any) -> None:
        """Print an event of the step that is done."""
        self._reporter.event(name, **{"step": self.run.step, **fields})

    def tell(self, *, now: bool = False) -> None:
        """Hand the report to the channel; ``now`` does not wait for the next renewal."""
        if self.channel is not None:
            self.channel.send(Messages(report=self.report()), now=now)

    def launched(self, lost: LostRanks | None = None) -> None:
        """Print the launch, or that the job goes on after a loss; acknowledge its plan."""
        model, from_step = self.model, self.resumed_from_step
        if lost is None:
            self.event(
                "launch",
                epoch=self.run.plan.epoch,
                ranks=model.world.size,
                resumed_from_step=from_step,
                emulated=model.speed.factor if model.speed is not None else None,
                stages=stages_as_json(model.stages),
            )
        else:
            seconds = time.monotonic() - lost.noticed
            self.event(
                "ranksLost",
                epoch=self.run.plan.epoch,
                lost=lost.processes,
                ranks_before=lost.ranks,
                ranks_after=model.world.size,
                resumed_from_step=from_step,
                seconds=seconds,
                stages=stages_as_json(model.stages),
            )
            if model.world.rank == 0:
                names = ", ".join(lost.processes)
                logger.warning(
                    "%s lost: %d ranks go on after step %d, %.1f s later (goodput %.2f)",
                    names,
                    model.world.size,
                    self.run.step,
                    seconds,
                    self.goodput() or 0.0,
                )
        self.acknowledge(pause_ms=None)

    def acknowledge(self, *, pause_ms: float | None) -> None:
        """Acknowledge that all ranks train under the plan in force."""
        if self.channel is not None:
            ack = Ack(epoch=self.run.plan.epoch, step=self.run.step, pause_ms=pause_ms)
            self.channel.send(Messages(ack=ack, report=self.report()))

    def acknowledge_stop(self, epoch: int) -> None:
        """Acknowledge that the state is saved, as the plan of ``epoch`` asks."""
        if self.channel is not None:
            ack = Ack(epoch=epoch, step=self.run.step, checkpoint_step=self.run.checkpoint_step)
            self.channel.send(Messages(ack=ack))

    def propose(self, proposal: Proposal, *, again: bool) -> None:
        """Propose a repack; printed once, sent with new figures while it is open."""
        if self.channel is not None:
            self.channel.send(Messages(proposal=proposal), now=not again)
        if not again:
            self.event(
                "proposal",
                kept_pods=proposal.kept_pods,
                released_pods=proposal.released_pods,
                step_seconds_before=proposal.step_seconds_before,
                step_seconds_after=proposal.step_seconds_after,
                reason=proposal.reason,
            )

    def migrated(self, reshaped: ReshapeResult) -> None:
        """Print the layers that moved."""
        self.event(
            "migrate",
            layers=[move.layer for move in reshaped.migration.moves],
            bytes=reshaped.migration.byte_count,
            pause_ms=reshaped.pause_ms,
            phases_ms={phase: round(value, 2) for phase, value in reshaped.phases_ms.items()},
        )

    def print_figures(self, *, at_end: bool = False) -> None:
        """Print what the changes measure; ``at_end`` also says which of them change nothing. Collective."""
        model = self.model
        for dynamic in model.dynamics:
            if dynamic.measures is None:
                continue
            figures = gathered(dynamic.measured(model.layers), model.world)
            self.event(dynamic.measures, **figures)
            # Kinds of other distributions need not tell.
            why = dynamic.idle(figures) if at_end and isinstance(dynamic, Dynamic) else ""
            if why and model.world.rank == 0:
                logger.warning(
                    "dynamics: %s changes nothing by step %d: %s", dynamic.kind, self.run.step, why
                )

        if all(dynamic.measures != TOKEN_IMBALANCE for dynamic in model.dynamics):
            loads = gathered(own_experts(model.layers), model.world)
            if loads["loads"]:
                self.event(TOKEN_IMBALANCE, **loads)

    def ended(self, reason: ExitReason, message: str) -> SessionOutcome:
        """Print the end, and return it."""
        self.event("ended", reason=str(reason))
        return SessionOutcome(reason=reason, step=self.run.step, message=message)
