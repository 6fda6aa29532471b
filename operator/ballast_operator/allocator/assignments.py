"""From a round to an assignment for each job."""

from ballast_policies.allocation.problem import Allocation, Job
from ballast_policies.rounds import Round

from ballast_operator.allocator.snapshot import Snapshot
from ballast_operator.api.conditions import JobReason
from ballast_operator.kube.kinds import Key
from ballast_operator.views.assignment import Assignment, AssignmentAction


def assignments_of(
    snapshot: Snapshot, round_: Round, allocation: Allocation, *, plan_id: str, dry_run: bool
) -> dict[Key, Assignment]:
    """An assignment for each job of the snapshot and for each refused one."""
    found: dict[Key, Assignment] = {}
    jobs = {job.name: job for job in snapshot.problem.jobs}
    for name, key in snapshot.keys.items():
        placement = round_.placements.get(name)
        running = snapshot.running.get(name)
        launches, why = snapshot.launches[name], round_.reasons.get(name, "")
        chosen_type = placement.gpu_type if placement else None
        best = next_best(allocation, jobs[name], snapshot.problem.gpu_types, chosen=chosen_type)
        if running is not None and (dry_run or placement == running):
            found[key] = Assignment(
                action=AssignmentAction.KEEP,
                launches=launches,
                placement=running,
                plan_id=plan_id,
                why=why,
                chosen=f"{len(running.nodes)} x {running.gpu_type} of pool {running.pool}",
                next_best=best,
            )
        elif placement is None:
            found[key] = Assignment(
                action=AssignmentAction.RELEASE,
                launches=launches,
                plan_id=plan_id,
                reason=JobReason.WAITING_FOR_CAPACITY,
                why=why
                if _has_share(allocation, name)
                else f"{allocation.policy} gives it no GPUs yet; {why}",
                next_best=best,
            )
        else:
            chosen = f"{len(placement.nodes)} x {placement.gpu_type} of pool {placement.pool}"
            found[key] = Assignment(
                action=AssignmentAction.RELEASE if dry_run else AssignmentAction.PLACE,
                launches=launches,
                placement=placement,
                plan_id=plan_id,
                reason=JobReason.DRY_RUN,
                why=f"would get {chosen}: {why}" if dry_run else why,
                chosen=chosen,
                next_best=best,
            )
    return found


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
