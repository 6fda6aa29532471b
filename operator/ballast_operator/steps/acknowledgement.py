"""A plan that is written waits for the gang's word, and no longer than it may."""

from ballast_policies.contract import Plan

from ballast_operator.api.cause import Cause
from ballast_operator.steps.context import ReconcileContext, StepResult, seconds_since
from ballast_operator.steps.stopping import begin_termination


def await_acknowledgement(
    context: ReconcileContext, plan: Plan, *, change: str, seconds: float, cause: Cause
) -> StepResult | None:
    """What to do while ``plan`` is not acknowledged: wait, or end the launch by ``cause``; None: it is.

    Args:
        context: of the job; its plan has been written.
        plan: the one that is to be acknowledged.
        change: what it does, in the message's word ("shrink").
        seconds: from the plan's writing to the end of patience.
        cause: of the end.
    """
    view = context.view
    assert view.plan_written is not None
    if view.acknowledged:
        return None
    left = seconds - seconds_since(context, view.plan_written)
    if left > 0:
        return StepResult(status=view.status, requeue_after_seconds=left)
    return begin_termination(
        context,
        cause,
        f"the {change} to {len(plan.ranks)} pods (epoch {plan.epoch}) was not acknowledged within "
        f"{seconds:g} s; restarting from the checkpoint",
    )
