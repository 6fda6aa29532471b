"""Whether the trainer's messages can be used, as a condition of the job."""

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.steps.context import ReconcileContext, with_condition


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
