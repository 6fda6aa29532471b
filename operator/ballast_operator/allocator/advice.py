"""Conditions that the allocator sets on each job: inputs, deadline, budget, placement."""

from collections.abc import Sequence

from ballast_policies.allocation.problem import Allocation

from ballast_operator.allocator.costs.forecasts import limit_advice, refused_advice
from ballast_operator.allocator.deadlines import deadline_advice
from ballast_operator.allocator.problem.inputs import CompletedProblem
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.allocator.problem.speeds.consolidated import placement_advice
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.kube.kinds import Key
from ballast_operator.views.assignment import Advice
from ballast_operator.views.job import JobView


def advice_by_job(
    policy: str, snapshot: Snapshot, inputs: CompletedProblem, allocation: Allocation, jobs: Sequence[JobView]
) -> dict[Key, tuple[Advice, ...]]:
    """Job -> its conditions; a job that no default was ever used for has no ``InputsComplete``."""
    views = {view.key: view for view in jobs}
    found = {}
    for job in inputs.problem.jobs:
        key = snapshot.by_name[job.name].key
        advice = deadline_advice(policy, job, allocation)
        advice += limit_advice(policy, snapshot, snapshot.by_name[job.name], views[key], allocation)
        advice += placement_advice(snapshot, snapshot.by_name[job.name])
        defaults = inputs.job_defaults.get(job.name, ())
        if defaults:
            message = f"{policy} needs {'; '.join(defaults)}. To fix: set the field"
            missing = Advice(
                type=JobCondition.INPUTS_COMPLETE,
                value=False,
                reason=JobReason.DEFAULTS_USED,
                message=message,
            )
            advice = (missing, *advice)
        elif views[key].status.condition(JobCondition.INPUTS_COMPLETE) is not None:
            message = f"{policy} uses no default for it"
            full = Advice(
                type=JobCondition.INPUTS_COMPLETE, value=True, reason=JobReason.COMPLETE, message=message
            )
            advice = (full, *advice)
        if advice:
            found[key] = advice
    for refused in snapshot.refused:
        advice = refused_advice(snapshot, views[refused.key])
        if advice:
            found[refused.key] = advice
    return found
