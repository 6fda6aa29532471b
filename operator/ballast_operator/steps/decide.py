"""A job's pass: from a view to a result, without side effects."""

import dataclasses
import datetime
import math

from ballast_policies.contract.plan import Directive, Plan
from ballast_policies.protocol import observed as protocol
from ballast_policies.protocol.machine import next_move
from ballast_policies.protocol.moves import (
    AbandonGrowth,
    BeginGrowth,
    CreatePods,
    Decision,
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
from ballast_policies.protocol.observed import Cause, Deadline, Observed, Phase
from ballast_policies.scheduling.assignments import Assignment

from ballast_operator.api.conditions import JobCondition, JobReason, JobState
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.errors import NameTaken, NotAllowed, OperatorError, ServerInternalError
from ballast_operator.settings import JobSettings
from ballast_operator.steps import context as actions
from ballast_operator.steps.accounting import (
    account_suspension,
    limits_reached,
    seconds_to_next_limit,
    with_cost_for_budget,
    with_cost_of_last_team,
    with_ended_pods,
    with_sharer,
    with_team,
)
from ballast_operator.steps.context import (
    Action,
    DeletePod,
    ReconcileContext,
    StepResult,
    Surroundings,
    apply_allocator_conditions,
    seconds_since,
    with_status,
)
from ballast_operator.steps.gang import await_pods, launch, wait, with_size, write_first_plan
from ballast_operator.steps.observed import observed, seconds_left
from ballast_operator.steps.resizing import (
    begin_growth,
    create_newcomers,
    give_up_growth,
    record_growth,
    record_shrink,
    refuse_proposal,
    why_abandoned,
    with_leaving_nodes,
    write_grown_plan,
    write_shrink,
)
from ballast_operator.steps.running import (
    LOOK_SECONDS,
    next_look,
    recreate_owned_objects,
    track_progress,
    with_refused_messages,
    with_saved_step,
)
from ballast_operator.steps.stopping import (
    ask_to_save,
    begin_termination,
    fail_at_limit,
    let_go,
    release_gpus,
    succeed,
    why_it_ends,
    with_stuck_pods,
)
from ballast_operator.views.clock import Time, show
from ballast_operator.views.job import JobView
from ballast_operator.views.pod import PodView
from ballast_operator.views.spec import BEING_PLANNED

PLANNED_SOON_SECONDS = 2.0
"""A new job is told only after this long that its degrees are being planned."""


def decide(
    view: JobView,
    *,
    assignment: Assignment | None,
    around: Surroundings,
    now: Time,
    settings: JobSettings,
) -> StepResult:
    """The result of a pass over a job now; ``assignment`` None: the allocator has not decided yet."""
    stored, held = view.status, view.status.allocation is not None and view.spec is not None
    if view.deleting and (view.orphans or not held):
        return StepResult(status=view.status, actions=_last_deletions(view))
    longest_pause = datetime.timedelta(seconds=settings.restart_max_seconds)
    status = view.status.none_after(now + longest_pause, now).replace(observed_generation=view.generation)
    if status.allocation is not None and status.finished:  # by hand: the operator's end frees the GPUs
        status = status.without_end()
    view = dataclasses.replace(view, status=_with_lost_conditions(status, now, view.generation))
    spec = view.launched_spec
    if spec is None:
        age = math.inf if view.created is None else (now - view.created).total_seconds()
        soon = view.spec_problem == BEING_PLANNED and 0 <= age < PLANNED_SOON_SECONDS
        again = PLANNED_SOON_SECONDS if soon else None
        return StepResult(status=_without_spec(view, now), write_later=soon, requeue_after_seconds=again)
    if view.blocked is not None and view.status.allocation is None:
        later = f"; the operator asks again every {settings.ask_again_seconds:.0f} s"
        assignment = Assignment(
            action=protocol.Action.RELEASE,
            launches=view.status.launches,
            reason=view.blocked.reason,
            why=view.blocked.message + (later if view.blocked.may_pass else ""),
        )
    context = ReconcileContext(
        view=view, spec=spec, assignment=assignment, around=around, now=now, settings=settings
    )
    if view.deleting and view.alive:
        ended = with_ended_pods(context, view.status)
        return StepResult(status=stored if ended is view.status else ended, actions=_last_deletions(view))
    before = view.status
    if not view.status.finished:
        context = with_status(context, with_cost_of_last_team(context))
        context = with_status(context, with_cost_for_budget(context))
        status = apply_allocator_conditions(context, limits_reached(context))
        status = account_suspension(context, status)
        status = with_leaving_nodes(context, with_refused_messages(context, status))
        status = with_saved_step(context, with_ended_pods(context, status))
        context = with_status(context, status)
    result = let_go(context) if view.deleting else take_step(context)
    status = with_team(context, with_sharer(context, before, result.status))
    result = dataclasses.replace(result, status=status)
    again, limit = result.requeue_after_seconds, seconds_to_next_limit(context)
    if math.isinf(limit):
        return result
    return dataclasses.replace(result, requeue_after_seconds=limit if again is None else min(again, limit))


def _without_spec(view: JobView, now: Time) -> TrainingJobStatus:
    planned = view.spec_problem.startswith(BEING_PLANNED)
    return view.status.with_condition(
        JobCondition.ADMITTED,
        False,
        JobReason.PENDING if planned else JobReason.MISCONFIGURED,
        view.spec_problem,
        now=now,
        generation=view.generation,
    )


def _with_lost_conditions(status: TrainingJobStatus, now: Time, generation: int) -> TrainingJobStatus:
    """The status with the conditions that others have taken out and that no later pass would set again."""

    def told(kind: JobCondition, value: bool, reason: JobReason, message: str) -> TrainingJobStatus:
        if status.condition(kind) is not None:
            return status
        return status.with_condition(kind, value, reason, message, now=now, generation=generation)

    if status.allocation is not None:
        decision = status.last_decision
        why = (decision.why or decision.chosen) if decision is not None else ""
        return told(JobCondition.ADMITTED, True, JobReason.ASSIGNED, why or "GPUs are assigned")
    if status.finished_at is None:
        return status
    message = f"it ended at {show(status.finished_at)}"
    if not status.finished:
        end = JobCondition.SUCCEEDED if status.state is JobState.SUCCEEDED else JobCondition.FAILED
        status = status.with_condition(end, True, JobReason.FINISHED, message, now=now, generation=generation)
    status = told(JobCondition.ADMITTED, False, JobReason.FINISHED, message)
    return told(JobCondition.RUNNING, False, JobReason.FINISHED, message)


def refused(view: JobView, error: OperatorError, *, now: Time, settings: JobSettings) -> StepResult | None:
    """An object of the job cannot be made: the launch ends, and its GPUs are free; None: there is no launch.

    What is wrong with the job itself counts toward ``backoffLimit``, so that it is not tried without end.
    What the cluster does not allow now, or an object of somebody else in the way, is tried again after
    pauses that double, and does not count.
    """
    allocation, spec = view.status.allocation, view.launched_spec
    if spec is None or allocation is None or allocation.ending is not None:
        return None
    context = ReconcileContext(view=view, spec=spec, assignment=None, now=now, settings=settings)
    plan = view.launched_plan
    if allocation.joining and plan is not None and plan.rank_of(allocation.joining[0]) is None:
        return give_up_growth(context, str(error))
    match error:
        case NameTaken():
            return begin_termination(context, Cause.NAME_TAKEN, str(error))
        case NotAllowed() | ServerInternalError():
            return begin_termination(
                context, Cause.NOT_ALLOWED, f"the cluster does not allow it now: {error}"
            )
    return begin_termination(
        context, Cause.USER_ERROR, f"the API server refused an object of the job: {error}"
    )


def _last_deletions(view: JobView) -> tuple[DeletePod, ...]:
    """Pods of a job that is being deleted, so that their GPUs do not wait for a finalizer of somebody else.

    What the job owns beside them is the garbage collector's, and so are pods that the deletion is to leave.
    """
    if view.orphans:
        return ()
    return tuple(DeletePod(pod.name, pod.uid) for pod in view.pods if pod.alive and not pod.leaving)


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


def with_failures(context: ReconcileContext, action: Action) -> Action:
    """``action``; of a plan to train by, with the rate."""
    if not isinstance(action, actions.WritePlan) or action.plan.directive is Directive.CHECKPOINT_AND_STOP:
        return action
    rate = failures_per_hour(context, action.plan)
    return actions.WritePlan(action.plan.replace(failures_per_hour=rate))


def plan_at_new_interruption_rate(context: ReconcileContext) -> tuple[Action, ...]:
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
"""Least seconds until a deadline that is about to pass is looked at again."""


def take_step(context: ReconcileContext) -> StepResult:
    """The machine's next move for the job, as a result."""
    seen = observed(context)
    decision = next_move(seen)
    if decision.state in WITH_PLAN and not isinstance(decision.move, End):
        context = with_status(context, track_progress(context))
    result = _carry_out(context, decision)
    again = result.requeue_after_seconds
    lost: tuple[Action, ...] = ()
    restores: tuple[str, ...] = ()
    if decision.state in WITH_PLAN and not isinstance(decision.move, End):
        again = _soon_if_something_ends(seen, again)
        again = min(again, max(LEAST_SECONDS, seconds_left(context, Deadline.NOTICE)))
        if not isinstance(decision.move, WritePlan):
            lost, restores = recreate_owned_objects(context)
        if decision.state is State.TRAINING and isinstance(decision.move, Wait) and not lost:
            lost = plan_at_new_interruption_rate(context)
    return dataclasses.replace(
        result,
        actions=(
            *lost,
            *_deletions(context, decision),
            *(with_failures(context, action) for action in result.actions),
        ),
        requeue_after_seconds=again,
        needs_fresh_view=decision.needs_fresh_view,
        restores=restores,
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
            return give_up_growth(context, why_abandoned(context, given_up))
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
        status = with_stuck_pods(context)
        return StepResult(status=status, requeue_after_seconds=context.settings.exit_seconds)
    left = seconds_left(context, waiting.until)
    return StepResult(status=status, requeue_after_seconds=None if math.isinf(left) else max(left, 0.0))


def _deletions(context: ReconcileContext, decision: Decision) -> tuple[DeletePod, ...]:
    pods, allocation = {pod.name: pod for pod in context.view.pods}, context.view.status.allocation
    running = allocation.pods if allocation is not None and allocation.ending is None else ()
    # Sidecars end with their pod, and not before the end of its trainer is written down.
    lingering = tuple(
        DeletePod(name, pod.uid)
        for name, pod in pods.items()
        if pod.lingers and not pod.leaving and name not in running and name not in decision.delete
    )
    return lingering + tuple(
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
