"""A written plan waits for rank 0, up to a limit."""

from ballast_operator.api.cause import Cause
from ballast_operator.steps.acknowledgement import await_acknowledgement

from tests.operator.steps.contexts import a_context, a_running_view


def acknowledgement(context):
    return await_acknowledgement(
        context, context.plan, change="shrink", seconds=60.0, cause=Cause.SHRINK_TIMEOUT
    )


def test_an_acknowledged_plan_is_not_waited_for():
    """None: the caller continues."""
    assert acknowledgement(a_context(a_running_view())) is None


def test_an_unacknowledged_plan_is_waited_for_until_the_limit():
    """The job is looked at again when the limit is reached, and not changed before."""
    context = a_context(seconds=45)
    result = acknowledgement(context)
    assert (result.status, result.requeue_after_seconds) == (context.view.status, 15.0)


def test_a_plan_that_is_not_acknowledged_in_time_ends_the_launch():
    """By the given cause; the message has the change, the epoch and the limit."""
    ending = acknowledgement(a_context(seconds=61)).status.allocation.ending
    assert ending.cause is Cause.SHRINK_TIMEOUT
    assert "the shrink to 4 pods (epoch 1) was not acknowledged within 60 s" in ending.message
