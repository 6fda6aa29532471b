"""The condition ``Consolidated``: gangs on more nodes than would hold them."""

from ballast_operator.allocator.problem.jobs.snapshot_job import SnapshotJob
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.views.assignment import Advice


def more_nodes_than_needed(snapshot: Snapshot, job: SnapshotJob) -> str:
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


def placement_advice(snapshot: Snapshot, job: SnapshotJob) -> tuple[Advice, ...]:
    """The job's condition ``Consolidated``; nothing where it is, or holds no GPUs."""
    text = more_nodes_than_needed(snapshot, job)
    if not text:
        return ()
    reason = JobReason.ON_MORE_NODES
    return (Advice(type=JobCondition.CONSOLIDATED, value=False, reason=reason, message=text),)
