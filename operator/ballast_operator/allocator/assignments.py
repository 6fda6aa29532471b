"""From a decision to an assignment for each job."""

import dataclasses
from collections.abc import Mapping, Sequence

from ballast_policies.scheduling import Decision
from ballast_policies.scheduling.assignments import Action, AssignmentErrors, Obstacle, assign

from ballast_operator.allocator.faults import FaultyJob, JobFaults
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.kube.kinds import Key
from ballast_operator.views.assignment import Advice, Assignment
from ballast_operator.views.job import JobView

REASONS = {
    Obstacle.CAPACITY: JobReason.WAITING_FOR_CAPACITY,
    Obstacle.SPOT_LIMIT: JobReason.SPOT_LIMIT,
    Obstacle.TENANT_LIMIT: JobReason.NAMESPACE_LIMIT,
    Obstacle.DRY_RUN: JobReason.DRY_RUN,
}


def assignments_of(
    snapshot: Snapshot, decision: Decision, *, advice: Mapping[Key, tuple[Advice, ...]]
) -> dict[Key, Assignment]:
    """An assignment for each job of the snapshot, for each refused one and for each that is left out.

    ``advice``: job -> conditions that the policy sets on it.

    Raises:
        JobFaults: jobs for which none can be made.
    """
    try:
        wanted = assign(snapshot, decision)
    except AssignmentErrors as faults:
        by_name = {job.name: job.key for job in snapshot.jobs}
        raise JobFaults({by_name[name]: error for name, error in faults.by_job.items()}) from faults
    found: dict[Key, Assignment] = {}
    for job in snapshot.jobs:
        one = wanted[job.name]
        pods = (job.pods[rank // job.gpus_per_pod] for rank in one.kept_ranks)
        found[job.key] = Assignment(
            **{field.name: getattr(one, field.name) for field in dataclasses.fields(one)},
            launches=job.launches,
            kept_pods=tuple(dict.fromkeys(pods)),
            plan_id=decision.plan_id,
            reason=REASONS[one.obstacle] if one.obstacle is not None else "",
            advice=advice.get(job.key, ()),
            layers=job.layers,
        )
    for refused in snapshot.refused:
        found[refused.key] = Assignment(
            action=Action.RELEASE,
            launches=refused.launches,
            plan_id=decision.plan_id,
            reason=refused.refusal.reason,
            why=refused.refusal.message,
            advice=advice.get(refused.key, ()),
        )
    for faulty in snapshot.faulty:
        found[faulty.key] = _left_out(faulty, decision.plan_id)
    return found


def _left_out(job: FaultyJob, plan_id: str) -> Assignment:
    """A job on which nothing is decided: what runs is kept."""
    reason, message = JobReason.INTERNAL_ERROR, job.message
    undecided = Advice(type=JobCondition.DECIDED, value=False, reason=reason, message=message)
    return Assignment(
        action=Action.KEEP if job.runs else Action.RELEASE,
        launches=job.launches,
        plan_id=plan_id,
        reason=reason,
        why=message,
        advice=(undecided,) if job.runs else (),
    )


def waiting_for_policy(jobs: Sequence[JobView], problem: str) -> dict[Key, Assignment]:
    """Without a usable ClusterPolicy: what runs is kept, nothing starts."""
    return {
        view.key: Assignment(
            action=Action.RELEASE if view.status.allocation is None else Action.KEEP,
            launches=view.status.launches,
            reason=JobReason.WAITING_FOR_POLICY,
            why=problem,
        )
        for view in jobs
    }
