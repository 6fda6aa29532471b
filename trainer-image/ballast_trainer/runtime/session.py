"""The training loop of one rank: train a step, agree with the other ranks, reshape where it pays.

After each step all ranks sum one vector: who was told to stop, the newest plan that rank 0 has
seen, the loss, the gradient norm and the seconds of each layer.  So all ranks know the same and
act at the same step; what rank 0 alone decides it broadcasts there.
"""

import dataclasses
import logging
import time
from typing import Any

from ballast_policies.contract import Ack, Directive, ExitReason, Plan, Proposal, Stage
from ballast_policies.planning import RebalanceDecision

from ballast_trainer.channel.liaison import Liaison
from ballast_trainer.reporting.console import Reporter
from ballast_trainer.runtime.checkpoint import Checkpoints
from ballast_trainer.runtime.decide import (
    initial_stages,
    rebalance_decision,
    repack_proposal,
    usable_stages,
)
from ballast_trainer.runtime.heartbeat import Heartbeat
from ballast_trainer.runtime.layout import stages_over
from ballast_trainer.runtime.migrate import MigrationFailed
from ballast_trainer.runtime.optimize import optimizer_step, squared_gradient_norm
from ballast_trainer.runtime.process_group import peer_failures
from ballast_trainer.runtime.progress import Progress, stages_as_json
from ballast_trainer.runtime.reshape import Reshaped, enter_grown, grow, move_layers, newcomers_ready, shrink
from ballast_trainer.runtime.state import StopWatch, Training
from ballast_trainer.runtime.stopping import StopSignal

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rank's part ended, and after how many steps of the job."""

    reason: ExitReason
    step: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Agreed:
    """What all ranks know after a step."""

    stop: bool
    epoch: int
    loss: float
    squared_norm: float
    seconds: list[float]


class Session:
    """Trains until the steps are done, the job is stopped or this rank is released."""

    def __init__(
        self,
        training: Training,
        *,
        liaison: Liaison | None,
        reporter: Reporter,
        stop: StopSignal,
        peer_timeout_seconds: float,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._training = training
        self._liaison = liaison
        self._reporter = reporter
        self._stop = stop
        self._timeout = peer_timeout_seconds
        self._heartbeat = heartbeat
        self._progress = Progress(training)
        self._proposal: Proposal | None = None
        config = training.config
        self._checkpoints = None
        if config.checkpoint.path is not None:
            self._checkpoints = Checkpoints(
                config.checkpoint.path,
                keep=config.checkpoint.keep,
                layer_count=training.model.layer_count,
                seed=config.training.seed,
            )

    def run(self, *, joining: bool = False) -> Outcome:
        """Train; ``joining`` for a rank that enters a running job.

        Raises:
            PeerLost: another rank died or hung.
            CheckpointError: a checkpoint cannot be written or fits another job.
        """
        with peer_failures():
            if joining:
                enter_grown(self._training, self._training.world)
            else:
                self._launch()
            self._watch_peers()
            outcome = self._loop()
            if self._heartbeat is not None:
                self._heartbeat.close()
            self._training.world.leave()
            return outcome

    def _watch_peers(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.watch(self._training.world.pods)

    def _launch(self) -> None:
        training = self._training
        manifest = self._checkpoints.newest(training.world) if self._checkpoints is not None else None
        if manifest is not None:
            training.step = manifest.step
            self._progress.checkpoint_step = self._progress.resumed_from_step = manifest.step
        training.layers.hold(
            training.layers.make(index)
            for stage in training.stages
            if stage.rank == training.world.rank
            for index in range(stage.first_layer, stage.end_layer)
        )
        if manifest is not None and self._checkpoints is not None:
            self._checkpoints.load(training.world, training.layers, manifest)
        training.conform()
        training.rebuild()
        self._progress.gather_bytes()
        self._event(
            "launch",
            step=training.step,
            epoch=training.plan.epoch,
            ranks=training.world.size,
            resumed_from_step=self._progress.resumed_from_step,
            emulated=training.speed.factor if training.speed is not None else None,
        )
        self._acknowledge(pause_ms=None)

    def _loop(self) -> Outcome:
        training = self._training
        total = training.config.total_steps
        while training.step < total:
            agreed = self._train_step()
            if agreed.stop:
                self._save()
                return self._ended(ExitReason.STOPPED, self._stopped_words("told to stop"))
            if agreed.epoch > training.plan.epoch:
                outcome = self._follow_plan()
                if outcome is not None:
                    return outcome
            if training.step < total:
                self._between_steps()
        self._save()
        if self._liaison is not None:
            self._liaison.close(finished_step=training.step)
        return self._ended(ExitReason.FINISHED, f"all {total} steps are done")

    def _train_step(self) -> _Agreed:
        training = self._training
        began = time.perf_counter()
        changes = [
            dynamic.apply(training.step, training.layers, training.world) for dynamic in training.dynamics
        ]
        if any(changes):
            if any(
                changed and d.needs_rebuild for d, changed in zip(training.dynamics, changes, strict=True)
            ):
                training.rebuild()
            training.profile.forget()
        measured = training.profile.wants(training.step)
        training.meter.start_step(training.step, by_layer=measured)
        assert training.pipeline is not None
        loss = training.pipeline.run(training.batch())
        for dynamic in training.dynamics:
            dynamic.after_backward(training.layers)
        agreed = self._agree(loss)
        optimizer_step(
            training.layers,
            training.config.training,
            training.meter,
            step=training.step,
            squared_norm=agreed.squared_norm,
        )
        for dynamic in training.dynamics:
            dynamic.after_optimizer(training.layers)
        training.step += 1
        if measured:
            # The optimizer's seconds among them are the last step's: it runs after the sum.
            training.profile.add(agreed.seconds)
        fields = self._progress.step_done(agreed.loss, time.perf_counter() - began)
        self._reporter.step(**fields)
        if self._liaison is not None:
            self._liaison.report(self._progress.report())
        return agreed

    def _agree(self, loss: float | None) -> _Agreed:
        training = self._training
        newest = self._newest_epoch()
        mine = [
            float(self._stop.received),
            float(newest),
            loss if loss is not None else 0.0,
            squared_gradient_norm(training.layers),
            *training.meter.seconds(),
        ]
        summed = training.world.sum(mine)
        return _Agreed(
            stop=summed[0] > 0,
            epoch=round(summed[1]),
            loss=summed[2],
            squared_norm=summed[3],
            seconds=summed[4:],
        )

    def _newest_epoch(self) -> int:
        """The newest plan's epoch, on rank 0; a plan that grows counts once its new ranks are there."""
        if self._liaison is None:
            return 0
        plan, world = self._liaison.plan(), self._training.world
        if plan.directive is Directive.GROW and not newcomers_ready(world, plan):
            return self._training.plan.epoch
        return plan.epoch

    def _follow_plan(self) -> Outcome | None:
        training = self._training
        plan: Plan = training.world.from_rank_0(self._liaison.plan() if self._liaison is not None else None)
        self._proposal = None
        if plan.directive is Directive.CHECKPOINT_AND_STOP or plan.launch != training.plan.launch:
            self._save()
            ack = Ack(epoch=plan.epoch, step=training.step, checkpoint_step=self._progress.checkpoint_step)
            if self._liaison is not None:
                self._liaison.send(ack=ack)
            return self._ended(ExitReason.STOPPED, self._stopped_words(f"plan {plan.epoch} says stop"))
        old, new = set(training.world.pods), {rank.pod for rank in plan.ranks}
        if self._heartbeat is not None:
            # Ranks come and go until the new world stands.
            self._heartbeat.watch(())
        if old == new:
            training.plan = plan
            training.world = dataclasses.replace(training.world, epoch=plan.epoch)
            asked = usable_stages(
                plan.stages, training.placement(training.world.size), training.model.layer_count
            )
            pause_ms = None
            if asked is not None and asked != training.stages:
                reshaped = move_layers(training, asked)
                self._migrated(reshaped)
                pause_ms = reshaped.pause_ms
            self._acknowledge(pause_ms=pause_ms)
            self._watch_peers()
            return None
        costs = training.profile.costs()
        placement = training.placement(len(plan.ranks))
        stages: tuple[Stage, ...] = training.world.from_rank_0(
            usable_stages(plan.stages, placement, training.model.layer_count)
            or initial_stages(costs, placement, training.model.layer_count)
        )
        before = training.world.size
        released = [pod for pod in training.world.pods if pod not in new]
        if new < old:
            reshaped = shrink(training, plan, stages, self._timeout)
        else:
            reshaped = grow(training, plan, stages, self._timeout)
        if reshaped.released:
            return self._ended(ExitReason.RELEASED, f"released by plan {plan.epoch}")
        self._progress.reshaped()
        self._watch_peers()
        self._migrated(reshaped)
        self._event(
            "repack" if new < old else "grow",
            step=training.step,
            epoch=plan.epoch,
            ranks_before=before,
            ranks_after=training.world.size,
            released=released,
            pause_ms=reshaped.pause_ms,
            stages=stages_as_json(stages),
        )
        self._acknowledge(pause_ms=reshaped.pause_ms)
        return None

    def _between_steps(self) -> None:
        training = self._training
        config = training.config
        if (
            config.rebalance.enabled
            and training.world.size > 1
            and training.step % config.rebalance.every_steps == 0
        ):
            self._rebalance()
        if config.repack.enabled and training.step % config.repack.every_steps == 0:
            self._propose()
        if self._checkpoints is not None and training.step % config.checkpoint.every_steps == 0:
            self._save()

    def _rebalance(self) -> None:
        training = self._training
        decided = None
        if self._liaison is not None:
            decided = rebalance_decision(training, move_seconds=self._progress.move_seconds)
            if decided is not None:
                logger.info("step %d: rebalance=%s: %s", training.step, decided.rebalance, decided.why)
        decision: RebalanceDecision | None = training.world.from_rank_0(decided)
        if decision is None or not decision.rebalance:
            return
        stages = stages_over(decision.partition, training.placement(training.world.size))
        before = self._progress.imbalance()
        try:
            reshaped = move_layers(training, stages)
        except MigrationFailed as error:
            logger.warning("rebalance at step %d failed: %s", training.step, error)
            return
        self._progress.rebalanced(before, reshaped.pause_ms)
        self._migrated(reshaped)
        self._event(
            "rebalance",
            step=training.step,
            imbalance_before=before,
            imbalance_after=self._progress.imbalance(),
            step_seconds_before=decision.step_seconds_before,
            step_seconds_after=decision.step_seconds_after,
            pause_ms=reshaped.pause_ms,
            stages=stages_as_json(stages),
        )
        if self._liaison is not None:
            self._liaison.send(report=self._progress.report())
        training.profile.forget()

    def _propose(self) -> None:
        if self._liaison is None:
            return
        proposal = repack_proposal(
            self._training, reference_step_seconds=self._progress.reference_step_seconds
        )
        if proposal is not None:
            self._liaison.send(proposal=proposal)
            if self._proposal is None:
                self._event(
                    "proposal",
                    step=proposal.step,
                    kept_pods=proposal.kept_pods,
                    released_pods=proposal.released_pods,
                    step_seconds_before=proposal.step_seconds_before,
                    step_seconds_after=proposal.step_seconds_after,
                    reason=proposal.reason,
                )
            self._proposal = proposal

    def _save(self) -> None:
        training = self._training
        if self._checkpoints is None or self._progress.checkpoint_step == training.step:
            return
        watch = StopWatch()
        self._checkpoints.save(training.world, training.layers, training.step)
        self._progress.checkpoint_step = training.step
        self._event("checkpoint", step=training.step, pause_ms=watch.milliseconds())

    def _stopped_words(self, why: str) -> str:
        kept = (
            "the state is saved" if self._checkpoints is not None else "no checkpoint.path, nothing is saved"
        )
        return f"{why}; {kept}"

    def _acknowledge(self, *, pause_ms: float | None) -> None:
        if self._liaison is not None:
            ack = Ack(epoch=self._training.plan.epoch, step=self._training.step, pause_ms=pause_ms)
            self._liaison.send(ack=ack, report=self._progress.report())

    def _migrated(self, reshaped: Reshaped) -> None:
        self._event(
            "migrate",
            step=self._training.step,
            layers=[move.layer for move in reshaped.migration.moves],
            bytes=reshaped.migration.byte_count,
            pause_ms=reshaped.pause_ms,
        )

    def _event(self, name: str, **fields: Any) -> None:
        self._reporter.event(name, **fields)

    def _ended(self, reason: ExitReason, message: str) -> Outcome:
        self._event("ended", reason=str(reason), step=self._training.step)
        return Outcome(reason=reason, step=self._training.step, message=message)
