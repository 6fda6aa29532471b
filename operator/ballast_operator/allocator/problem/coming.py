"""Nodes that do not exist yet and that an autoscaler would add: pools with ``maxNodes``."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ballast_operator.api.job_allocation import coming_node, is_coming, pool_to_grow
from ballast_operator.api.node_pool import NodePool
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView


def nodes_to_come(
    pools: Sequence[NodePool], members: Mapping[str, Sequence[NodeView]], jobs: Sequence[JobView]
) -> tuple[dict[str, list[NodeView]], dict[str, str]]:
    """(pool -> nodes that could come, node -> for whom it has come).

    A gang that has been placed on nodes to come keeps them until its pods run. Nodes made since then are the
    ones that it waits for: no other job is placed there. Nodes that are about to go make room for others.
    """
    coming: dict[str, list[NodeView]] = {}
    promised: dict[str, str] = {}
    held, since, waiting = _waited_for(jobs)
    for pool in pools:
        wanted = held.get(pool.name, Counter())
        new = [
            node
            for node in members[pool.name]
            if pool.name in since and node.created is not None and node.created >= since[pool.name]
        ]
        promised.update(dict.fromkeys((node.name for node in new), f"made for {waiting.get(pool.name, '')}"))
        there = sum(node.leaving is None for node in members[pool.name])
        more = (pool.max_nodes or 0) - there - max(0, len(wanted) - len(new))
        names = sorted(wanted)
        number = 0
        while more > 0:
            if (name := coming_node(pool.name, number)) not in wanted:
                names.append(name)
                more -= 1
            number += 1
        each = pool.gpus_per_node or 0
        coming[pool.name] = [_view(pool, name, max(each, wanted[name])) for name in names]
    return coming, promised


def _waited_for(
    jobs: Sequence[JobView],
) -> tuple[dict[str, Counter[str]], dict[str, Time], dict[str, str]]:
    """Pool -> (its nodes to come that gangs wait for, with the GPUs; since when; the gangs)."""
    held: dict[str, Counter[str]] = {}
    since: dict[str, Time] = {}
    names: dict[str, list[str]] = {}
    for view in jobs:
        allocation = view.running_allocation
        if allocation is None or not allocation.gpus_to_come:
            continue
        begun = allocation.joining_since if allocation.joining and allocation.joining_since else None
        first = (begun or allocation.since).replace(microsecond=0)
        for pool in allocation.pools_to_grow:
            since[pool] = min(since.get(pool, first), first)
            names.setdefault(pool, []).append("/".join(view.key))
        for name in filter(is_coming, allocation.placement.nodes):
            held.setdefault(pool_to_grow(name), Counter())[name] += 1
    return held, since, {pool: ", ".join(sorted(found)[:3]) for pool, found in names.items()}


def _view(pool: NodePool, name: str, gpus: int) -> NodeView:
    return NodeView(
        name=name, labels=dict(pool.node_selector), ready=True, allocatable={pool.gpu_resource: str(gpus)}
    )
