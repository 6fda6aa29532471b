"""When the next gang that has just changed its size may take GPUs that are free."""

from collections import Counter
from collections.abc import Container

from ballast_operator.allocator.problem.jobs.snapshot_job import SnapshotJob
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.views.clock import Time


def next_growth(snapshot: Snapshot, now: Time) -> Time | None:
    """When the next gang that may not grow yet may, and there are GPUs for it; None: none is known."""
    free = Counter({node.name: node.gpus for node in snapshot.capacity.nodes})
    for placement in snapshot.running.values():
        free.subtract(placement.nodes)
    pools = {node.pool for node in snapshot.capacity.nodes if free[node.name] > 0}
    later = (job.grows_from for job in snapshot.jobs if _grows_later(job, pools, now))
    return min((at for at in later if at is not None), default=None)


def _grows_later(job: SnapshotJob, pools: Container[str], now: Time) -> bool:
    """Whether the gang has a larger size, in one of ``pools``, and waits for its time."""
    if job.elastic is None or job.placement is None or job.grows_from is None or job.grows_from <= now:
        return False
    sizes = job.elastic.speeds.get(job.placement.gpu_type, {})
    return job.placement.pool in pools and max(sizes, default=0) > len(job.placement.nodes)
