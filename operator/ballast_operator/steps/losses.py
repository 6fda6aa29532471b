"""Rate at which machines of a gang are lost: trainers choose checkpoints by it where none are stated."""

from collections.abc import Sequence

from ballast_policies.contract import Directive, Plan

from ballast_operator.steps.context import Action, ReconcileContext, WritePlan

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


def with_failures(context: ReconcileContext, actions: Sequence[Action]) -> tuple[Action, ...]:
    """``actions`` with the rate in plans to train by."""
    return tuple(_told(context, action) if isinstance(action, WritePlan) else action for action in actions)


def _told(context: ReconcileContext, action: WritePlan) -> WritePlan:
    if action.plan.directive is Directive.CHECKPOINT_AND_STOP:
        return action
    rate = failures_per_hour(context, action.plan)
    return WritePlan(action.plan.replace(failures_per_hour=rate))


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
    return (WritePlan(plan.replace(failures_per_hour=now)),)
