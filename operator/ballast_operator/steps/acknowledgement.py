"""Wait for the gang to acknowledge a plan, with a timeout."""

from ballast_policies.contract import Plan

from ballast_operator.api.cause import Cause
from ballast_operator.steps.context import ReconcileContext, StepResult, seconds_since
from ballast_operator.steps.stopping import begin_termination


def await_acknowledgement(
    context: ReconcileContext, plan: Plan, *, change: str, seconds: float, cause: Cause
) -> StepResult | None:
    """Wait while ``plan`` is not acknowledged, or end the launch by ``cause``; None: it is acknowledged.

    Args:
        context: of the job; its plan has been written.
        plan: the one that is to be acknowledged.
        change: what the plan does, for the message ("shrink").
        seconds: limit, from the writing of the plan.
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
