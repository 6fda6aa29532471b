"""What a pass over a job has to know of the pools of its gang, and whether their nodes have room for it."""

import dataclasses
from collections.abc import Mapping, Sequence

from ballast_policies.rounds import Placement

from ballast_operator.kube.kinds import POD
from ballast_operator.observation.observer import Observer
from ballast_operator.views.assignment import PoolInfo
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import shortage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangPools:
    """The pools of a gang.

    Attributes:
        first: that of rank 0.
        all: pool -> the same, of a gang in several; empty: it is in one.
    """

    first: PoolInfo
    all: Mapping[str, PoolInfo]

    @classmethod
    def of(cls, placement: Placement | None, pools: Mapping[str, PoolInfo]) -> "GangPools":
        """Those of ``placement``, of which nothing may be known."""
        if placement is None:
            return cls(first=pools.get("", PoolInfo()), all={})
        return cls(
            first=pools.get(placement.pool, PoolInfo()),
            all={part.pool: pools.get(part.pool, PoolInfo()) for part in placement.parts},
        )

    def prices(self, since: Time | None, now: Time) -> dict[str, float]:
        """Pool -> mean price of a GPU hour from ``since`` to ``now``, of a gang in several."""
        return {name: pool.mean_price(since, now) for name, pool in self.all.items()}

    def shortage(
        self, observer: Observer, view: JobView, wanted: Sequence[str], placement: Placement | None
    ) -> str:
        """Why the nodes ``wanted``, one for each GPU, cannot hold the job yet, as text; empty: they can.

        The parts of a gang in several pools ask for the resource of their own.
        """
        if placement is None or not placement.parts:
            return _shortage(observer, view, wanted, self.first.gpu_resource)
        first = 0
        for part in placement.parts:
            here = wanted[first : first + part.gpus]
            lacking = _shortage(observer, view, here, self.all[part.pool].gpu_resource)
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
