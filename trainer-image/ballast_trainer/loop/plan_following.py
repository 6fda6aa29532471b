"""Plan following between two steps: new plans, rebalances, proposals to repack.

All of it is collective: every rank calls the same function after the same step.
"""

import dataclasses
import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any

from ballast_policies.contract.messages import ExitReason, Proposal, Stage
from ballast_policies.contract.plan import Directive, Plan
from ballast_policies.planning.balancers.registry import BALANCERS
from ballast_policies.planning.launch import partition_of, stages_over, usable_stages
from ballast_policies.planning.rebalance import RebalanceDecision, revert

from ballast_trainer.distributed.heartbeat import RankHeartbeat
from ballast_trainer.distributed.joining import ANSWER_SECONDS, call_new_ranks, new_ranks_ready
from ballast_trainer.loop.migrate import MigrationFailed
from ballast_trainer.loop.progress import Progress, SessionOutcome, stages_as_json
from ballast_trainer.loop.rebalance_monitor import RebalanceMonitor
from ballast_trainer.loop.replanning import (
    LayerSizes,
    best_stages,
    layer_sizes,
    predicted_step_seconds,
    rebalance_decision,
    repack_proposal,
)
from ballast_trainer.loop.reshape import CutRefused, grow, move_layers, shrink
from ballast_trainer.loop.saving import Saver
from ballast_trainer.profiling.profile import LayerCosts
from ballast_trainer.profiling.rank_speeds import link_seconds
from ballast_trainer.profiling.stopwatch import Stopwatch

logger = logging.getLogger(__name__)


class PlanFollower:
    """Changes of shape, decided by the plan or by rank 0."""

    def __init__(self, progress: Progress, saver: Saver, heartbeat: RankHeartbeat | None = None) -> None:
        """Prepare; ``saver`` is of the state that a change of ranks must not lose."""
        self._model, self._run, self._progress = progress.model, progress.run, progress
        self._saver, self._heartbeat = saver, heartbeat
        self._proposal: Proposal | None = None
        self._refused_epoch = 0
        self._unanswered = (0, 0.0)
        """The growth whose new ranks did not answer, and until when they are not called again."""
        self.monitor = RebalanceMonitor(progress)
        self._refused_cuts: set[tuple[Stage, ...]] = set()

    def watch_peers(self) -> None:
        """Watch the ranks of the process group in force."""
        if self._heartbeat is not None:
            self._heartbeat.watch(self._model.world.processes)

    def newest_epoch(self) -> int:
        """The newest plan's epoch, on rank 0; a plan that grows counts once its new ranks are there."""
        if self._progress.channel is None:
            return 0
        plan, world = self._progress.channel.plan(), self._model.world
        if self._takes_for_lost(plan):
            return self._run.plan.epoch
        if plan.directive is Directive.GROW:
            waits = plan.epoch == self._unanswered[0] and monotonic() < self._unanswered[1]
            if waits or not new_ranks_ready(world, plan):
                return self._run.plan.epoch
        return plan.epoch

    def _plan_to_follow(self) -> Plan | None:
        """Rank 0's newest plan, which may be newer than the one that it told of; None: none for now."""
        channel, world = self._progress.channel, self._model.world
        if channel is None:
            return None
        plan = channel.plan()
        if self._takes_for_lost(plan):
            return None
        if plan.directive is not Directive.GROW or not self.is_news(plan.epoch):
            return plan
        if call_new_ranks(world, plan, replaced=lambda: channel.plan() != plan):
            return plan
        logger.warning("plan %d waits: not all of its new ranks answer", plan.epoch)
        self._unanswered = plan.epoch, monotonic() + ANSWER_SECONDS
        return None

    def _takes_for_lost(self, plan: Plan) -> bool:
        """True if a plan takes rank 0 for lost: the others follow it as soon as they miss it."""
        first = self._model.world.processes[0]
        return plan.launch == self._run.plan.launch and plan.rank_of(first) is None

    def is_news(self, epoch: int) -> bool:
        """True if the plan of ``epoch`` has yet to be followed."""
        return epoch > max(self._run.plan.epoch, self._refused_epoch)

    def follow_plan(self, epoch: int) -> SessionOutcome | None:
        """Follow the plan of ``epoch``, if it is new; returns the outcome where this rank's part ends."""
        model = self._model
        if not self.is_news(epoch):
            return None
        plan: Plan | None = model.world.from_rank_0(self._plan_to_follow())
        if plan is None:
            return None
        self._proposal = None
        old, new = set(model.world.processes), {rank.process for rank in plan.ranks}
        stop = plan.directive is Directive.CHECKPOINT_AND_STOP or plan.launch != self._run.plan.launch
        if stop or not (new <= old or new > old):
            stopped = self._saver.save_and_stop(f"plan {plan.epoch} stops the job")
            self._progress.acknowledge_stop(plan.epoch)
            return stopped
        if self._heartbeat is not None:
            # Ranks leave and join until the new process group is complete.
            self._heartbeat.watch((), joining=new - old)
        outcome = None
        try:
            if old == new:
                self._same_ranks(plan)
            else:
                outcome = self._other_ranks(plan, old, new)
        except MigrationFailed as error:
            self._refused_epoch = plan.epoch
            logger.warning("plan %d is not followed: %s", plan.epoch, error)
            self._note_refused(error, tuple(plan.stages or ()))
        if outcome is None:
            self.watch_peers()
        return outcome

    def _same_ranks(self, plan: Plan) -> None:
        model = self._model
        asked = self._asked(plan, model.placement(model.world.size), otherwise="layers stay where they are")
        pause_ms = None
        if asked is not None and asked != model.stages:
            reshaped = move_layers(model, self._run, asked)
            self._progress.reshaped()
            self._progress.migrated(reshaped)
            pause_ms = reshaped.pause_ms
        self._run.plan = plan
        model.world = dataclasses.replace(model.world, epoch=plan.epoch)
        self._progress.acknowledge(pause_ms=pause_ms)

    def _asked(self, plan: Plan, placement: tuple[int, ...], *, otherwise: str) -> tuple[Stage, ...] | None:
        """A plan's stages; None: it has none, or they do not fit, which is told with what is done instead."""
        layers = self._model.definition.layer_count
        asked = usable_stages(plan.stages, placement, layers)
        if plan.stages and asked is None and self._model.world.rank == 0:
            reason = (
                f"plan.stages: plan {plan.epoch} has {plan.stages[-1].end_layer} layers on ranks "
                f"{[stage.rank for stage in plan.stages]}; the model has {layers}, which "
                f"{self._model.config.pipeline.schedule} has on ranks {list(placement)}"
            )
            fix = "To fix: model.layers, and the operator's version"
            logger.warning("%s: %s. %s", reason, otherwise, fix)
            self._progress.event("cutRefused", stages=stages_as_json(plan.stages), reason=reason)
        return asked

    def _other_ranks(self, plan: Plan, old: set[str], new: set[str]) -> SessionOutcome | None:
        model = self._model
        placement = model.placement(len(plan.ranks))
        stages: tuple[Stage, ...] = model.world.from_rank_0(
            self._asked(plan, placement, otherwise="the trainer cuts by its own measurements")
            or best_stages(model, model.profile.expected(), placement)
        )
        before, costs = model.world.size, self._progress.costs
        predicted = None
        if costs is not None:
            predicted = [predicted_step_seconds(model, costs, of) for of in (model.stages, stages)]
        released = [pod for pod in self._run.plan.pods if pod not in plan.pods]
        # It is written by the ranks of today, in their process group.
        self._saver.settle_all()
        change = shrink if new < old else grow
        reshaped = change(model, self._run, plan, stages)
        if reshaped.released:
            return self._progress.ended(ExitReason.RELEASED, f"released by plan {plan.epoch}")
        if change is grow:
            # Ranks that joined have measured nothing: from here on all measure the same steps.
            model.profile.forget()
        model.rank_speeds.forget()
        self._progress.reshaped(grown=change is grow)
        self._progress.migrated(reshaped)
        self._progress.event(
            "repack" if new < old else "grow",
            epoch=plan.epoch,
            ranks_before=before,
            ranks_after=model.world.size,
            released=released,
            step_seconds_before=predicted[0] if predicted is not None else None,
            step_seconds_after=predicted[1] if predicted is not None else None,
            pause_ms=reshaped.pause_ms,
            stages=stages_as_json(stages),
        )
        self._progress.acknowledge(pause_ms=reshaped.pause_ms)
        return None

    def rebalance(self) -> None:
        """Move layers between the ranks, if rank 0 finds that it pays off."""
        model, progress = self._model, self._progress
        if model.world.positions == 1:
            return
        self._progress.print_figures()
        costs = model.profile.expected()
        if costs is not None:
            self._progress.event("loads", **self._loads(costs))
        watch = Stopwatch()
        sizes = layer_sizes(model)
        links = None
        if BALANCERS[model.config.rebalance.balancer].measures_links:
            links = link_seconds(model.world, model.meter.message_bytes)
        decided = None
        if self._progress.channel is not None:
            decided = self._decided(sizes, links)
            if decided is not None:
                logger.info("step %d: rebalance=%s: %s", self._run.step, decided.rebalance, decided.why)
        decision: RebalanceDecision | None = model.world.from_rank_0(decided)
        decide_ms = watch.milliseconds()
        progress.looked(decide_ms / 1000)
        if decision is None or not decision.rebalance:
            self.monitor.checked(moved_from=None)
            return
        stages = stages_over(decision.partition, model.placement(model.world.size))
        before = progress.imbalance()
        old, measured, reverts = model.stages, progress.step_seconds(), decision.reverts
        try:
            reshaped = move_layers(model, self._run, stages)
        except MigrationFailed as error:
            logger.warning("rebalance at step %d failed: %s", self._run.step, error)
            self._note_refused(error, stages)
            self.monitor.checked(moved_from=None)
            return
        if reverts:
            self.monitor.reverted(old)
        self.monitor.checked(moved_from=None if reverts else old, measured=measured)
        progress.rebalanced(before, reshaped.pause_ms)
        self._progress.migrated(reshaped)
        self._progress.event(
            "rebalance",
            imbalance_before=before,
            imbalance_after=progress.imbalance(),
            step_seconds_before=decision.step_seconds_before,
            step_seconds_after=decision.step_seconds_after,
            decide_ms=decide_ms,
            pause_ms=reshaped.pause_ms,
            stages=stages_as_json(stages),
            **({"reverted": True} if reverts else {}),
            **({} if links is None else {"link_seconds": links}),
        )
        self._progress.tell(now=True)
        model.profile.forget()

    def _loads(self, costs: LayerCosts) -> dict[str, Any]:
        """Costs of the layers, and what the decision reads of them, for ``simulate --loads``."""
        coming = self._model.profile.expected(coming=True)
        rows = [costs.total, (coming or costs).total, *self._model.profile.measured()]
        seconds, expected, *measured = [[float(f"{value:.4g}") for value in row] for row in rows]
        return {
            "seconds": seconds,
            "coming": expected,
            "measured": measured,
            "move_seconds": self._move_seconds(),
        }

    def _move_seconds(self) -> float | None:
        """Cost of a move, in the seconds in which layers are measured; None before the first."""
        taken = self._progress.move_seconds
        return None if taken is None else taken / self.monitor.stretch()

    def _decided(self, sizes: LayerSizes, links: Sequence[float] | None) -> RebalanceDecision | None:
        """Rank 0's decision: the balancer's, or back where the last move measured worse."""
        model = self._model
        back = self.monitor.reverts_to()
        if back is not None:
            return revert(partition_of(model.stages), partition_of(back))
        decided = rebalance_decision(
            model,
            sizes,
            steps_left=model.config.total_steps - self._run.step,
            move_seconds=self._move_seconds(),
            link_seconds=links,
        )
        if decided is None or not decided.rebalance:
            return decided
        stages = stages_over(decided.partition, model.placement(model.world.size))
        if stages in self._refused_cuts:
            return None
        if self.monitor.was_worse(stages):
            logger.info("step %d: %s measured worse before: not tried again", self._run.step, stages)
            return None
        return decided

    def _note_refused(self, error: MigrationFailed, stages: tuple[Stage, ...]) -> None:
        """Stages that cannot run are not tried again by this job's own decisions."""
        if isinstance(error, CutRefused):
            self._refused_cuts.add(stages)
            self._progress.event("cutRefused", stages=stages_as_json(stages), reason=str(error))

    def propose_repack(self) -> None:
        """Propose to release ranks, if rank 0 finds that fewer keep the job's speed."""
        sizes = layer_sizes(self._model)
        if self._progress.channel is None:
            return
        reference = self._progress.reference_step_seconds
        proposal = repack_proposal(self._model, self._run, sizes, reference_step_seconds=reference)
        if proposal is not None and proposal.stages not in self._refused_cuts:
            self._progress.propose(proposal, again=self._proposal is not None)
            self._proposal = proposal
