"""Free GPUs that no waiting job can use go to running gangs that would be faster with them."""

from collections import Counter
from collections.abc import Mapping

from ballast_policies.rounds import Gang, Node, Placement, Round


def growth(
    round_: Round,
    *,
    gangs: Mapping[str, Gang],
    nodes: tuple[Node, ...],
    sizes: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[str, ...]]:
    """Job -> node of each GPU that it may take in addition; without jobs that get none.

    A pool's GPUs stay free where a job waits that could use some of them, even if they are too few for
    it now: more may come free. Otherwise they go one by one to the smallest gang.

    Args:
        round_: the decision; gangs that it starts, moves or stops do not grow.
        gangs: those of the round, by job.
        nodes: with all GPUs that are ours to hand out.
        sizes: job -> sizes that it could grow to, fewest first, for jobs that are able and willing to
            grow now.
    """
    used: Counter[str] = Counter()
    for placement in round_.placements.values():
        used.update(placement.nodes)
    waiting = [job for job in gangs if job not in round_.placements]
    wanted_types = {t for job in waiting for t, rate in gangs[job].throughput.items() if rate > 0}
    free = {
        node.name: node.gpus - used[node.name]
        for node in nodes
        if node.gpu_type not in wanted_types and node.gpus > used[node.name]
    }
    most = {job: max(reachable) for job, reachable in sizes.items() if reachable}
    size = {job: gangs[job].gpus for job in round_.extended if job in most}
    found: dict[str, list[str]] = {}
    while True:
        able = [job for job in size if size[job] < most[job] and _room(round_.placements[job], nodes, free)]
        if not able:
            return _suited(found, gangs, sizes)
        job = min(able, key=lambda name: (size[name], name))
        place = round_.placements[job]
        node = max(_room(place, nodes, free), key=lambda name: (name in place.nodes, free[name], name))
        found.setdefault(job, []).append(node)
        free[node] -= 1
        size[job] += 1


def _suited(
    found: Mapping[str, list[str]], gangs: Mapping[str, Gang], sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]]:
    """Of the nodes found, the first so many that the gang has one of its sizes; the rest stay free."""
    suited = {}
    for job, names in found.items():
        more = [size - gangs[job].gpus for size in sizes[job] if size - gangs[job].gpus <= len(names)]
        if more:
            suited[job] = tuple(names[: max(more)])
    return suited


def _room(placement: Placement, nodes: tuple[Node, ...], free: Mapping[str, int]) -> list[str]:
    """Nodes of the gang's pool with a free GPU."""
    return [node.name for node in nodes if node.pool == placement.pool and free.get(node.name, 0) > 0]
