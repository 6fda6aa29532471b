"""Which nodes a gang gets: one pool, as few nodes as possible, the tightest fit first."""

from collections.abc import Mapping, Sequence

from ballast_policies.allocation.rounds.values import Node, Placement


def pack(gpus: int, gpu_type: str, nodes: Sequence[Node], free: Mapping[str, int]) -> Placement | None:
    """Nodes for a gang of ``gpus`` on one pool of ``gpu_type``, or None where no pool has room.

    A node that fits the gang whole and has least to spare is best; else the nodes with most
    free GPUs, so that the gang spreads over the fewest. Over pools: fewest nodes, then least left
    over, then the name.
    """
    best: tuple[tuple[int, int, str], Placement] | None = None
    for pool in sorted({node.pool for node in nodes if node.gpu_type == gpu_type}):
        members = [node for node in nodes if node.pool == pool and node.gpu_type == gpu_type]
        chosen = _pack_pool(gpus, members, free)
        if chosen is None:
            continue
        left = sum(free[node.name] for node in members) - gpus
        key = (len(set(chosen)), left, pool)
        if best is None or key < best[0]:
            best = (key, Placement(gpu_type=gpu_type, pool=pool, nodes=chosen))
    return None if best is None else best[1]


def _pack_pool(gpus: int, members: Sequence[Node], free: Mapping[str, int]) -> tuple[str, ...] | None:
    if sum(free[node.name] for node in members) < gpus:
        return None
    whole = [node for node in members if free[node.name] >= gpus]
    if whole:
        tightest = min(whole, key=lambda node: (free[node.name], node.name))
        return (tightest.name,) * gpus
    chosen: list[str] = []
    for node in sorted(members, key=lambda node: (-free[node.name], node.name)):
        chosen += [node.name] * min(free[node.name], gpus - len(chosen))
    return tuple(chosen)
