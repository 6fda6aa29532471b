"""Which jobs take part in the allocation, and as what policies see them."""

from collections.abc import Mapping

from ballast_policies.allocation.problem import Job

from ballast_operator.api.cause import Cause
from ballast_operator.kube.kinds import job_id
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec


def wants_gpus(view: JobView, now: Time) -> bool:
    """Whether the job takes part in the allocation."""
    status = view.status
    if view.deleting or view.spec is None or status.finished or view.finished_step is not None:
        return False
    if view.blocked is not None and status.allocation is None:
        return False
    if view.hold(now) is not None or (status.next_launch_at is not None and status.next_launch_at > now):
        return False
    return (
        status.allocation is None
        or status.allocation.ending is None
        or status.allocation.ending.cause is not Cause.COMPLETED
    )


def as_job(view: JobView, spec: JobSpec, *, gpus: int, rates: Mapping[str, float], now: Time) -> Job:
    """The job as the policies see it; times in seconds."""
    status = view.status
    done = status.progress.step if status.progress is not None else 0
    elapsed = 0.0 if view.created is None else (now - view.created).total_seconds()
    return Job(
        name=job_id(view.key),
        throughput=rates,
        gpus=gpus,
        weight=spec.weight,
        entity=spec.entity,
        # A job that is about to end still counts: its last step is not announced yet.
        steps_remaining=float(max(1, spec.config.total_steps - done)),
        elapsed=max(0.0, elapsed - status.suspended_seconds),
        isolated_elapsed=status.isolated.seconds if status.isolated is not None else 0.0,
        deadline=None if spec.deadline is None else (spec.deadline - now).total_seconds(),
        budget=None if spec.budget is None else max(0.0, spec.budget - status.cost_so_far),
    )
