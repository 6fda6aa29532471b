"""Nodes of a gang: as few as possible, the tightest fit first, and large gangs before small ones."""

from collections.abc import Iterable, Mapping, Sequence

from ballast_policies.rounds.ledger import Ledger
from ballast_policies.rounds.values import Node, Placement


def pack(
    gpus: int, members: Sequence[Node], free: Mapping[str, int], gpus_per_pod: int = 1
) -> tuple[str, ...] | None:
    """One node name per GPU from ``members`` (nodes of one pool), or None where they have no room.

    The node that holds the gang whole and has least to spare; else the nodes with the most room, so that the
    gang spreads over the fewest, and the tightest fit for what remains. The GPUs of a pod are on one node.
    Nodes that do not exist yet are taken only where those that do have no room.
    """
    there = [node for node in members if not node.provisionable]
    if len(there) < len(members) and (found := pack(gpus, there, free, gpus_per_pod)) is not None:
        return found
    left = {node.name: free[node.name] // gpus_per_pod for node in members}
    pods, rest = divmod(gpus, gpus_per_pod)
    if rest or sum(left.values()) < pods:
        return None
    chosen: list[str] = []
    while pods > 0:
        whole = [name for name, room in left.items() if room >= pods]
        name = (
            min(whole, key=lambda name: (left[name], free[name], name))
            if whole
            else min(left, key=lambda name: (-left[name], free[name], name))
        )
        here = min(pods, left.pop(name))
        chosen += [name] * here * gpus_per_pod
        pods -= here
    return tuple(chosen)


def in_whole_pods(nodes: Sequence[str], gpus_per_pod: int) -> bool:
    """Whether ``nodes``, one for each GPU, are those of pods with as many GPUs on one node each."""
    pods = [nodes[first : first + gpus_per_pod] for first in range(0, len(nodes), gpus_per_pod)]
    return all(len(pod) == gpus_per_pod and len(set(pod)) == 1 for pod in pods)


def assign_nodes(
    granted: Iterable[tuple[str, str, int]],
    ledger: Ledger,
    running: Mapping[str, Placement],
    splits: Mapping[str, Mapping[str, int]] | None = None,
    gpus_per_pod: Mapping[str, int] | None = None,
    *,
    by_urgency: bool = False,
) -> dict[str, Placement]:
    """Exact nodes for gangs that fit their pools by count.

    Left out are gangs whose pods find no node with as many free GPUs; a gang of pods with one GPU each always
    finds its nodes.

    Args:
        granted: (job, pool, gpus), the most urgent first.
        ledger: of all nodes; the gangs take their GPUs there.
        running: job -> where it runs now; a gang that stays in its pool keeps its nodes.
        splits: job -> group of nodes (``Node.group``) -> GPUs, for gangs that start or move; None: any nodes.
        gpus_per_pod: job -> GPUs of each of its pods, where it is not 1.
        by_urgency: gangs that start or move choose in the order of ``granted``, not the largest first.
    """
    splits, per_pod = splits or {}, gpus_per_pod or {}
    placements: dict[str, Placement] = {}
    movers = []
    for job, pool, gpus in granted:
        now = running.get(job)
        stays = job not in splits and now is not None and now.pool == pool and len(now.nodes) == gpus
        if stays and now is not None and ledger.grant(now.nodes):
            placements[job] = now
        else:
            movers.append((job, pool, gpus))
    # Large pods find no room behind small ones.
    if not by_urgency:
        movers.sort(key=lambda mover: (-per_pod.get(mover[0], 1), -mover[2]))
    for job, pool, gpus in movers:
        parts = [
            pack(count, members, ledger.left, per_pod.get(job, 1))
            for members, count in _groups(ledger.pools[pool], gpus, splits.get(job))
        ]
        assert None not in parts or job in per_pod, f"{job} was granted {gpus} GPUs that pool {pool} has not"
        chosen = tuple(name for part in parts if part is not None for name in part)
        if len(chosen) < gpus:
            continue
        ledger.take(chosen)
        placements[job] = Placement(gpu_type=ledger.pools[pool][0].gpu_type, pool=pool, nodes=chosen)
    return placements


def _groups(
    members: Sequence[Node], gpus: int, split: Mapping[str, int] | None
) -> list[tuple[Sequence[Node], int]]:
    """(nodes, GPUs to take of them); all at once where the gang's split is not given."""
    if split is None:
        return [(members, gpus)]
    return [([node for node in members if node.group == text], count) for text, count in split.items()]


def in_its_pools(placement: Placement, nodes: Mapping[str, Node]) -> bool:
    """Whether the placement's nodes are all there, each in the pool, of the type, that it names."""
    types = {part.pool: part.gpu_type for part in placement.by_pool}
    return all(
        (node := nodes.get(name)) is not None and (node.pool, node.gpu_type) == (pool, types[pool])
        for pool, names in placement.nodes_by_pool.items()
        for name in set(names)
    )
