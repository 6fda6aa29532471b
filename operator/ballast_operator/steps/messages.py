"""Conditions of a job on its trainer's messages: whether they can be used, and whether a script sends any."""

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.steps.context import ReconcileContext, seconds_since, with_condition

CLIENT_SECONDS = 30.0
"""After the plan's writing, until a script that has not acknowledged it counts as one without the client."""


def with_refused_messages(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status with the condition MessagesReadable; without it as long as no message was refused."""
    lease, known = context.view.lease, status.condition(JobCondition.MESSAGES_READABLE)
    if lease is not None and lease.refused:
        message = f"{lease.refused}; the last good message of this kind stays in force"
        return with_condition(
            context, status, JobCondition.MESSAGES_READABLE, False, JobReason.MESSAGE_REFUSED, message[:1024]
        )
    if known is None or known.is_true or lease is None:
        return status
    message = "the trainer's messages are readable again"
    return with_condition(
        context, status, JobCondition.MESSAGES_READABLE, True, JobReason.ALL_MESSAGES_READ, message
    )


def with_reporting(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status of a running script with the condition Reporting: what is lost without the client."""
    view, allocation = context.view, context.allocation
    if view.has_spoken:
        message = "the command reports progress and speed, and is asked to save before it is stopped"
        return with_condition(
            context, status, JobCondition.REPORTING, True, JobReason.CLIENT_CONNECTED, message
        )
    # What has reported in an earlier launch has the time that a trainer has.
    known = status.is_true(JobCondition.REPORTING)
    limit = context.settings.start_seconds if known else CLIENT_SECONDS
    if view.plan_written is None or seconds_since(context, view.plan_written) < limit:
        return status
    speed = "as stated in spec.throughput"
    if allocation.gpu_type not in context.spec.throughput:
        speed = f"as assumed, since spec.throughput does not have {allocation.gpu_type}"
    message = (
        "the command has not used the client library: its progress, loss and speed are not known, its speed "
        f"counts {speed}, and it gets SIGTERM alone before it is stopped. "
        "To fix: add the client's lines to it (docs/tasks/run-any-script.md)"
    )
    return with_condition(context, status, JobCondition.REPORTING, False, JobReason.NO_CLIENT, message)
