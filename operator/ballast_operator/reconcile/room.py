"""Whether the nodes of a decision have room for a gang at this moment."""

from collections.abc import Sequence

from ballast_policies.rounds import Placement

from ballast_operator.kube.kinds import POD
from ballast_operator.observation.observer import Observer
from ballast_operator.views.gang_pools import GangPools
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import shortage


def why_no_room(
    observer: Observer,
    view: JobView,
    wanted: Sequence[str],
    *,
    placement: Placement | None,
    pools: GangPools,
) -> str:
    """Why the nodes ``wanted``, one for each GPU, cannot hold the job yet, as text; empty: they can.

    The parts of a gang in several pools ask for the resource of their own.
    """
    if placement is None or not placement.parts:
        return _shortage(observer, view, wanted, pools.first.gpu_resource)
    first = 0
    for part in placement.parts:
        here = wanted[first : first + part.gpus]
        lacking = _shortage(observer, view, here, pools.named(part.pool).gpu_resource)
        if lacking:
            return lacking
        first += part.gpus
    return ""


def _shortage(observer: Observer, view: JobView, wanted: Sequence[str], resource: str) -> str:
    """Only what is on these nodes is looked at."""
    names = set(wanted)
    allocations = observer.holders.on_nodes(names)
    listed = {id(pod): pod for pod in observer.pods_on(names)}
    for key, gang in allocations.items():  # one that was bound elsewhere counts there
        for pod_name in gang.pods:
            pod = observer.caches[POD].get((key[0], pod_name))
            if pod is not None:
                listed[id(pod)] = pod
    known = {name: node for name in names if (node := observer.node(name)) is not None}
    return shortage(
        wanted,
        key=view.key,
        nodes=known,
        pods=listed.values(),
        allocations=allocations,
        resource=resource,
        tolerations=view.spec.tolerations if view.spec is not None else (),
    )
