"""Conditions that the allocator sets on each job: inputs, deadline, budget, placement."""

from collections.abc import Sequence

from ballast_policies.allocation.problem import Allocation
from ballast_policies.scheduling.inputs import CompletedProblem

from ballast_operator.allocator.costs.forecasts import limit_advice, refused_advice
from ballast_operator.allocator.deadlines import deadline_advice
from ballast_operator.allocator.faults import JobFaults
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.allocator.problem.snapshot_job import SnapshotJob
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.kube.kinds import Key
from ballast_operator.views.assignment import Advice
from ballast_operator.views.job import JobView


def advice_by_job(
    policy: str, snapshot: Snapshot, inputs: CompletedProblem, allocation: Allocation, jobs: Sequence[JobView]
) -> dict[Key, tuple[Advice, ...]]:
    """Job -> its conditions; a job that no default was ever used for has no ``InputsComplete``.

    Raises:
        JobFaults: jobs whose conditions cannot be said.
    """
    views = {view.key: view for view in jobs}
    found: dict[Key, tuple[Advice, ...]] = {}
    faults: dict[Key, Exception] = {}
    for job in inputs.problem.jobs:
        one = snapshot.by_name[job.name]
        try:
            found[one.key] = (
                *_inputs_complete(policy, inputs.job_defaults.get(job.name, ()), views[one.key]),
                *deadline_advice(policy, job, allocation),
                *limit_advice(policy, snapshot, one, views[one.key], allocation),
                *_placement_advice(snapshot, one),
            )
        except Exception as error:
            faults[one.key] = error
    for refused in snapshot.refused:
        try:
            found[refused.key] = refused_advice(snapshot, views[refused.key])
        except Exception as error:
            faults[refused.key] = error
    if faults:
        raise JobFaults(faults)
    return {key: advice for key, advice in found.items() if advice}


def _inputs_complete(policy: str, defaults: Sequence[str], view: JobView) -> tuple[Advice, ...]:
    kind = JobCondition.INPUTS_COMPLETE
    if defaults:
        message = f"{policy} needs {'; '.join(defaults)}. To fix: set the field"
        return (Advice(type=kind, value=False, reason=JobReason.DEFAULTS_USED, message=message),)
    if view.status.condition(kind) is None:
        return ()
    message = f"{policy} uses no default for it"
    return (Advice(type=kind, value=True, reason=JobReason.COMPLETE, message=message),)


def _more_nodes_than_needed(snapshot: Snapshot, job: SnapshotJob) -> str:
    """On how many nodes the gang is, if fewer of its pool would hold it; empty: they would not."""
    placement = job.placement
    if placement is None or placement.parts:
        return ""
    count, gpus = len(set(placement.nodes)), len(placement.nodes)
    sizes, barred = snapshot.capacity.node_sizes, job.not_tolerated
    fewest = sizes.in_pool(placement.pool, gpus, per_pod=job.gpus_per_pod, barred=barred)
    if fewest is None or count <= fewest:
        return ""
    text = f"it is on {count} nodes, {fewest} would hold it"
    gang = job.spread
    if gang is None or gang.speed >= gang.packed_speed:
        return text
    # By two digits: speeds change as the job trains, and each change is a write.
    return f"{text}: {gang.speed:.2g} steps/s there, {gang.packed_speed:.2g} on {fewest}"


def _placement_advice(snapshot: Snapshot, job: SnapshotJob) -> tuple[Advice, ...]:
    """The job's condition ``Consolidated``; nothing where it is, or holds no GPUs."""
    text = _more_nodes_than_needed(snapshot, job)
    if not text:
        return ()
    reason = JobReason.ON_MORE_NODES
    return (Advice(type=JobCondition.CONSOLIDATED, value=False, reason=reason, message=text),)
