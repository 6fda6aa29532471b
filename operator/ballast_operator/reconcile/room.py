"""Whether the nodes of a decision have room for a gang at this moment."""

from collections.abc import Collection, Sequence

from ballast_policies.rounds import Placement

from ballast_operator.kube.kinds import POD, key_of_job
from ballast_operator.observation.observer import Observer
from ballast_operator.views.assignment import Assignment, AssignmentAction, PoolInfo
from ballast_operator.views.gang_pools import GangPools
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import shortage
from ballast_operator.views.sharing.pools import as_shared, taken_by_others


def why_no_room(
    observer: Observer,
    view: JobView,
    assignment: Assignment | None,
    *,
    placement: Placement | None,
    pools: GangPools,
) -> str:
    """Why the nodes that the job is to take now cannot hold it yet, as text; empty: they can.

    ``placement``: where it is, or is to be launched. The parts of a gang in several pools ask for the
    resource of their own.
    """
    wanted = _wanted(view, assignment)
    if not wanted:
        return ""
    allocation = view.status.allocation
    partners = {
        held.partner for held in (allocation, assignment) if held is not None and held.partner
    }  # who may be on its GPU as well
    if placement is None or not placement.parts:
        return _shortage(observer, view, wanted, pools.first, partners)
    first = 0
    for part in placement.parts:
        here = wanted[first : first + part.gpus]
        lacking = _shortage(observer, view, here, pools.named(part.pool))
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
    launches = assignment.action is AssignmentAction.PLACE and assignment.placement is not None
    return assignment.placement.nodes if launches and assignment.placement is not None else ()


def _shortage(
    observer: Observer, view: JobView, wanted: Sequence[str], pool: PoolInfo, partners: Collection[str] = ()
) -> str:
    """Only what is on these nodes is looked at."""
    names = set(wanted)
    allocations = observer.gpu_holders.on_nodes(names)
    listed = {id(pod): pod for pod in observer.pods_on(names)}
    for key, gang in allocations.items():  # one that was bound elsewhere counts there
        for pod_name in gang.pods:
            pod = observer.caches[POD].get((key[0], pod_name))
            if pod is not None:
                listed[id(pod)] = pod
    known = {name: node for name in names if (node := observer.node(name)) is not None}
    if pool.shares:
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
