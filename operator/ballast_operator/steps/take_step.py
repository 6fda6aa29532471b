"""Asks the state machine for a job's next move, and turns it into objects, conditions and messages."""

import dataclasses
import math
from collections.abc import Sequence

from ballast_policies.contract import Directive, Plan
from ballast_policies.protocol import Decision, next_move
from ballast_policies.protocol.moves import (
    AbandonGrowth,
    BeginGrowth,
    CreatePods,
    DeleteJob,
    End,
    GiveUp,
    Launch,
    RecordGrowth,
    RecordShrink,
    RefuseProposal,
    Release,
    State,
    Succeed,
    Wait,
    WritePlan,
)
from ballast_policies.protocol.observed import Deadline, Observed, Phase

from ballast_operator.steps import context as actions
from ballast_operator.steps.context import (
    Action,
    DeletePod,
    ReconcileContext,
    StepResult,
    seconds_since,
    with_status,
)
from ballast_operator.steps.failure import why_it_ends
from ballast_operator.steps.gang import await_pods, write_first_plan
from ballast_operator.steps.growing import (
    abandon_growth,
    begin_growth,
    create_newcomers,
    record_growth,
    write_grown_plan,
)
from ballast_operator.steps.observed import observed, seconds_left
from ballast_operator.steps.running import LOOK_SECONDS, next_look, recreate_owned_objects, track_progress
from ballast_operator.steps.shrinking import record_shrink, refuse_proposal, write_shrink
from ballast_operator.steps.stopping import (
    ask_to_save,
    begin_termination,
    fail_at_limit,
    release_gpus,
    succeed,
)
from ballast_operator.steps.waiting import launch, wait, with_size
from ballast_operator.views.pod import PodView

NOTICEABLE = 0.2
"""A relative change of the rate that is told to a gang that trains: checkpoints go by its square root."""


def failures_per_hour(context: ReconcileContext, plan: Plan) -> float | None:
    """Losses of a machine an hour, summed over the machines of the plan's ranks; None: they stay.

    One digit after the first: a rate that moves with each hour without a loss is no news.
    """
    allocation = context.view.status.allocation
    stated = context.view.is_script or context.spec.config.checkpoint.every_steps is not None
    if allocation is None or stated:
        return None
    pod_on = {allocation.node_of.get(pod, pod): pod for pod in plan.pods}
    rate = sum(context.pool_of(pod).losses_per_hour or 0.0 for pod in pod_on.values())
    return float(f"{rate:.1e}") if rate else None


def with_failures(context: ReconcileContext, wanted: Sequence[Action]) -> tuple[Action, ...]:
    """``wanted`` with the rate in plans to train by."""
    return tuple(
        _told(context, action) if isinstance(action, actions.WritePlan) else action for action in wanted
    )


def _told(context: ReconcileContext, action: actions.WritePlan) -> actions.WritePlan:
    if action.plan.directive is Directive.CHECKPOINT_AND_STOP:
        return action
    rate = failures_per_hour(context, action.plan)
    return actions.WritePlan(action.plan.replace(failures_per_hour=rate))


def changed_rate(context: ReconcileContext) -> tuple[Action, ...]:
    """The plan in force again, of the same epoch, where the rate has changed by much; else nothing."""
    view, plan = context.view, context.view.launched_plan
    if plan is None or not view.acknowledged or not view.plan_intact:
        return ()
    if plan.directive is Directive.CHECKPOINT_AND_STOP:
        return ()
    before, now = plan.failures_per_hour, failures_per_hour(context, plan)
    if before == now or (before and now and abs(now - before) <= NOTICEABLE * before):
        return ()
    return (actions.WritePlan(plan.replace(failures_per_hour=now)),)


WITH_PLAN = frozenset({State.TRAINING, State.SHRINKING, State.JOINING, State.GROWING})
"""States in which the gang's reports are followed."""


LEAST_SECONDS = 0.1
"""Until a deadline that is about to pass is looked at again."""


def take_step(context: ReconcileContext) -> StepResult:
    """The machine's next move for the job, as a result."""
    seen = observed(context)
    decision = next_move(seen)
    if decision.state in WITH_PLAN and not isinstance(decision.move, End):
        context = with_status(context, track_progress(context))
    result = _carry_out(context, decision)
    again = result.requeue_after_seconds
    lost: tuple[Action, ...] = ()
    if decision.state in WITH_PLAN and not isinstance(decision.move, End):
        again = _soon_if_something_ends(seen, again)
        again = min(again, max(LEAST_SECONDS, seconds_left(context, Deadline.NOTICE)))
        lost = () if isinstance(decision.move, WritePlan) else recreate_owned_objects(context)
        if decision.state is State.TRAINING and isinstance(decision.move, Wait) and not lost:
            lost = changed_rate(context)
    return dataclasses.replace(
        result,
        actions=(*lost, *_deletions(context, decision), *with_failures(context, result.actions)),
        requeue_after_seconds=again,
        needs_fresh_view=decision.needs_fresh_view,
    )


def _carry_out(context: ReconcileContext, decision: Decision) -> StepResult:
    match decision.move:
        case Wait() as waiting:
            return _wait(context, decision.state, waiting)
        case CreatePods(pods) if decision.state is State.STARTING:
            return await_pods(context, pods)
        case CreatePods(pods):
            return create_newcomers(context, pods)
        case WritePlan(epoch, Directive.RUN):
            return write_first_plan(context, epoch)
        case WritePlan(epoch, Directive.SHRINK, kept):
            return write_shrink(context, epoch, kept)
        case WritePlan(epoch, Directive.GROW):
            return write_grown_plan(context, epoch)
        case WritePlan(epoch):
            return ask_to_save(context, epoch)
        case RefuseProposal():
            return refuse_proposal(context)
        case Launch(gang):
            return launch(context, gang)
        case BeginGrowth(gang):
            return begin_growth(context, gang)
        case AbandonGrowth() as given_up:
            return abandon_growth(context, given_up)
        case RecordGrowth(gang):
            return record_growth(context, gang)
        case RecordShrink() as shrunk:
            return record_shrink(context, shrunk)
        case End(_, cause) as end:
            return begin_termination(context, cause, why_it_ends(context, end))
        case Release(failed):
            return release_gpus(context, failed=failed)
        case Succeed():
            return succeed(context)
        case GiveUp():
            return fail_at_limit(context)
        case DeleteJob():
            return StepResult(status=context.view.status, actions=(actions.DeleteJob(context.view.uid),))


def _wait(context: ReconcileContext, state: State, waiting: Wait) -> StepResult:
    if state is State.WAITING:
        return wait(context, waiting)
    if state is State.STARTING:
        return await_pods(context, ())
    status = context.view.status
    if state is State.TRAINING:
        return StepResult(status=with_size(context), requeue_after_seconds=next_look(context))
    if waiting.until is None:
        return StepResult(status=status, requeue_after_seconds=context.settings.exit_seconds)
    left = seconds_left(context, waiting.until)
    return StepResult(status=status, requeue_after_seconds=None if math.isinf(left) else max(left, 0.0))


def _deletions(context: ReconcileContext, decision: Decision) -> tuple[DeletePod, ...]:
    pods = {pod.name: pod for pod in context.view.pods}
    return tuple(
        DeletePod(
            name,
            pods[name].uid,
            grace_seconds=0 if name in decision.force else _shorter_grace(context, pods[name]),
        )
        for name in decision.delete
    )


def _shorter_grace(context: ReconcileContext, pod: PodView) -> int | None:
    """Seconds from SIGTERM to SIGKILL where the pod's node goes before its own grace is over; else None."""
    allocation = context.view.status.allocation
    leaving = allocation.leaving if allocation is not None else None
    if leaving is None or pod.leaves is None:
        return None
    left = -seconds_since(context, leaving.at)
    if not 0 < left < pod.grace_seconds + 1:
        return None
    return min(pod.grace_seconds, max(1, math.floor(left - 1)))


def _soon_if_something_ends(seen: Observed, again: float | None) -> float:
    """A gang of which a rank or a node has ended is looked at each second: the others' ends may follow."""
    ended = (pod for pod in seen.gang_pods if not (seen.script and pod.phase is Phase.SUCCEEDED))
    if any(not pod.alive or not pod.node_ready for pod in ended):
        return min(again or 1.0, 1.0)
    return LOOK_SECONDS if again is None else min(again, LOOK_SECONDS)
