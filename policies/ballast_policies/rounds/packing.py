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
    splits: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Placement]:
    """Exact nodes for gangs that fit their pools by count.

    Args:
        granted: (job, pool, gpus), the most urgent first.
        nodes: all nodes.
        running: job -> where it runs now; a gang that stays in its pool keeps its nodes.
        splits: job -> group of nodes (``Node.group``) -> GPUs, for gangs that start or move; None: any nodes.
    """
    splits = splits or {}
    free = {node.name: node.gpus for node in nodes}
    pools: dict[str, list[Node]] = {}
    for node in nodes:
        pools.setdefault(node.pool, []).append(node)
    placements: dict[str, Placement] = {}
    movers = []
    for job, pool, gpus in granted:
        now = running.get(job)
        stays = job not in splits and now is not None and now.pool == pool and len(now.nodes) == gpus
        if stays and now is not None and has_room(now, free):
            for name in now.nodes:
                free[name] -= 1
            placements[job] = now
        else:
            movers.append((job, pool, gpus))
    for job, pool, gpus in sorted(movers, key=lambda mover: -mover[2]):
        chosen: tuple[str, ...] = ()
        for members, count in _groups(pools[pool], gpus, splits.get(job)):
            part = pack(count, members, free)
            assert part is not None, f"{job} was granted {gpus} GPUs that pool {pool} has not"
            chosen += part
        for name in chosen:
            free[name] -= 1
        placements[job] = Placement(gpu_type=pools[pool][0].gpu_type, pool=pool, nodes=chosen)
    return placements


def _groups(
    members: Sequence[Node], gpus: int, split: Mapping[str, int] | None
) -> list[tuple[Sequence[Node], int]]:
    """(nodes, GPUs to take of them); all at once where the gang's split is not given."""
    if split is None:
        return [(members, gpus)]
    return [([node for node in members if node.group == text], count) for text, count in split.items()]


def has_room(placement: Placement, free: Mapping[str, int]) -> bool:
    """Whether the placement's nodes are all there with as many free GPUs as it takes of each."""
    return all(free.get(name, 0) >= placement.nodes.count(name) for name in set(placement.nodes))
