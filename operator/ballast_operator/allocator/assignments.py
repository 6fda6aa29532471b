"""From a round to an assignment for each job."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.problem import Allocation, Job
from ballast_policies.allocation.registry import find_policy
from ballast_policies.rounds import ElasticGang, Placement, Round, extra_nodes, kept_ranks
from ballast_policies.scheduling import Decision, isolated_speeds

from ballast_operator.allocator.costs.data_told import data_told
from ballast_operator.allocator.faults import FaultyJob, JobFaults
from ballast_operator.allocator.problem.jobs.snapshot_job import SnapshotJob
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.kube.kinds import Key
from ballast_operator.views.assignment import Advice, Assignment, AssignmentAction
from ballast_operator.views.job import JobView

MOST_CONFIGURATIONS = 3
"""That an elastic job is told of besides its own."""


def assignments_of(
    snapshot: Snapshot,
    decision: Decision,
    *,
    advice: Mapping[Key, tuple[Advice, ...]],
    dry_run: bool,
) -> dict[Key, Assignment]:
    """An assignment for each job of the snapshot, for each refused one and for each that is left out.

    Args:
        snapshot: what was decided on.
        decision: of the round.
        advice: job -> conditions that the policy sets on it.
        dry_run: nothing is to change; each assignment says what would.

    Raises:
        JobFaults: jobs for which none can be made.
    """
    round_, allocation, plan_id = decision.round, decision.allocation, decision.plan_id
    speeds = isolated_speeds(snapshot, snapshot.problem, snapshot.running)
    # The fallback is no policy, and reads no prices.
    by_price = allocation.status != "greedy" and Reads.PRICES in find_policy(allocation.policy).reads
    found: dict[Key, Assignment] = {}
    faults: dict[Key, Exception] = {}
    for job in snapshot.jobs:
        placement = round_.placements.get(job.name)
        try:
            found[job.key] = _assignment(
                job,
                round_,
                allocation,
                snapshot.capacity.gpu_types,
                dry_run=dry_run,
                of_data=data_told(job, placement, snapshot.capacity.pools, by_price=by_price)
                if job.usd_per_step
                else "",
                common={
                    "launches": job.launches,
                    "plan_id": plan_id,
                    "advice": advice.get(job.key, ()),
                    "isolated_speed": speeds.get(job.name, 0.0),
                    "layers": job.layers,
                    **_sharing(snapshot, job, round_),
                    **_gpus_of(snapshot, job, placement or job.placement),
                },
            )
        except Exception as error:
            faults[job.key] = error
    if faults:
        raise JobFaults(faults)
    within_tenant_limits(snapshot, found)
    for refused in snapshot.refused:
        found[refused.key] = Assignment(
            action=AssignmentAction.RELEASE,
            launches=refused.launches,
            plan_id=plan_id,
            reason=refused.refusal.reason,
            why=refused.refusal.message,
            advice=advice.get(refused.key, ()),
        )
    for faulty in snapshot.faulty:
        found[faulty.key] = _left_out(faulty, plan_id)
    return found


def _left_out(job: FaultyJob, plan_id: str) -> Assignment:
    """A job on which nothing is decided: what runs is kept."""
    reason, message = JobReason.INTERNAL_ERROR, job.message
    if not job.runs:
        return Assignment(
            action=AssignmentAction.RELEASE,
            launches=job.launches,
            plan_id=plan_id,
            reason=reason,
            why=message,
        )
    return Assignment(
        action=AssignmentAction.KEEP,
        launches=job.launches,
        plan_id=plan_id,
        reason=reason,
        why=message,
        advice=(Advice(type=JobCondition.DECIDED, value=False, reason=reason, message=message),),
    )


def waiting_for_policy(jobs: Sequence[JobView], problem: str) -> dict[Key, Assignment]:
    """Without a usable ClusterPolicy: what runs is kept, nothing starts."""
    return {
        view.key: Assignment(
            action=AssignmentAction.RELEASE if view.status.allocation is None else AssignmentAction.KEEP,
            launches=view.status.launches,
            reason=JobReason.WAITING_FOR_POLICY,
            why=problem,
        )
        for view in jobs
    }


def _assignment(
    job: SnapshotJob,
    round_: Round,
    allocation: Allocation,
    gpu_types: tuple[str, ...],
    *,
    dry_run: bool,
    of_data: str,
    common: Mapping[str, Any],
) -> Assignment:
    placement, why = round_.placements.get(job.name), round_.reasons.get(job.name, "")
    why = "; ".join(filter(None, (why, of_data, job.left_out)))
    best = next_best(allocation, job.job, gpu_types, chosen=placement.gpu_type if placement else None)
    if job.elastic is not None:
        best = next_best_sizes(job.elastic, allocation.allocation.get(job.name, {}), placement)
    elif job.mixed is not None and not job.mixed.fits_one_pool:
        best = ""  # of one type alone it finds no room
    change = None if job.placement is None or placement is None else _change(job, placement)
    if job.placement is not None and (dry_run or change is not None):
        extra, kept = ((), ()) if dry_run or change is None else change
        return Assignment(
            action=AssignmentAction.KEEP,
            placement=job.placement,
            extra_nodes=extra,
            kept_pods=kept,
            why=why,
            chosen=str(job.placement),
            next_best=best,
            **common,
        )
    if placement is None:
        return Assignment(
            action=AssignmentAction.RELEASE,
            reason=JobReason.SPOT_LIMIT
            if job.name in round_.kept_off_spot
            else JobReason.WAITING_FOR_CAPACITY,
            why=why
            if _has_share(allocation, job.name)
            else f"{allocation.policy} gives it no GPUs yet; {why}",
            next_best=best,
            **common,
        )
    return Assignment(
        action=AssignmentAction.RELEASE if dry_run else AssignmentAction.PLACE,
        placement=placement,
        reason=JobReason.DRY_RUN,
        why=f"would get {placement}: {why}" if dry_run else why,
        chosen=str(placement),
        next_best=best,
        **common,
    )


def _change(job: SnapshotJob, placement: Placement) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(nodes of GPUs that a running gang takes, pods it keeps where it shrinks); None: it moves."""
    held, gang = job.placement, job.elastic
    if held is None or held.pool != placement.pool or (gang is None and placement != held):
        return None
    if (held.parts or placement.parts) and placement != held:
        return None
    more = extra_nodes(held.nodes, placement.nodes)
    if more is not None:
        return more, ()
    kept = kept_ranks(held.nodes, placement.nodes, gang.together if gang is not None else 1)
    if kept is None:
        return None
    return (), tuple(dict.fromkeys(job.pods[rank // job.gpus_per_pod] for rank in kept))


def within_tenant_limits(snapshot: Snapshot, found: dict[Key, Assignment]) -> None:
    """Hold back what would exceed a namespace's limit until its shrinking gangs have given GPUs back."""
    left = dict(snapshot.tenants.left)
    for job in snapshot.jobs:
        namespace, assignment = job.key[0], found[job.key]
        if namespace not in left:
            continue
        starts = assignment.action is AssignmentAction.PLACE and assignment.placement is not None
        wanted = len(assignment.extra_nodes)
        if starts and assignment.placement is not None:
            wanted = len(assignment.placement.nodes) if job.placement is None else 0
        if wanted <= left[namespace]:
            left[namespace] -= wanted
            continue
        if not starts:
            found[job.key] = dataclasses.replace(assignment, extra_nodes=())
        elif any(one.key[0] == namespace and found[one.key].kept_pods for one in snapshot.jobs):
            why = f"other jobs of namespace {namespace}, which is at its limit, are giving GPUs back; then: "
            found[job.key] = dataclasses.replace(
                assignment,
                action=AssignmentAction.RELEASE,
                reason=JobReason.NAMESPACE_LIMIT,
                why=why + assignment.why,
            )


def _gpus_of(snapshot: Snapshot, job: SnapshotJob, placement: Placement | None) -> dict[str, Any]:
    """What an assignment says of the memory and the speed of the GPUs of a placement."""
    if placement is None:
        return {}
    has = [snapshot.capacity.memory.get(part.pool) for part in placement.by_pool]
    found: dict[str, Any] = {"memory": min((one for one in has if one is not None), default=None)}
    if placement.parts and job.mixed is not None:
        relative = (job.mixed.relative(part.gpu_type) for part in placement.parts)
        found["part_speeds"] = tuple(speed or 1.0 for speed in relative)
        found["part_memory"] = tuple(math.inf if one is None else one for one in has)
    return found


def _sharing(snapshot: Snapshot, job: SnapshotJob, round_: Round) -> dict[str, Any]:
    """What an assignment says of the other job on its GPU."""
    beside, at = round_.beside.get(job.name), round_.placements.get(job.name)
    may_share = job.name in snapshot.shared.jobs and bool(snapshot.shared.on(at))
    return {"partner": beside.partner if beside is not None else "", "may_share": may_share}


def _has_share(allocation: Allocation, name: str) -> bool:
    """Whether the policy gives the job any time at all: FIFO and AlloX serve some first, others not yet."""
    return any(share > 0 for share in allocation.allocation.get(name, {}).values())


def next_best(allocation: Allocation, job: Job, gpu_types: tuple[str, ...], *, chosen: str | None) -> str:
    """The type that would have been second, with its speed; empty where there is none."""
    shares = allocation.allocation.get(job.name, {})
    others = [t for t in gpu_types if t != chosen and job.throughput.get(t, 0.0) > 0]
    if not others:
        return ""
    second = max(others, key=lambda t: (shares.get(t, 0.0), job.throughput[t], t))
    return (
        f"{job.gpus} x {second}: {job.throughput[second]:.3g} steps/s, "
        f"share of the time {abs(shares.get(second, 0.0)):.0%}"
    )


def next_best_sizes(gang: ElasticGang, shares: Mapping[str, float], placement: Placement | None) -> str:
    """The three fastest configurations besides the one that an elastic gang gets, and why not they."""
    kind, gpus = (placement.gpu_type, len(placement.nodes)) if placement is not None else ("", 0)
    now = gang.speed(kind, gpus) if placement is not None else 0.0
    others = [
        (speed, -size, gpu_type)
        for gpu_type, by_size in gang.speeds.items()
        for size, speed in by_size.items()
        if (gpu_type, size) != (kind, gpus)
    ]
    texts = []
    for speed, negative, gpu_type in sorted(others, reverse=True)[:MOST_CONFIGURATIONS]:
        size = -negative
        why = f"share of the time there {abs(shares.get(gpu_type, 0.0)):.0%}"
        if speed <= now:
            why = "no faster"
        elif gpu_type == kind:
            why = f"{size - gpus} GPUs more" if size > gpus else "fewer GPUs"
        texts.append(f"{size} x {gpu_type}: {speed:.3g} steps/s, {why}")
    return "; ".join(texts)
