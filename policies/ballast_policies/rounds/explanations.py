"""Why a gang runs here or waits, in words with numbers."""

from collections.abc import Mapping, Sequence

from ballast_policies.rounds.values import Gang, Node, Placement


def chosen_words(placement: Placement, *, share: float, received_fraction: float, extended: bool) -> str:
    """Why a gang got its GPUs."""
    where = f"{len(placement.nodes)} x {placement.gpu_type} in pool {placement.pool}"
    kept = "stays on " if extended else ""
    if share > 0:
        return (
            f"{kept}{where}: its share there is {share:.0%} of the time, it has had {received_fraction:.0%}"
        )
    return f"{kept}{where}: no job with a share needs them"


def pinned_words(placement: Placement, why: str) -> str:
    """Why a gang was left alone."""
    where = f"{len(placement.nodes)} x {placement.gpu_type} in pool {placement.pool}"
    return f"keeps {where}: it {why}"


def waiting_words(
    gang: Gang, nodes: Sequence[Node], free: Mapping[str, int], kept_for: Mapping[str, str]
) -> str:
    """What a waiting gang lacks; ``kept_for``: pool -> job for which its free GPUs are kept."""
    usable = sorted(gpu_type for gpu_type, rate in gang.throughput.items() if rate > 0)
    if not usable:
        return f"no GPU type of this policy's pools can run it: it names {sorted(gang.throughput) or 'none'}"
    counts = []
    for pool in sorted({node.pool for node in nodes if node.gpu_type in usable}):
        members = [node for node in nodes if node.pool == pool]
        has, left = sum(node.gpus for node in members), sum(free[node.name] for node in members)
        kept = (
            f", kept for {kept_for[pool]}" if pool in kept_for and kept_for[pool] != gang.job and left else ""
        )
        counts.append(f"{left} of {has} {members[0].gpu_type} free in pool {pool}{kept}")
    where = "; ".join(counts) or f"no node has {' or '.join(usable)}"
    return f"waits for {gang.gpus} GPUs of one pool: {where}"
