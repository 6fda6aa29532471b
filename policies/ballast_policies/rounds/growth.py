"""Growth: free GPUs that no waiting job can use go to running gangs that would be faster with them."""

from collections import Counter
from collections.abc import Mapping

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.values import Node, Placement, Round


def grow(
    round_: Round,
    *,
    jobs: Mapping[str, Job],
    nodes: tuple[Node, ...],
    sizes: Mapping[str, tuple[int, ...]],
    not_tolerated: Mapping[str, frozenset[str]] | None = None,
    gpus_per_pod: Mapping[str, int] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Job -> node of each GPU that it may take in addition; without jobs that get none.

    A pool's GPUs stay free where a waiting job could use some of them, even if they are too few for
    it now: more may come free. Otherwise they go pod by pod to the smallest gang.

    Args:
        round_: the decision; gangs that it starts, moves or stops do not grow.
        jobs: those of the round, by name.
        nodes: with all GPUs that the policy may hand out.
        sizes: job -> sizes that it could grow to, smallest first, for jobs that may grow now.
        not_tolerated: job -> taints of nodes (``Node.taints``) that it must not grow onto.
        gpus_per_pod: job -> GPUs of each of its pods, all on one node, where it is not 1.
    """
    barred, per_pod = not_tolerated or {}, gpus_per_pod or {}
    used: Counter[str] = Counter()
    for placement in round_.placements.values():
        used.update(placement.nodes)
    waiting = [job for job in jobs if job not in round_.placements]
    wanted_types = {t for job in waiting for t, rate in jobs[job].throughput.items() if rate > 0}
    free = {
        node.name: node.gpus - used[node.name]
        for node in nodes
        if node.gpu_type not in wanted_types and node.gpus > used[node.name]
    }
    most = {job: max(reachable) for job, reachable in sizes.items() if reachable}
    size = {job: jobs[job].gpus for job in round_.extended if job in most}
    found: dict[str, list[str]] = {}
    while True:
        rooms = {
            job: _room(round_.placements[job], nodes, free, barred.get(job, frozenset()), per_pod.get(job, 1))
            for job in size
            if size[job] < most[job]
        }
        able = [job for job, room in rooms.items() if room]
        if not able:
            return _down_to_a_size(found, jobs, sizes)
        job = min(able, key=lambda name: (size[name], name))
        place = round_.placements[job]
        node = max(rooms[job], key=lambda name: (name in place.nodes, free[name], name))
        gpus = per_pod.get(job, 1)
        found.setdefault(job, []).extend([node] * gpus)
        free[node] -= gpus
        size[job] += gpus


def _down_to_a_size(
    found: Mapping[str, list[str]], jobs: Mapping[str, Job], sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]]:
    """The nodes found, cut down to one of the sizes that the gang can have; the rest stay free."""
    suited = {}
    for job, names in found.items():
        more = [size - jobs[job].gpus for size in sizes[job] if size - jobs[job].gpus <= len(names)]
        if more:
            suited[job] = tuple(names[: max(more)])
    return suited


def _room(
    placement: Placement,
    nodes: tuple[Node, ...],
    free: Mapping[str, int],
    barred: frozenset[str],
    gpus_per_pod: int,
) -> list[str]:
    """Nodes of the gang's pool with free GPUs for a pod, on which it may be started."""
    return [
        node.name
        for node in nodes
        if node.pool == placement.pool
        and free.get(node.name, 0) >= gpus_per_pod
        and not node.closed
        and node.taints not in barred
    ]
