"""Pods that wait for nodes which do not exist yet: where they must not go, and which nodes have not come."""

from collections.abc import Mapping

from ballast_operator.api.job_allocation import JobAllocation, coming_node, is_coming, pool_to_grow
from ballast_operator.observation.findings import MOST_AVOIDED
from ballast_operator.observation.observer import Observer
from ballast_operator.views.assignment import PoolInfo
from ballast_operator.views.gang_pools import GangPools
from ballast_operator.views.job import JobView

MOST_NODES = 256
"""Nodes that a pod is kept away from by name."""


KARPENTER_PREFIX = "karpenter.sh/"
"""Of labels on nodes that Karpenter makes."""


def older_nodes(
    observer: Observer, allocation: JobAllocation | None, pools: GangPools
) -> dict[str, tuple[str, ...]]:
    """Pool -> its nodes that were there before the gang asked for new ones: they belong to others.

    None where Karpenter makes the pool's nodes: it makes none for a pod that excludes nodes, be it by name
    ("node selector term with matchFields is not supported") or by the label of their hostnames ("using label
    kubernetes.io/hostname is not allowed"). There the pods may take what is free on older nodes.
    """
    if allocation is None or not allocation.gpus_to_come:
        return {}
    since = (allocation.joining_since if allocation.joining else None) or allocation.since
    older = {
        name: node.labels
        for name, node in observer.nodes().items()
        if node.created is not None and node.created < since.replace(microsecond=0)
    }
    return {pool: _of_pool(older, pools.named(pool)) for pool in allocation.pools_to_grow}


def _of_pool(nodes: Mapping[str, Mapping[str, str]], pool: PoolInfo) -> tuple[str, ...]:
    found = {name: labels for name, labels in nodes.items() if pool.node_selector.items() <= labels.items()}
    if any(
        key.startswith(KARPENTER_PREFIX) for labels in (pool.node_selector, *found.values()) for key in labels
    ):
        return ()
    return tuple(sorted(found))[:MOST_NODES]


def not_reached(view: JobView, allocation: JobAllocation, pools: Mapping[str, PoolInfo]) -> set[str]:
    """Nodes on which pods of the gang did not run in time; all that could come, where one has not come."""
    ready = {pod.name for pod in view.gang if pod.ready_for_plan}
    nodes = {node for pod, node in allocation.node_of.items() if pod not in ready}
    for name in {pool_to_grow(node) for node in nodes if is_coming(node)}:
        pool = pools.get(name, PoolInfo())
        count = min(MOST_AVOIDED, max(pool.max_nodes, len(nodes)))
        nodes |= {coming_node(name, number) for number in range(count)}
    return nodes
