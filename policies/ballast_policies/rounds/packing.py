"""Which nodes a gang gets: as few as possible, the tightest fit first, and large gangs before small ones."""

from collections.abc import Iterable, Mapping, Sequence

from ballast_policies.rounds.values import Node, Placement


def pack(gpus: int, members: Sequence[Node], free: Mapping[str, int]) -> tuple[str, ...] | None:
    """One node name per GPU from ``members`` (nodes of one pool), or None where they have no room.

    The node that holds the gang whole and has least to spare; else the nodes with the most free
    GPUs, so that the gang spreads over the fewest, and the tightest fit for what remains.
    """
    if sum(free[node.name] for node in members) < gpus:
        return None
    chosen: list[str] = []
    left = {node.name: free[node.name] for node in members}
    while len(chosen) < gpus:
        missing = gpus - len(chosen)
        whole = [name for name, room in left.items() if room >= missing]
        name = (
            min(whole, key=lambda name: (left[name], name))
            if whole
            else min(left, key=lambda name: (-left[name], name))
        )
        chosen += [name] * min(missing, left.pop(name))
    return tuple(chosen)


def assign_nodes(
    granted: Iterable[tuple[str, str, int]],
    nodes: Sequence[Node],
    running: Mapping[str, Placement],
) -> dict[str, Placement]:
    """Exact nodes for gangs that fit their pools by count.

    Args:
        granted: (job, pool, gpus), the most urgent first.
        nodes: all nodes.
        running: job -> where it runs now; a gang that stays in its pool keeps its nodes.
    """
    free = {node.name: node.gpus for node in nodes}
    pools: dict[str, list[Node]] = {}
    for node in nodes:
        pools.setdefault(node.pool, []).append(node)
    placements: dict[str, Placement] = {}
    movers = []
    for job, pool, gpus in granted:
        now = running.get(job)
        if now is not None and now.pool == pool and len(now.nodes) == gpus and has_room(now, free):
            for name in now.nodes:
                free[name] -= 1
            placements[job] = now
        else:
            movers.append((job, pool, gpus))
    for job, pool, gpus in sorted(movers, key=lambda mover: -mover[2]):
        chosen = pack(gpus, pools[pool], free)
        assert chosen is not None, f"{job} was granted {gpus} GPUs that pool {pool} has not"
        for name in chosen:
            free[name] -= 1
        placements[job] = Placement(gpu_type=pools[pool][0].gpu_type, pool=pool, nodes=chosen)
    return placements


def has_room(placement: Placement, free: Mapping[str, int]) -> bool:
    """Whether the placement's nodes are all there with as many free GPUs as it takes of each."""
    return all(free.get(name, 0) >= placement.nodes.count(name) for name in set(placement.nodes))
