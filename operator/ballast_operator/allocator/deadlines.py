"""The condition ``OnTime``: which deadlines a policy keeps, and why not the others."""

from ballast_policies.allocation.problem import Allocation, Job
from ballast_policies.allocation.registry import find_policy

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.views.assignment import Advice


def deadline_advice(policy: str, job: Job, allocation: Allocation) -> tuple[Advice, ...]:
    """The job's condition ``OnTime``; nothing where it has no deadline or the policy reads none.

    A policy that was replaced by the fallback has not looked at deadlines: then there is no condition either.
    """
    if job.deadline is None or allocation.policy != policy:
        return ()
    if not find_policy(policy).names_unmet_deadlines:
        return ()
    if job.name not in allocation.unmet_deadlines:
        message = f"{policy} gives the job the GPUs that its deadline needs"
        return (_advice(True, JobReason.DEADLINE_WITHIN_REACH, message),)
    if job.deadline <= 0:
        message = "spec.deadline has passed; the job continues without one. To fix: set a later spec.deadline"
        return (_advice(False, JobReason.DEADLINE_PASSED, message),)
    fastest = max(job.throughput.values(), default=0.0)
    steps = job.steps_remaining or 0.0
    if fastest <= 0 or steps / fastest > job.deadline:
        needed = (
            f"{in_two_digits(steps / fastest)} on its fastest GPUs" if fastest > 0 else "GPUs that can run it"
        )
        message = (
            f"the remaining steps need {needed} and spec.deadline is in "
            f"{in_two_digits(job.deadline)}; "
            "the job continues without a deadline. To fix: set a later spec.deadline, or lower totalSteps"
        )
        return (_advice(False, JobReason.DEADLINE_OUT_OF_REACH, message),)
    message = (
        "jobs with earlier deadlines need the same GPUs; the job continues without a deadline. "
        "To fix: set a later spec.deadline, or add nodes"
    )
    return (_advice(False, JobReason.DEADLINE_CONTENDED, message),)


def _advice(value: bool, reason: JobReason, message: str) -> Advice:
    return Advice(type=JobCondition.ON_TIME, value=value, reason=reason, message=message)


def in_two_digits(seconds: float) -> str:
    """A duration by two digits: it changes as time passes, and each change is a write."""
    for unit, length in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds:.2g} s"
