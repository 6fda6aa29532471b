"""The training loop of one rank: train a step, agree with the other ranks, reshape where useful.

After each step all ranks sum one vector: the ranks told to stop, the newest plan that rank 0 has
seen, the loss, the gradient norm, the seconds and the activation bytes of each layer.  So all ranks
have the same values and act at the same step; rank 0 broadcasts its own decisions there.
"""

import contextlib
import dataclasses
import time

from ballast_policies.contract import ExitReason

from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.distributed.heartbeat import RankHeartbeat
from ballast_trainer.distributed.process_group import peer_failures
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.dynamics.side_loss import set_loss_scale
from ballast_trainer.evaluation.evaluator import Evaluator
from ballast_trainer.layers.optimize import drop_gradients, optimizer_step
from ballast_trainer.loop.agreement import Agreed, agreed_values, figures
from ballast_trainer.loop.asynchronous_step import AsynchronousRuns, StepDone
from ballast_trainer.loop.ending import JobEnd
from ballast_trainer.loop.in_place import InPlace
from ballast_trainer.loop.plan_following import PlanFollower
from ballast_trainer.loop.progress import ProgressTracker
from ballast_trainer.loop.rank_zero import RankZeroReporter, SessionOutcome
from ballast_trainer.loop.reshape import enter_grown
from ballast_trainer.loop.saving import Saver, check_export_place
from ballast_trainer.loop.state import TrainingState
from ballast_trainer.pipeline.executor.drains import REBALANCE_EVERY
from ballast_trainer.pipeline.gradients import buffers_at_start, gather_weights
from ballast_trainer.pipeline.layout import is_asynchronous
from ballast_trainer.profiling.torch_profile import StepProfiler
from ballast_trainer.reporting.callback import EndRequest
from ballast_trainer.reporting.console import Reporter


class Session:
    """Trains until the steps are done, the job is stopped or this rank is released."""

    def __init__(
        self,
        training: TrainingState,
        *,
        channel_thread: ChannelThread | None,
        reporter: Reporter,
        stop: StopSignal,
        heartbeat: RankHeartbeat | None = None,
        in_place: InPlace | None = None,
        end_request: EndRequest | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        self._training = training
        self._profiler = profiler or StepProfiler(None, rank=0, device=training.device)
        self._stop = stop
        self._heartbeat = heartbeat
        self._progress = ProgressTracker(training)
        self._rank_zero = RankZeroReporter(
            training=training, progress=self._progress, reporter=reporter, channel_thread=channel_thread
        )
        event = self._rank_zero.event
        self._in_place = in_place
        self._saver = Saver(
            training,
            self._progress,
            event=event,
            stop=stop,
            channel_thread=channel_thread,
            memory=None if in_place is None else in_place.memory,
        )
        self._plan_follower = PlanFollower(
            training,
            self._rank_zero,
            heartbeat=heartbeat,
            save=self._saver.save,
            settle=self._saver.settle_all,
            peer_timeout_seconds=training.config.training.comm_timeout_seconds,
        )
        self._evaluator = Evaluator(
            training,
            measured=self._progress.evaluated,
            event=self._rank_zero.event,
            stop_votes=self._stop_votes,
            newest_epoch=self._plan_follower.newest_epoch,
            is_news=self._plan_follower.is_news,
        )
        request = end_request or EndRequest()
        self._end = JobEnd(training, self._saver, self._evaluator, self._rank_zero, request)
        self._asynchronous = None
        if is_asynchronous(training.config.pipeline.schedule):
            self._asynchronous = AsynchronousRuns(
                training,
                figures=self._figures,
                agree=self._agree_late,
                must_drain=lambda agreed: (
                    agreed.stop or agreed.end or self._plan_follower.is_news(agreed.epoch)
                ),
                event=self._rank_zero.event,
            )

    def run(self, *, joining: bool = False) -> SessionOutcome:
        """Train; ``joining`` for a rank that enters a running job.

        Raises:
            PeerLost: another rank died or hung.
            CheckpointError: a checkpoint cannot be written or fits another job.
        """
        explained = self._heartbeat.explained() if self._heartbeat else contextlib.nullcontext()
        with self._saver, explained, peer_failures():
            if joining:
                enter_grown(self._training, self._training.world)
            else:
                self._launch()
            self._plan_follower.watch_peers()
            outcome = None
            if joining:
                # The ranks that were there are between the same two steps.
                outcome = self._between_steps(None)
            elif not self._end.reached:
                # A stop may have come before the evaluation of the step that was saved.
                outcome = self._evaluate_if_due()
            outcome = outcome or self._loop()
            self._profiler.close(self._training.step)
            if self._heartbeat is not None:
                self._heartbeat.close()
            self._training.layers.settle()
            self._saver.settle_all()
            self._training.world.leave()
            return outcome

    def _launch(self) -> None:
        training = self._training
        # Storage may take long: hung ranks are noticed meanwhile.
        self._plan_follower.watch_peers()
        manifest = self._saver.resume()
        if manifest is None:
            check_export_place(training)
        training.layers.hold(training.layers.make(index) for index in training.held_layers())
        if manifest is not None:
            self._saver.load(manifest)
            self._end.resume()
        training.send_tied_weights()
        training.apply_dynamics()
        for dynamic in training.dynamics:
            dynamic.resumed(training.step, training.layers, training.world)
        training.rebuild()
        self._progress.gather_bytes()
        if self._in_place is not None:
            self._in_place.sizes = self._progress.sizes
        self._rank_zero.launched(None if self._in_place is None else self._in_place.memory.loss)
        self._saver.copy_if_due(anew=True)

    def _loop(self) -> SessionOutcome:
        training = self._training
        while not self._end.reached:
            self._profiler.before_step(training.step)
            agreed = self._advance()
            self._profiler.after_step(training.step)
            if self._end.agree():
                break
            if agreed.stop:
                return self._rank_zero.ended(ExitReason.STOPPED, f"told to stop; {self._saver.save()}")
            ranks = training.world.size
            outcome = self._plan_follower.follow_plan(agreed.epoch)
            if outcome is not None:
                return outcome
            # Ranks that have just joined know nothing of what was due.
            outcome = self._between_steps(agreed if training.world.size == ranks else None)
            if outcome is not None:
                return outcome
        return self._end.finish()

    def _advance(self) -> Agreed:
        """Train a step; of a schedule without a flush, all steps until the pipeline is drained."""
        if self._asynchronous is None:
            return self._train_step()
        self._apply_changes()
        agreed = self._asynchronous.until_drained()
        stop, epoch = any(one.stop for one in agreed), max(one.epoch for one in agreed)
        return dataclasses.replace(agreed[-1], stop=stop, epoch=epoch)

    def _apply_changes(self) -> None:
        training = self._training
        changes = [
            dynamic.apply(training.step, training.layers, training.world) for dynamic in training.dynamics
        ]
        if any(changes):
            if any(
                changed and d.needs_rebuild for d, changed in zip(training.dynamics, changes, strict=True)
            ):
                training.rebuild()
            training.profile.forget()

    def _train_step(self) -> Agreed:
        training = self._training
        began = time.perf_counter()
        self._apply_changes()
        training.prepare_data()
        measured = training.profile.wants(training.step)
        training.meter.start_step(training.step, by_layer=measured)
        assert training.pipeline is not None
        training.straggler_mitigation.begin_step(
            training.step,
            training.layers,
            training.world.tensor,
            microbatches=training.microbatches,
            exchange=training.exchange_due,
        )
        set_loss_scale(training.loss_scale.value)
        buffers = buffers_at_start(training.world, training.layers)
        loss = training.train_pipeline()
        if buffers is not None:
            buffers.merge(training.world.data.all_gather)
        training.straggler_mitigation.finish_step(
            training.meter.busy_seconds(), microbatches=training.microbatches
        )
        training.complete_gradients()
        for dynamic in training.dynamics:
            dynamic.after_backward(training.layers)
        agreed = self._agree(loss)
        training.exchange_due = agreed.exchange
        if training.straggler_mitigation.changed:
            self._rank_zero.event("workload", **training.straggler_mitigation.as_json())
        loss_scale = training.loss_scale.value
        if training.loss_scale.step_is_sound(agreed.squared_norm, step=training.step):
            self._saver.wait_for_copy()
            optimizer_step(
                training.layers,
                training.config.training,
                training.meter,
                step=training.step,
                total_steps=training.config.total_steps,
                squared_norm=agreed.squared_norm,
                loss_scale=loss_scale,
            )
            gather_weights(training.world, training.layers)
            training.send_tied_weights()
        else:
            drop_gradients(training.layers)
        for dynamic in training.dynamics:
            dynamic.after_optimizer(training.layers)
        self._count_step(agreed, StepDone(measured=measured, seconds=time.perf_counter() - began))
        return agreed

    def _count_step(self, agreed: Agreed, done: StepDone) -> None:
        training = self._training
        training.step += 1
        if done.measured:
            training.profile.add(
                agreed.seconds, agreed.activation_bytes, agreed.passing_bytes, step=training.step - 1
            )
            training.rank_speeds.add(agreed.probes)
        for number, error in self._progress.new_bad_samples().items():
            self._rank_zero.event("badSample", sample=number, error=error)
        fields = self._progress.step_done(agreed.loss, done.seconds, agreed.peak_flops)
        self._rank_zero.reporter.step(**fields)
        self._plan_follower.monitor.step_done()
        self._rank_zero.report()

    def _agree(self, loss: float | None) -> Agreed:
        return agreed_values(self._training, self._training.world.sum(self._figures(loss)))

    def _figures(self, loss: float | None) -> list[float]:
        """This rank's summand."""
        return figures(
            self._training,
            loss,
            stop_votes=self._stop_votes(),
            newest_epoch=self._plan_follower.newest_epoch(),
            check_rebalance=self._plan_follower.monitor.due(),
            end=self._end.requested,
            save=self._saver.wanted(),
            written=self._saver.written,
            peak_flops=self._progress.own_peak_flops,
        )

    def _stop_votes(self) -> int:
        """This rank's, for the end of the job; a step and a save may pass until its state is saved."""
        seconds = self._saver.longest_seconds + max(self._progress.step_seconds(), default=0.0)
        return self._stop.votes(self._training.world.rank, self._training.world.size, seconds)

    def _agree_late(self, summed: list[float], done: StepDone) -> Agreed:
        """Count a step after which all ranks have already continued."""
        agreed = agreed_values(self._training, summed)
        self._count_step(agreed, done)
        return agreed

    def _between_steps(self, agreed: Agreed | None) -> SessionOutcome | None:
        """Do what is due after this step; all that decides it is the same on every rank.

        Returns the outcome where this rank's part ends.
        """
        training, config = self._training, self._training.config
        if training.step >= config.total_steps:
            return None
        ranks = training.world.size
        outcome = self._evaluate_if_due()
        if outcome is not None or self._end.early is not None:
            return outcome
        told = agreed if training.world.size == ranks else None
        if told is not None and told.written and self._saver.settle() and self._end.agree():
            return None
        check_rebalance = told is not None and told.check_rebalance
        every = config.rebalance.every_steps
        if every is None and self._asynchronous is not None:
            every = REBALANCE_EVERY
        if config.rebalance.enabled and (
            check_rebalance or (every is not None and training.step % every == 0)
        ):
            self._plan_follower.rebalance()
        if config.repack.enabled and training.step % config.repack.every_steps == 0:
            self._plan_follower.propose_repack()
        if self._saver.save_if_due(wanted=told is not None and told.save):
            self._end.agree()
        self._saver.copy_if_due(anew=told is None)
        return None

    def _evaluate_if_due(self) -> SessionOutcome | None:
        """Evaluate after this step, from the start again where a new plan has come meanwhile."""
        while self._evaluator.due():
            interrupted = self._evaluator.evaluate()
            if interrupted is None:
                self._rank_zero.report()
                self._end.agree()
                return None
            if interrupted.stop:
                return self._rank_zero.ended(ExitReason.STOPPED, f"told to stop; {self._saver.save()}")
            outcome = self._plan_follower.follow_plan(interrupted.epoch)
            if outcome is not None:
                return outcome
        return None
