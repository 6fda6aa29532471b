"""The training loop of one rank: train a step, agree with the other ranks, reshape where useful."""

import contextlib

from ballast_policies.contract.messages import ExitReason

from ballast_trainer.channel.channel_thread import ChannelThread
from ballast_trainer.distributed.heartbeat import RankHeartbeat
from ballast_trainer.distributed.process_group import peer_failures
from ballast_trainer.distributed.stopping import StopSignal
from ballast_trainer.loop.candidates import Candidates
from ballast_trainer.loop.ending import JobEnd
from ballast_trainer.loop.evaluating import Evaluator
from ballast_trainer.loop.in_place import InPlace
from ballast_trainer.loop.plan_following import PlanFollower
from ballast_trainer.loop.progress import Progress, SessionOutcome
from ballast_trainer.loop.replanning import layer_sizes
from ballast_trainer.loop.reshape import enter_grown
from ballast_trainer.loop.saving import Saver, check_export_place, export_at_end
from ballast_trainer.loop.state import ModelState, RunState
from ballast_trainer.loop.step import Agreed, TrainingStep
from ballast_trainer.pipeline.layout import REBALANCE_EVERY, is_asynchronous
from ballast_trainer.profiling.torch_profile import StepProfiler
from ballast_trainer.reporting.callback import CallingReporter
from ballast_trainer.reporting.console import Reporter


class Session:
    """Trains until the steps are done, the job is stopped or this rank is released.

    Attributes:
        step: trains a step.
        progress: the job's figures.
        close: releases what other runs wait for.
    """

    def __init__(
        self,
        model: ModelState,
        run: RunState,
        *,
        channel_thread: ChannelThread | None,
        reporter: Reporter,
        stop: StopSignal,
        heartbeat: RankHeartbeat | None = None,
        in_place: InPlace | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        self._model, self._run = model, run
        self._heartbeat, self._in_place = heartbeat, in_place
        self._profiler = profiler or StepProfiler(None, rank=0, device=model.device)
        self.progress = Progress(model, run, reporter, channel_thread)
        memory = None if in_place is None else in_place.memory
        self._saver = Saver(self.progress, stop=stop, memory=memory)
        self._plans = PlanFollower(self.progress, self._saver, heartbeat)
        self._candidates = Candidates(self.progress)
        self._evaluator = Evaluator(self.progress, self._plans, self._saver)
        self._end = JobEnd(model, run, reporter if isinstance(reporter, CallingReporter) else None)
        self.close = self._saver.close
        self.step = TrainingStep(self.progress, self._saver, self._plans, self._end)

    def run(self, *, joining: bool = False) -> SessionOutcome:
        """Train; ``joining`` for a rank that enters a running job.

        Raises:
            PeerLost: another rank died or hung.
            CheckpointError: a checkpoint cannot be written or fits another job.
        """
        explained = self._heartbeat.explained() if self._heartbeat else contextlib.nullcontext()
        with self._saver, explained, peer_failures():
            if joining:
                enter_grown(self._model, self._run)
            else:
                self.launch()
            self._plans.watch_peers()
            outcome = None
            if joining:
                # The ranks that were there are between the same two steps.
                outcome = self._between_steps(None)
            elif not self._end.reached:
                # A stop may have come before the evaluation of the step that was saved.
                outcome = self._between_steps(None, launched=True)
            outcome = outcome or self._loop()
            self._profiler.close(self._run.step)
            if self._heartbeat is not None:
                self._heartbeat.close()
            self._model.layers.settle()
            self._saver.settle_all()
            self._model.world.leave()
            return outcome

    def launch(self) -> None:
        """Make the layers or load them, and build the pipeline if a step is left; collective."""
        model = self._model
        # Storage may take long: hung ranks are noticed meanwhile.
        self._plans.watch_peers()
        manifest = self._saver.resume()
        if manifest is None:
            check_export_place(model)
        model.layers.hold(model.layers.make(index) for index in model.held_layers())
        if manifest is not None:
            self._saver.load(manifest)
            self._end.resume()
        model.send_tied_weights()
        for dynamic in model.dynamics:
            dynamic.reapply(self._run.step, model.layers)
        for dynamic in model.dynamics:
            dynamic.resumed(self._run.step, model.layers, model.world)
        self.progress.sizes = layer_sizes(model)
        if self._in_place is not None:
            self._in_place.sizes = self.progress.sizes
        if not self._end.reached:
            model.rebuild(self._run.step)
            self._candidates.begin()
        self.progress.launched(None if self._in_place is None else self._in_place.memory.lost)
        self._saver.copy_if_due(anew=True)

    def _loop(self) -> SessionOutcome:
        model = self._model
        while not self._end.reached:
            self._profiler.before_step(self._run.step)
            agreed = self.step.train()
            self._profiler.after_step(self._run.step)
            if self._end.agree():
                break
            if agreed.stop:
                return self._saver.save_and_stop("told to stop")
            if self._end.reached:
                break
            ranks = model.world.size
            outcome = self._plans.follow_plan(agreed.epoch)
            if outcome is not None:
                return outcome
            # Ranks that have just joined know nothing of what was due.
            outcome = self._between_steps(agreed if model.world.size == ranks else None)
            if outcome is not None:
                return outcome
        return self._finish()

    def _between_steps(self, agreed: Agreed | None, *, launched: bool = False) -> SessionOutcome | None:
        """Do what is due after a step, alike on every rank. Returns the outcome where this rank ends.

        ``launched``: from the state after that step, and only an evaluation is due, unless ranks join in it.
        """
        config, step = self._model.config, self._run.step
        epoch = self._run.plan.epoch
        outcome = self._evaluate_if_due()
        same_plan = self._run.plan.epoch == epoch
        if outcome is not None or self._end.early is not None or (launched and same_plan):
            return outcome
        told = agreed if same_plan else None
        if told is not None and told.written and self._saver.settle() and self._end.agree():
            return None
        check_rebalance = told is not None and told.check_rebalance
        every = config.rebalance.every_steps
        if every is None and is_asynchronous(config.pipeline.schedule):
            every = REBALANCE_EVERY
        if told is None:
            # Ranks that have just joined know of no earlier plan's.
            self._candidates.begin()
        else:
            self._candidates.step_done()
        if not self._candidates.under_way:
            if config.rebalance.enabled and (check_rebalance or (every is not None and step % every == 0)):
                self._plans.rebalance()
            if config.repack.enabled and step % config.repack.every_steps == 0:
                self._plans.propose_repack()
        if self._saver.save_if_due(wanted=told is not None and told.save):
            self._end.agree()
        self._saver.copy_if_due(anew=told is None)
        return None

    def _evaluate_if_due(self) -> SessionOutcome | None:
        """Evaluate after this step, from the start again where a new plan has come meanwhile."""
        while self._evaluator.due():
            interrupted = self._evaluator.evaluate()
            if interrupted is None:
                self.progress.tell()
                self._end.agree()
                return None
            if interrupted.stop:
                return self._saver.save_and_stop("told to stop")
            outcome = self._plans.follow_plan(interrupted.epoch)
            if outcome is not None:
                return outcome
        return None

    def _finish(self) -> SessionOutcome:
        """Save, evaluate, export; collective. Raises CheckpointError: not saved, or not exported."""
        progress, step, total = self.progress, self._run.step, self._model.config.total_steps
        if step > (progress.resumed_from_step or 0):
            progress.print_figures(at_end=True)
        self._saver.save_last()
        self._end.note()
        if (
            self._evaluator.evaluated_step != step
            and self._evaluator.evaluate(follow_plans=False) is not None
        ):
            return self._saver.save_and_stop("told to stop in the last evaluation")
        # No step follows whose report would have them.
        progress.tell()
        export_at_end(progress)
        message, early = f"all {total} steps are done", self._end.early
        if early is not None:
            message = f"ended by its callback after step {step} of {total}: {early}"
            progress.event("endedEarly", reason=early)
        if self._heartbeat is not None:
            # The others end while rank 0 tries to tell.
            self._heartbeat.close()
        if progress.channel is not None:
            progress.channel.close(finished_step=step, end_reason=early)
        return progress.ended(ExitReason.FINISHED, message)
