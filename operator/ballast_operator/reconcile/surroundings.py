"""Nodes and other jobs around a gang, as a pass finds them: room, nodes that come, jobs on the same GPU."""

from collections.abc import Collection, Mapping, Sequence

from ballast_policies.contract.messages import ExitReason
from ballast_policies.protocol.observed import Action
from ballast_policies.rounds.values import Placement
from ballast_policies.scheduling.assignments import Assignment

from ballast_operator.api.job_allocation import JobAllocation, coming_node, is_coming, pool_to_grow
from ballast_operator.api.node_pool import NodePool
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.kube.kinds import POD, Key, key_of_job
from ballast_operator.observation.findings import MOST_AVOIDED
from ballast_operator.observation.observer import Observer
from ballast_operator.views.assignment import UNKNOWN_POOL, PoolInfo
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import Sharer, as_shared, sharer_of, shortage, taken_by_others

TOLD_WITHIN_SECONDS = 2.0
"""A node tells of a pod's end after up to a second (kubelet's ``relistPeriod``), a busy one later."""

MOST_NODES = 256
"""Nodes that a pod is kept away from by name."""


KARPENTER_PREFIX = "karpenter.sh/"
"""Prefix of labels on nodes that Karpenter makes."""


def older_nodes(observer: Observer, allocation: JobAllocation | None) -> dict[str, tuple[str, ...]]:
    """Pool -> its nodes that were there before the gang asked for new ones: they belong to others.

    None where Karpenter makes the pool's nodes: it makes none for a pod that excludes nodes, be it by name
    ("node selector term with matchFields is not supported") or by the label of their hostnames ("using label
    kubernetes.io/hostname is not allowed"). There the pods may take what is free on older nodes.
    """
    if allocation is None or not allocation.pools_to_grow:
        return {}
    since = (allocation.joining_since if allocation.joining else None) or allocation.since
    older = {
        name: node.labels
        for name, node in observer.nodes().items()
        if node.created is not None and node.created < since.replace(microsecond=0)
    }
    pools = observer.pools
    return {pool: _of_pool(older, pools.get(pool, UNKNOWN_POOL).pool) for pool in allocation.pools_to_grow}


def _of_pool(nodes: Mapping[str, Mapping[str, str]], pool: NodePool) -> tuple[str, ...]:
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
        pool = pools.get(name, UNKNOWN_POOL).pool
        count = min(MOST_AVOIDED, max(pool.max_nodes or 0, len(nodes)))
        nodes |= {coming_node(name, number) for number in range(count)}
    return nodes


def failed_on(view: JobView) -> str:
    """The node on which the first pod of the gang failed; empty: none did, or the first is not known.

    Not counted is what has another cause: the job's configuration or memory limit, the cluster, another rank.
    Nodes' own clocks are not compared: they may be wrong.
    """
    failed = [
        pod
        for pod in view.gang
        if pod.phase == "Failed"
        and not (pod.lost_peer or pod.disrupted or pod.reason == "OOMKilled")
        and not (pod.message is not None and pod.message.reason is ExitReason.CONFIGURATION)
    ]
    seen = [(pod.ended_seconds or 0.0, pod.node) for pod in failed]
    first = max(seen, default=(0.0, ""))[0]
    nodes = {node for seconds, node in seen if seconds >= first - TOLD_WITHIN_SECONDS}
    return nodes.pop() if len(nodes) == 1 else ""


def slow_on(view: JobView) -> str:
    """The node of the rank that its trainer tells to be the slowest of its GPU type; empty: none is told.

    Of the plan in force alone: what is said of another, or of ranks that it does not have, counts for none.
    """
    plan, report = view.launched_plan, view.lease.report if view.lease is not None else None
    if plan is None or report is None or report.epoch != plan.epoch or not report.slow_ranks:
        return ""
    rank = max(report.slow_ranks, key=lambda slow: slow.factor).rank
    pods = [each.pod for each in plan.ranks if each.rank == rank]
    return next((pod.node for pod in view.gang if pod.name in pods and pod.alive), "")


def capacity_shortfall(
    observer: Observer, view: JobView, assignment: Assignment | None, placement: Placement | None
) -> str:
    """Reason that the nodes the job is to take now cannot hold it yet, as text; empty: they can.

    ``placement``: where it is, or is to be launched. The parts of a gang in several pools ask for the
    resource of their own.
    """
    wanted = _wanted(view, assignment)
    if not wanted:
        return ""
    allocation, pools = view.status.allocation, observer.pools
    partners = {
        held.partner for held in (allocation, assignment) if held is not None and held.partner
    }  # who may be on its GPU as well

    def of(pool: str) -> NodePool:
        return pools.get(pool, UNKNOWN_POOL).pool

    if placement is None or not placement.parts:
        return _shortage(observer, view, wanted, of(placement.pool if placement else ""), partners)
    if allocation is not None and view.gang:  # it grows
        return _shortage(observer, view, wanted, of(placement.by_pool[-1].pool))
    first = 0
    for part in placement.parts:
        here = wanted[first : first + part.gpus]
        lacking = _shortage(observer, view, here, of(part.pool))
        if lacking:
            return lacking
        first += part.gpus
    return ""


def _wanted(view: JobView, assignment: Assignment | None) -> tuple[str, ...]:
    """Nodes on which it is to take GPUs now, one for each GPU."""
    allocation = view.status.allocation
    if allocation is not None and not view.gang:
        return allocation.placement.nodes  # written, and nothing of it made
    if assignment is None:
        return ()
    if allocation is not None:
        return assignment.extra_nodes
    launches = assignment.action is Action.PLACE and assignment.placement is not None
    return assignment.placement.nodes if launches and assignment.placement is not None else ()


def _shortage(
    observer: Observer, view: JobView, wanted: Sequence[str], pool: NodePool, partners: Collection[str] = ()
) -> str:
    """Only what is on these nodes is looked at."""
    names = set(wanted)
    allocations = observer.gpu_holders.on_nodes(names)
    listed = {id(pod): pod for name in names for pod in observer.caches[POD].on_node(name)}
    for key, gang in allocations.items():  # one that was bound elsewhere counts there
        for pod_name in gang.pods:
            pod = observer.caches[POD].get((key[0], pod_name))
            if pod is not None:
                listed[id(pod)] = pod
    known = {name: node for name in names if (node := observer.node(name)) is not None}
    if pool.sharing is not None:
        known = {name: as_shared(node, pool.gpu_resource) for name, node in known.items()}
        pods = listed.values()
        taken = taken_by_others(
            pods, allocations, pool.gpu_resource, but={view.key, *map(key_of_job, partners)}
        )
        for name in sorted(names):
            if taken[name]:
                return f"another job is still on the GPU of node {name}"
    return shortage(
        wanted,
        key=view.key,
        nodes=known,
        pods=listed.values(),
        allocations=allocations,
        resource=pool.gpu_resource,
        tolerations=view.spec.tolerations if view.spec is not None else (),
    )


def on_the_same_gpu(
    observer: Observer, view: JobView, assignment: Assignment | None
) -> tuple[Sharer | None, Time | None]:
    """(who is on its GPU as well, or would be at its launch; when its last partner left a GPU)."""
    allocation = view.status.allocation
    if allocation is not None:
        node = allocation.nodes[0] if allocation.shared_gpu is not None and allocation.nodes else ""
    else:
        launches = assignment is not None and assignment.action is Action.PLACE
        placement = assignment.placement if assignment is not None and assignment.may_share else None
        node = placement.nodes[0] if launches and placement is not None else ""
    if not node:
        return None, None
    partner = allocation.partner if allocation is not None else ""
    last = observer.status(key_of_job(partner)) if partner else None
    sharer = sharer_of(view.key, node, observer.gpu_holders.allocations_on([node]))
    return sharer, last.gpu_left_at if last is not None else None


def jobs_to_requeue(old: TrainingJobStatus, new: TrainingJobStatus) -> set[Key]:
    """Jobs that share, or have shared, the job's GPU, if it has come to the GPU or left it."""
    before, after = old.allocation, new.allocation
    if (before is None or before.shared_gpu is None) and (after is None or after.shared_gpu is None):
        return set()
    if (before is not None and before.pays) == (after is not None and after.pays):
        return set()
    held = (allocation.partner for allocation in (before, after) if allocation is not None)
    return {key_of_job(partner) for partner in held if partner}
