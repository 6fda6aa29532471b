"""Pods with several GPUs: what is left where the pods of a gang have found no nodes."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ballast_policies.rounds.packing import has_room, pack
from ballast_policies.rounds.selection import Claims
from ballast_policies.rounds.values import Node, Placement


def filled(
    placements: Mapping[str, Placement],
    claims: Claims,
    names: Sequence[str],
    pools: Sequence[str],
    nodes: Sequence[Node],
    running: Mapping[str, Placement],
    *,
    gpus_per_pod: Mapping[str, int],
    not_tolerated: Mapping[str, frozenset[str]],
) -> dict[str, Placement]:
    """The placements, and those of gangs that fit on what these leave free.

    Claims are granted by the GPUs of a pool; where a gang that was granted some finds no nodes for its pods,
    they are free for those after it.

    Args:
        placements: job -> where it runs.
        claims: that may be granted, the most urgent first.
        names: job index -> name.
        pools: pool index -> name.
        nodes: of all pools.
        running: job -> where it could continue; it keeps these nodes where they are free.
        gpus_per_pod: job -> GPUs of each of its pods, where it is not 1.
        not_tolerated: job -> taints of nodes on which it must not be started.
    """
    found = dict(placements)
    used = Counter(name for placement in placements.values() for name in placement.nodes)
    free = {node.name: node.gpus - used[node.name] for node in nodes}
    members: dict[str, list[Node]] = {pool: [] for pool in pools}
    for node in nodes:
        if not node.closed and free[node.name] > 0:
            members[node.pool].append(node)
    without_room: set[tuple[str, int, int, frozenset[str]]] = set()
    for job, column, gpus in zip(
        claims.job.tolist(), claims.column.tolist(), claims.gpus.tolist(), strict=True
    ):
        name, pool = names[job], pools[column]
        barred, per_pod = not_tolerated.get(name, frozenset()), gpus_per_pod.get(name, 1)
        alike = (pool, gpus, per_pod, barred)
        if name in found:
            continue
        now = running.get(name)
        if now is not None and now.pool == pool and has_room(now, free):
            found[name] = now
            for node_name in now.nodes:
                free[node_name] -= 1
            continue
        if alike in without_room:
            continue
        usable = [node for node in members[pool] if node.taints not in barred]
        chosen = pack(gpus, usable, free, per_pod)
        if chosen is None:
            without_room.add(alike)
            continue
        for node_name in chosen:
            free[node_name] -= 1
        found[name] = Placement(gpu_type=usable[0].gpu_type, pool=pool, nodes=chosen)
    return found
