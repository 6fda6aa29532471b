"""The output of rank 0: lines for people and programs, messages to the operator."""

import dataclasses
import logging
import time
from typing import Any

from ballast_policies.contract import Ack, ExitReason, Proposal

from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.checkpoints.memory_copies import Loss
from ballast_trainer.dynamics.protocol import UnchangedHooks, figures_of
from ballast_trainer.loop.progress import ProgressTracker
from ballast_trainer.loop.reshape import ReshapeResult
from ballast_trainer.loop.state import TrainingState
from ballast_trainer.reporting.console import Reporter

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """The end of a rank's part: the reason, and the steps of the job done."""

    reason: ExitReason
    step: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankZeroReporter:
    """Prints events and sends messages to the operator; does nothing on ranks other than 0.

    Attributes:
        training: the job.
        progress: its figures.
        reporter: prints; silent on other ranks.
        channel_thread: sends messages to the operator; None on other ranks.
    """

    training: TrainingState
    progress: ProgressTracker
    reporter: Reporter
    channel_thread: ChannelThread | None

    def event(self, name: str, **fields: Any) -> None:
        """Print an event of the step that is done."""
        self.reporter.event(name, **{"step": self.training.step, **fields})

    def report(self, *, now: bool = False) -> None:
        """Hand the report to the channel; ``now`` does not wait for the next renewal."""
        if self.channel_thread is not None:
            report = self.progress.report()
            if now:
                self.channel_thread.send(report=report)
            else:
                self.channel_thread.report(report)

    def launched(self, loss: Loss | None = None) -> None:
        """Print the launch, or that the job goes on after a loss; acknowledge its plan."""
        training, from_step = self.training, self.progress.resumed_from_step
        if loss is None:
            self.event(
                "launch",
                epoch=training.plan.epoch,
                ranks=training.world.size,
                resumed_from_step=from_step,
                emulated=training.speed.factor if training.speed is not None else None,
            )
        else:
            seconds = time.monotonic() - loss.noticed
            self.event(
                "ranksLost",
                epoch=training.plan.epoch,
                lost=loss.processes,
                ranks_before=loss.ranks,
                ranks_after=training.world.size,
                resumed_from_step=from_step,
                seconds=seconds,
            )
            if training.world.rank == 0:
                lost = ", ".join(loss.processes)
                logger.warning(
                    "%s lost: %d ranks go on after step %d, %.1f s later (goodput %.2f)",
                    lost,
                    training.world.size,
                    training.step,
                    seconds,
                    self.progress.goodput() or 0.0,
                )
        self.acknowledge(pause_ms=None)

    def acknowledge(self, *, pause_ms: float | None) -> None:
        """Acknowledge that all ranks train under the plan in force."""
        if self.channel_thread is not None:
            ack = Ack(epoch=self.training.plan.epoch, step=self.training.step, pause_ms=pause_ms)
            self.channel_thread.send(ack=ack, report=self.progress.report())

    def acknowledge_stop(self, epoch: int) -> None:
        """Acknowledge that the state is saved, as the plan of ``epoch`` asks."""
        if self.channel_thread is not None:
            training = self.training
            self.channel_thread.send(
                ack=Ack(epoch=epoch, step=training.step, checkpoint_step=training.checkpoint_step)
            )

    def propose(self, proposal: Proposal, *, again: bool) -> None:
        """Propose a repack; printed once, sent with new figures while it is open."""
        if self.channel_thread is not None and again:
            self.channel_thread.repeat(proposal)
        elif self.channel_thread is not None:
            self.channel_thread.send(proposal=proposal)
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
        training = self.training
        for dynamic in training.dynamics:
            if dynamic.measures is None:
                continue
            figures = figures_of(dynamic, training.layers, training.world)
            self.event(dynamic.measures, **figures)
            # Kinds of other distributions need not tell.
            why = dynamic.idle(figures) if at_end and isinstance(dynamic, UnchangedHooks) else ""
            if why and training.world.rank == 0:
                logger.warning(
                    "dynamics: %s changes nothing by step %d: %s", dynamic.kind, training.step, why
                )

    def ended(self, reason: ExitReason, message: str) -> SessionOutcome:
        """Print the end, and return it."""
        self.event("ended", reason=str(reason))
        return SessionOutcome(reason=reason, step=self.training.step, message=message)
