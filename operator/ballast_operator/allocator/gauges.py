"""The allocator's figures for Prometheus."""

from collections import Counter
from collections.abc import Sequence

from ballast_policies.rounds import Round

from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.metrics import Metrics
from ballast_operator.views.job import JobView
from ballast_operator.views.sharing.gpus import once_a_gpu


def set_gauges(
    metrics: Metrics, snapshot: Snapshot, jobs: Sequence[JobView], round_: Round | None = None
) -> None:
    """GPUs by pool, the effective throughput of the running jobs, and jobs kept off spot machines."""
    metrics.jobs_kept_off_spot.set(len(round_.kept_off_spot) if round_ is not None else 0)
    metrics.gpus_capacity.clear()
    metrics.gpus_allocated.clear()
    metrics.gpus_shared.clear()
    capacity, taken = Counter[tuple[str, str]](), Counter[str]()
    for node in snapshot.capacity.nodes:
        left_out = snapshot.capacity.left_out.get(node.name, 0)
        capacity[node.pool, node.gpu_type] += node.gpus + left_out
    allocations = [held for view in jobs if (held := view.status.allocation) is not None]
    counted = once_a_gpu(allocations)
    for held in counted:
        for part in held.by_pool:
            taken[part.pool] += part.gpus
    pairs = Counter(held.pool for held in allocations)
    pairs.subtract(held.pool for held in counted)
    for pool in {node.pool for node in snapshot.capacity.nodes if node.name in snapshot.capacity.shared}:
        metrics.gpus_shared.labels(pool).set(pairs[pool])
    for (pool, gpu_type), total in capacity.items():
        metrics.gpus_capacity.labels(pool, gpu_type).set(total)
        metrics.gpus_allocated.labels(pool, gpu_type).set(taken[pool])
    effective = 0.0
    for job in snapshot.problem.jobs:
        placement, fastest = snapshot.running.get(job.name), max(job.throughput.values(), default=0.0)
        if placement is not None and fastest > 0:
            effective += snapshot.by_name[job.name].speed(placement) / fastest
    metrics.effective_throughput.set(effective)
