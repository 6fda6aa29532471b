"""A plan that is written waits for the gang's word, and no longer than it may."""

from ballast_policies.contract import Plan

from ballast_operator.steps.outcome import Outcome, Situation, seconds_since
from ballast_operator.steps.stopping import end
from ballast_operator.views.status import Cause


def awaited(situation: Situation, plan: Plan, *, change: str, seconds: float, cause: Cause) -> Outcome | None:
    """What to do while ``plan`` is not acknowledged: wait, or end the launch by ``cause``; None: it is.

    Args:
        situation: of the job; its plan has been written.
        plan: the one that is to be acknowledged.
        change: what it does, in the message's word ("shrink").
        seconds: from the plan's writing to the end of patience.
        cause: of the end.
    """
    view = situation.view
    assert view.plan_written is not None
    if view.acknowledged:
        return None
    left = seconds - seconds_since(situation, view.plan_written)
    if left > 0:
        return Outcome(status=view.status, again_seconds=left)
    return end(
        situation,
        cause,
        f"the {change} to {len(plan.ranks)} pods (epoch {plan.epoch}) was not acknowledged within "
        f"{seconds:g} s; restarting from the checkpoint",
    )
