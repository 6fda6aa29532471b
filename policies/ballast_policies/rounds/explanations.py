"""Texts that explain a round: why a gang got its GPUs, keeps them, or waits."""

from collections.abc import Mapping, Sequence

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.values import Node, Placement


def explain_placement(placement: Placement, *, share: float, received_fraction: float, extended: bool) -> str:
    """Why a gang got its GPUs."""
    where = f"{len(placement.nodes)} x {placement.gpu_type} in pool {placement.pool}"
    kept = "stays on " if extended else ""
    if share > 0:
        return (
            f"{kept}{where}: its share there is {share:.0%} of the time, it has had {received_fraction:.0%}"
        )
    return f"{kept}{where}: no job with a share needs them"


def explain_pinned(placement: Placement, why: str) -> str:
    """Why a gang keeps its GPUs although others are more urgent."""
    where = f"{len(placement.nodes)} x {placement.gpu_type} in pool {placement.pool}"
    return f"keeps {where}: it {why}"


def explain_waiting(
    job: Job, nodes: Sequence[Node], free: Mapping[str, int], kept_for: Mapping[str, str]
) -> str:
    """What a waiting gang lacks; ``kept_for``: pool -> job for which its free GPUs are kept."""
    usable = sorted(gpu_type for gpu_type, rate in job.throughput.items() if rate > 0)
    if not usable:
        return f"no GPU type of this policy's pools can run it; it allows {sorted(job.throughput) or 'none'}"
    counts = []
    for pool in sorted({node.pool for node in nodes if node.gpu_type in usable}):
        members = [node for node in nodes if node.pool == pool]
        has, left = sum(node.gpus for node in members), sum(free[node.name] for node in members)
        kept = (
            f", kept for {kept_for[pool]}" if pool in kept_for and kept_for[pool] != job.name and left else ""
        )
        counts.append(f"{left} of {has} {members[0].gpu_type} free in pool {pool}{kept}")
    where = "; ".join(counts) or f"no node has {' or '.join(usable)}"
    return f"waits for {job.gpus} GPUs of one pool: {where}"
