"""What the policy has to say about each job's own fields: conditions ``Informed`` and ``OnTime``."""

from collections.abc import Sequence

from ballast_policies.allocation.problem import Allocation

from ballast_operator.allocator.deadlines import deadline_advice
from ballast_operator.allocator.inputs import Inputs
from ballast_operator.allocator.snapshot import Snapshot
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import JobView
from ballast_operator.views.wish import Advice


def advice_by_job(
    policy: str, snapshot: Snapshot, inputs: Inputs, allocation: Allocation, jobs: Sequence[JobView]
) -> dict[Key, tuple[Advice, ...]]:
    """Job -> its conditions; a job that no default was ever used for has no ``Informed``."""
    views = {view.key: view for view in jobs}
    found = {}
    for job in inputs.problem.jobs:
        key = snapshot.keys[job.name]
        advice = deadline_advice(policy, job, allocation)
        defaults = inputs.of_jobs.get(job.name, ())
        if defaults:
            message = f"{policy} needs {'; '.join(defaults)}. To fix: set the field"
            missing = Advice(
                type=JobCondition.INFORMED, value=False, reason=JobReason.DEFAULTS_USED, message=message
            )
            advice = (missing, *advice)
        elif views[key].status.condition(JobCondition.INFORMED) is not None:
            message = f"{policy} uses no default for it"
            full = Advice(type=JobCondition.INFORMED, value=True, reason=JobReason.COMPLETE, message=message)
            advice = (full, *advice)
        if advice:
            found[key] = advice
    return found
