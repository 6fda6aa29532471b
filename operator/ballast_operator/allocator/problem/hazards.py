"""Rates at which machines of spot pools are taken away: counted with decisions, kept in the status.

A preemption is a node that announces that it goes, or is lost, while a gang is on it: autoscalers remove idle
nodes for other reasons.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ballast_policies.prices.hazard import Hazard
from ballast_policies.protocol.observed import Cause

from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus, PoolHazard
from ballast_operator.api.job_allocation import is_coming
from ballast_operator.api.node_pool import CapacityType, NodePool
from ballast_operator.kube.kinds import Object
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView

OUTSIDE = 0.05
"""Probability that a rate is not between its bounds, half of it on either side."""


LOSSES = frozenset({Cause.NODE_LEAVING, Cause.NODE_LOST, Cause.POD_LOST, Cause.PEER_LOST})
"""Ends of launches whose nodes still count as held: a node's end may be what ended them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeenNodes:
    """The nodes of spot pools at one decision.

    Attributes:
        in_use: node -> pool, of nodes with gangs that have not announced anything.
        counted: nodes that are about to go, or gone from under a gang, and that are counted.
        looked: whether there was a decision before: what goes at the first one, an operator before this one
            may have counted.
        preempted: pool -> nodes with gangs that have gone, or announced it, since the first decision.
    """

    in_use: Mapping[str, str] = dataclasses.field(default_factory=dict)
    counted: frozenset[str] = frozenset()
    looked: bool = False
    preempted: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def next(
        self, capacity: ClusterCapacity, nodes: Mapping[str, NodeView], jobs: Sequence[JobView]
    ) -> "SeenNodes":
        """The same at the next decision.

        A gang that was launched since the last one counts as well, and so does one whose launch ends since
        its node goes.
        """
        running, held = _held(jobs, capacity)
        in_use = {name: pool for name, pool in running.items() if not _goes(nodes.get(name))}
        preempted, counted = dict(self.preempted), set[str]()
        for name, pool in {**self.in_use, **held}.items():
            if not _goes(nodes.get(name)):
                continue
            counted.add(name)
            if name not in self.counted and (self.looked or name in self.in_use):
                preempted[pool] = preempted.get(pool, 0) + 1
        # Whichever job holds it, a node that is still there stays counted until it announces nothing more.
        counted |= {name for name in self.counted if name in nodes and _goes(nodes[name])}
        return SeenNodes(in_use=in_use, counted=frozenset(counted), looked=True, preempted=preempted)


def _goes(node: NodeView | None) -> bool:
    """True if a node is gone, about to go, or not ready."""
    return node is None or not node.ready or node.leaving is not None


def _held(jobs: Sequence[JobView], capacity: ClusterCapacity) -> tuple[dict[str, str], dict[str, str]]:
    """Node -> its spot pool: (of gangs that run or start, of these and of launches that losses end)."""
    running: dict[str, str] = {}
    held: dict[str, str] = {}
    for view in jobs:
        allocation = view.status.allocation
        if allocation is None or (allocation.ending is not None and allocation.ending.cause not in LOSSES):
            continue
        for pod, node in allocation.node_of.items():
            pool = allocation.part_of(pod).pool
            kind = capacity.kinds.get(pool)
            if kind is None or kind.capacity_type is not CapacityType.SPOT or is_coming(node):
                continue
            held[node] = pool
            if allocation.ending is None:
                running[node] = pool
    return running, held


def next_hazards(
    status: Object, seen: SeenNodes | None, snapshot: Snapshot | None, told: Mapping[str, int], now: Time
) -> tuple[PoolHazard, ...]:
    """The hazards of the old ``status`` brought up to now; as they were where nothing was looked at.

    ``told``: of what is preempted by ``seen``, that which the status has: not each decision is reported.
    """
    before, at = _known(status)
    if seen is None or snapshot is None:
        return tuple(before.values())
    hours = 0.0 if at is None else max(0.0, (now - at).total_seconds()) / 3600.0
    found = []
    for pool, kind in snapshot.capacity.kinds.items():
        if kind.capacity_type is not CapacityType.SPOT:
            continue
        known = before.get(pool, PoolHazard(pool=pool))
        new = known.replace(
            nodes=sum(of == pool for of in seen.in_use.values()),
            node_hours=known.node_hours + known.nodes * hours,
            preemptions=known.preemptions + seen.preempted.get(pool, 0) - told.get(pool, 0),
        )
        doubled = math.frexp(new.node_hours)[1] != math.frexp(known.node_hours)[1]
        if new.preemptions != known.preemptions or doubled or pool not in before:
            rate = Hazard(preemptions=new.preemptions, hours=new.node_hours)
            new = new.replace(
                per_hour=rate.per_hour,
                per_hour_low=rate.quantile_per_hour(OUTSIDE / 2),
                per_hour_high=rate.quantile_per_hour(1 - OUTSIDE / 2),
            )
        found.append(new)
    return tuple(found)


def spot_seen(snapshot: Snapshot, spec: Sequence[NodePool], status: Object | None) -> Snapshot:
    """``snapshot`` with what has been seen of spot pools, and how long nodes of each pool take to start."""
    before, _ = _known(status)
    return dataclasses.replace(
        snapshot,
        preempted={
            pool: Hazard(preemptions=known.preemptions, hours=known.node_hours)
            for pool, known in before.items()
        },
        start_seconds={pool.name: pool.start_seconds for pool in spec},
    )


def _known(status: Object | None) -> tuple[dict[str, PoolHazard], Time | None]:
    """Hazards that an operator has written; none where they cannot be read."""
    read = ClusterPolicyStatus.written(status, "hazard", "billAt")
    if read is None:
        return {}, None
    return {entry.pool: entry for entry in read.hazard}, read.bill_at
