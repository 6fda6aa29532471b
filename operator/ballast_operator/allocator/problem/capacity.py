"""The pools of a ClusterPolicy: nodes, those that an autoscaler would add (``maxNodes``), GPUs, prices.

A pool's machines are spot or on demand, as stated or as labels say: some jobs may use one kind alone.
"""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.gpus.catalogue import (
    AMD_PARTITION,
    AMD_PREFIXES,
    NVIDIA_PRODUCT,
    gpu_named,
    gpu_of_node,
)
from ballast_policies.prices.egress import NO_DATA_PRICES, DataPrices
from ballast_policies.rounds.question import SpotLimits
from ballast_policies.rounds.spot_limits import nodes_by_place
from ballast_policies.rounds.values import Node, Round, domains_of, gpus_by, own_domain
from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.scheduling.refusals import Refusal, Verdict
from ballast_policies.scheduling.state import Capacity

from ballast_operator.allocator.costs.data_prices import pool_region
from ballast_operator.allocator.problem.tolerance import Tolerance
from ballast_operator.api.base import memory_bytes
from ballast_operator.api.cluster_policy import ClusterPolicy, ClusterPolicySpec
from ballast_operator.api.conditions import JobReason, PolicyCondition, PolicyReason, some_of
from ballast_operator.api.costs import SpotUse
from ballast_operator.api.job_allocation import JobAllocation, coming_node, is_coming, pool_to_grow
from ballast_operator.api.node_pool import CapacityType, NodePool
from ballast_operator.kube.kinds import Key, key_of
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import (
    NodeView,
    as_shared,
    dedupe_shared_allocations,
    foreign_use,
    orphans,
    pod_gpus,
    why_not_shared,
    zone_of,
)
from ballast_operator.views.notices import capacity_type_of

if TYPE_CHECKING:
    from ballast_operator.allocator.problem.snapshot import Observed

NAMED_NODES = 3
"""Nodes that a message names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolKind:
    """The capacity type that counts, and as text what contradicts it; empty: nothing does."""

    capacity_type: CapacityType = CapacityType.ON_DEMAND
    conflict: str = ""


def pool_kind(pool: NodePool, nodes: Sequence[NodeView]) -> PoolKind:
    """Kind of ``pool``: as it states, else by most of its nodes' labels, else by its selector's."""
    said: dict[CapacityType, list[tuple[str, str]]] = {}
    for node in nodes:
        found = capacity_type_of(node.labels)
        if found is not None:
            said.setdefault(found[0], []).append((node.name, found[1]))
    counts = Counter({kind: len(entries) for kind, entries in said.items()})
    selected = capacity_type_of(pool.node_selector)
    kind = pool.capacity_type
    if kind is None and counts:
        kind = max(counts, key=lambda one: (counts[one], one))
    elif kind is None:
        kind = selected[0] if selected is not None else CapacityType.ON_DEMAND
    others = [entry for other, entries in said.items() if other is not kind for entry in entries]
    if not others:
        return PoolKind(capacity_type=kind)
    named = some_of([f"{name} ({label})" for name, label in others], NAMED_NODES)
    stated = "capacityType is" if pool.capacity_type is not None else "most nodes are"
    conflict = f"pool {pool.name}: {stated} {kind}, but not of {named}"
    return PoolKind(capacity_type=kind, conflict=conflict)


def types_differ(kinds: Iterable[PoolKind]) -> list[Verdict]:
    """The condition CapacityTypesAgree, where labels contradict; nothing where none does."""
    conflicts = [kind.conflict for kind in kinds if kind.conflict]
    if not conflicts:
        return []
    fix = "To fix: a pool for each type, or correct nodePools[].capacityType"
    message = f"{'; '.join(conflicts[:5])}. {fix}"
    return [Verdict(PolicyCondition.CAPACITY_TYPES_AGREE, False, PolicyReason.TYPES_DIFFER, message)]


_CLOSED = {
    SpotUse.ALLOW: None,
    SpotUse.FORBID: CapacityType.SPOT,
    SpotUse.REQUIRE: CapacityType.ON_DEMAND,
}


def told_apart(
    pools: Sequence[NodePool],
    memory: Mapping[str, float],
    kinds: Mapping[str, PoolKind],
    regions: Mapping[str, str],
    jobs: Iterable[JobView],
) -> Mapping[str, str]:
    """Pool -> mark, of pools that differ from others of their GPU type to some of ``jobs``.

    By their memory; by capacity type and region if one of the jobs tells these apart.
    """
    by_type: dict[str, set[float | None]] = {}
    for pool in pools:
        by_type.setdefault(pool.gpu_type, set()).add(memory.get(pool.name))
    specs = [view.spec for view in jobs if view.spec is not None]
    by_kind = any(s.asked.spot is not SpotUse.ALLOW or s.asked.deadline is not None for s in specs)
    by_region = any(spec.data is not None for spec in specs)
    marks = {
        pool.name: (
            *((f"memory {memory.get(pool.name)}",) if len(by_type[pool.gpu_type]) > 1 else ()),
            *((str(kinds[pool.name].capacity_type),) if by_kind else ()),
            *((regions[pool.name],) if by_region else ()),
        )
        for pool in pools
    }
    return {pool: " ".join(mark) for pool, mark in marks.items() if mark}


def pools_closed(spot: SpotUse, kinds: Mapping[str, PoolKind]) -> frozenset[str]:
    """Pools whose machines the job must not be started on."""
    return frozenset(pool for pool, kind in kinds.items() if kind.capacity_type is _CLOSED[spot])


def no_pool_left(spot: SpotUse, closed: Collection[str], pools: Collection[str]) -> Refusal | None:
    """Refusal of a job that may use ``pools`` otherwise; None: some of them are open to it."""
    if not pools or any(pool not in closed for pool in pools):
        return None
    what = "spot machines" if spot is SpotUse.FORBID else "machines that are not spot"
    return Refusal(
        JobReason.NO_MATCHING_CAPACITY_TYPE,
        f"spec.spot is {spot}, and all pools of its GPU types have {what}: "
        f"{', '.join(sorted(pools)[:5])}. To fix: set spec.spot to Allow, or add a pool",
    )


def left_out(spot: SpotUse, closed: Iterable[str]) -> str:
    """Pools that a job is not offered, as text; empty: none."""
    named = ", ".join(sorted(closed)[:5])
    return f"spec.spot is {spot}: not offered {named}" if named else ""


def spot_limits(spec: ClusterPolicySpec, kinds: Mapping[str, PoolKind]) -> SpotLimits:
    """The limits over the pools that are spot at present."""
    return SpotLimits(
        pools=frozenset(pool for pool, kind in kinds.items() if kind.capacity_type is CapacityType.SPOT),
        on_demand_share=spec.spot.on_demand_share,
        most_in_one_pool=spec.spot.most_in_one_pool,
    )


def within_spot_limits(limits: SpotLimits, decided: Round, nodes: Iterable[Node]) -> list[Verdict]:
    """The condition WithinSpotLimits after a round, if anything is limited; ``nodes``: with zones."""
    if not limits.limits:
        return []
    places, used, total = {node.name: node.place for node in nodes}, Counter[str](), 0
    for placement in decided.first_placements.values():
        total += len(placement.nodes)
        for place, there in nodes_by_place(placement, places, limits.pools).items():
            used[place] += len(there)
    in_use, spot = dict(sorted(used.items())), used.total()
    message = f"{spot} of {total} GPUs in use are spot" + (
        f" ({', '.join(f'{count} of pool {pool}' for pool, count in in_use.items())})" if in_use else ""
    )
    if decided.blocked_by_spot_limit:
        jobs = sorted(decided.blocked_by_spot_limit)
        why = decided.blocked_by_spot_limit[jobs[0]]
        message += f"; kept off spot machines: {some_of(jobs)}, by {why}"
        return [Verdict(PolicyCondition.WITHIN_SPOT_LIMITS, False, PolicyReason.SPOT_LIMIT_REACHED, message)]
    if spot > limits.most(total):
        message += f", at most {limits.most(total)} could be started; what runs stays"
        return [Verdict(PolicyCondition.WITHIN_SPOT_LIMITS, False, PolicyReason.SPOT_LIMIT_EXCEEDED, message)]
    return [Verdict(PolicyCondition.WITHIN_SPOT_LIMITS, True, PolicyReason.SPOT_AS_ALLOWED, message)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterCapacity(Capacity):
    """The pools of a ClusterPolicy at one moment.

    Attributes:
        members: pool -> names of its nodes.
        tolerance: which jobs tolerate the taints of which nodes.
        kinds: pool -> what kind of machines it has.
        data_prices: of data between regions.
        in_use: node -> its GPUs that running gangs hold.
        overlaps: nodes that match two pools, as text; they are in ``nodes`` only for gangs that run there.
        shrunk: nodes that offer fewer GPUs than gangs hold, as text; without those that offer none, as while
            their device plugin starts again.
        orphans: pods of jobs that were deleted without them, and whose GPUs they hold.
        stuck: pods that were to have ended, and whose GPUs they hold.
        pools_without_gpus: pools that have nodes, none of which offers a GPU.
        shared: node -> bytes of its one GPU, which two jobs may share; 0: not known.
        left_out: node -> its GPUs that gangs hold which a decision leaves out; they are not in ``nodes``.
        levels: labels of the topology's levels, the widest first.
    """

    members: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tolerance: Tolerance = dataclasses.field(default_factory=Tolerance)
    kinds: Mapping[str, PoolKind] = dataclasses.field(default_factory=dict)
    data_prices: DataPrices = NO_DATA_PRICES
    in_use: Mapping[str, int] = dataclasses.field(default_factory=dict)
    overlaps: tuple[str, ...] = ()
    shrunk: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    pools_without_gpus: tuple[str, ...] = ()
    shared: Mapping[str, float] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    levels: tuple[str, ...] = ()

    @functools.cached_property
    def types(self) -> Mapping[str, str]:
        """Pool -> its GPU type."""
        return {pool.pool: pool.gpu_type for pool in self.pools}

    @functools.cached_property
    def idle(self) -> Mapping[str, int]:
        """Node -> its GPUs that running gangs do not hold."""
        return {node.name: node.gpus - self.in_use.get(node.name, 0) for node in self.nodes}

    @functools.cached_property
    def alike(self) -> frozenset[tuple[str, str, str]]:
        """(GPU type, pool, taints) of nodes that are there: few, where there are thousands of nodes."""
        return frozenset((node.gpu_type, node.pool, node.taints) for node in self.nodes)

    @property
    def levels_without_nodes(self) -> tuple[str, ...]:
        """Labels of levels that no node has: there each node is a domain of its own."""
        return tuple(
            label
            for level, label in enumerate(self.levels)
            if all(node.domain(level).endswith(own_domain(node.name)) for node in self.nodes)
        )

    @property
    def gpus_by_pool(self) -> Counter[str]:
        """Pool -> GPUs of the nodes that exist."""
        there = (node for node in self.nodes if not node.provisionable)
        return _total((node.pool, node.gpus + self.left_out.get(node.name, 0)) for node in there)


def read_capacity(
    spec: ClusterPolicySpec,
    seen: "Observed",
    *,
    jobs: Sequence[JobView],
    wanting: Sequence[JobView],
    left_out: Sequence[JobView] = (),
) -> ClusterCapacity:
    """The capacity of a policy's pools, less what pods of others hold.

    ``left_out``: jobs that the decision leaves out, and which are not among ``jobs``: their gangs keep what
    they hold.

    Nodes that are closed, or have a taint that none of the jobs ``wanting`` GPUs tolerates, are there only
    for the gangs that run on them; so are those that offer fewer GPUs than these hold, as all do while their
    device plugin starts again.
    """
    pools, levels, held = spec.node_pools, spec.topology.labels, _held_by_running_gangs(jobs)
    members, overlaps = assign_nodes(pools, seen.nodes, held)
    coming, promised = provisionable_nodes(pools, members, [*jobs, *left_out])
    kept = _kept(left_out)
    listed = {name: [*found, *coming[name]] for name, found in members.items()}
    memory = {pool.name: has for pool in pools if (has := pool_memory(pool, members[pool.name])) is not None}
    kinds = {pool.name: pool_kind(pool, members[pool.name]) for pool in pools}
    regions = {
        pool.name: pool_region(pool, members[pool.name], seen.regions.get(pool.name, "")) for pool in pools
    }
    apart = told_apart(pools, memory, kinds, regions, wanting)
    tolerance = Tolerance.of(pools, listed, wanting, apart=apart)
    values: list[Node] = []
    shared: dict[str, float] = {}
    shrunk: list[str] = []
    foreign = {
        resource: foreign_use(seen.pods, resource) for resource in {pool.gpu_resource for pool in pools}
    }
    for resource, used in foreign.items():
        for pod in seen.stuck:
            used[pod["spec"]["nodeName"]] += pod_gpus(pod, resource)
    for pool in pools:
        for node in listed[pool.name]:
            taints = tolerance.taints[node.name]
            others = foreign[pool.gpu_resource][node.name] + kept[node.name]
            offered, mine = node.gpus(pool.gpu_resource), held[pool.name][node.name]
            gpus = offered - others
            if pool.sharing is not None and not why_not_shared(node, pool.gpu_resource):
                shared[node.name] = memory.get(pool.name, 0.0)
                gpus = min(1, mine) if others else 1
            closed = node.closed or promised.get(node.name, "")
            if pool.sharing is None and offered < mine:
                few = f"offers {offered} GPUs, and gangs hold {mine}"
                gpus, closed = mine, closed or few
                shrunk += [f"node {node.name} {few}"] if offered else []
            if closed or taints in tolerance.by_no_job:
                gpus = min(gpus, mine)
            values.append(
                Node(
                    name=node.name,
                    pool=pool.name,
                    gpu_type=pool.gpu_type,
                    gpus=max(0, gpus),
                    taints=taints,
                    closed=closed,
                    provisionable=is_coming(node.name),
                    zone=zone_of(node.labels),
                    domains=domains_of(node.name, node.labels, levels),
                )
            )
    by_pool = gpus_by(values, lambda node: node.pool)
    return ClusterCapacity(
        gpu_types=tuple(sorted({pool.gpu_type for pool in pools})),
        nodes=tuple(values),
        members={name: tuple(node.name for node in found) for name, found in members.items()},
        pools=tuple(
            PricedPool(
                pool=pool.name,
                gpu_type=pool.gpu_type,
                price=pool.price_per_gpu_hour,
                gpus=by_pool[pool.name],
            )
            for pool in pools
        ),
        tolerance=tolerance,
        kinds=kinds,
        memory=memory,
        regions=regions,
        in_use=sum(held.values(), Counter[str]()),
        overlaps=tuple(overlaps),
        shrunk=tuple(shrunk),
        orphans=tuple(orphans(seen.pods, (pool.gpu_resource for pool in pools))),
        stuck=tuple(sorted(job_id(key_of(pod)) for pod in seen.stuck)),
        pools_without_gpus=tuple(
            pool.name
            for pool in pools
            if members[pool.name] and not any(node.gpus(pool.gpu_resource) for node in members[pool.name])
        ),
        shared=shared,
        left_out=kept,
        levels=levels,
    )


GPU_LABELS = (NVIDIA_PRODUCT, AMD_PARTITION, *AMD_PREFIXES)
"""Prefixes of the keys of labels that tell a node's GPU."""


def pool_memory(pool: NodePool, nodes: Sequence[NodeView]) -> float | None:
    """Bytes of each of the pool's GPUs; None: not known.

    As stated; else by the catalogue: the least of its nodes' GPUs, or that of its selector's labels, or the
    one that its GPU type names.
    """
    if pool.memory_per_gpu is not None:
        return memory_bytes(pool.memory_per_gpu)
    alike = {
        tuple(sorted(pair for pair in node.labels.items() if pair[0].startswith(GPU_LABELS)))
        for node in nodes
    }
    labels = [dict(pairs) for pairs in alike] or [pool.node_selector]
    found = [gpu.memory_bytes for gpu in map(gpu_of_node, labels) if gpu is not None]
    if found:
        return min(found)
    named = gpu_named(pool.gpu_type)
    return named.memory_bytes if named is not None else None


def _total(entries: Iterable[tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for name, gpus in entries:
        total[name] += gpus
    return total


def _held_by_running_gangs(jobs: Sequence[JobView]) -> Mapping[str, Counter[str]]:
    """Pool -> node -> GPUs of gangs that are not ending, without pods that are about to go."""
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for view in jobs:
        allocation = view.held_placement
        if allocation is not None:
            first, nodes = 0, allocation.placement.nodes
            for part in allocation.by_pool:
                held[part.pool].update(nodes[first : first + part.gpus])
                first += part.gpus
    return held


def _kept(jobs: Sequence[JobView]) -> Counter[str]:
    """Node -> GPUs of the gangs of jobs that a decision leaves out."""
    found: Counter[str] = Counter()
    for allocation in dedupe_shared_allocations(
        [held for view in jobs if (held := view.running_allocation) is not None]
    ):
        found.update(allocation.placement.nodes)
    return found


def assign_nodes(
    pools: Sequence[NodePool], nodes: Mapping[str, NodeView], held: Mapping[str, Counter[str]]
) -> tuple[dict[str, list[NodeView]], list[str]]:
    """(pool -> its nodes by name, nodes that match two pools, as text).

    One that matches two takes no gang, nor does one that has lost the labels of its pool, as all have for a
    while when what labels them is replaced; while some run there, it is in the pool of these. ``held``:
    pool -> node -> GPUs of running gangs.
    """
    members: dict[str, list[NodeView]] = {pool.name: [] for pool in pools}
    by_name = {pool.name: pool for pool in pools}
    overlaps = []
    for name in sorted(nodes):
        node, matching = nodes[name], matching_pools(pools, nodes[name])
        closed = ""
        if len(matching) > 1:
            closed = f"matches pools {' and '.join(matching)}"
            overlaps.append(f"node {name} {closed}")
        elif not matching:
            closed = "matches no pool any more"
        if closed:
            matching = [pool for pool in matching or by_name if pool in held and held[pool][name]]
        if matching:
            node = dataclasses.replace(node, closed=closed) if closed else node
            pool = by_name[matching[0]]
            members[pool.name].append(node if pool.sharing is None else as_shared(node, pool.gpu_resource))
    return members, overlaps


def in_todays_pools(
    jobs: Sequence[JobView],
    policy: ClusterPolicy,
    nodes: Mapping[str, NodeView],
    faults: dict[Key, Exception],
) -> list[JobView]:
    """The jobs, with running gangs in the pools that their nodes are in now: pools are renamed and split.

    A gang in one pool stays its pool's, whatever that is called, also on nodes that have lost its labels; one
    whose pool is gone, whose nodes are of several or of another GPU type, or will not come since the pool has
    no ``maxNodes`` any more, needs GPUs elsewhere (``JobView.lost_pool``). ``faults``: takes in the jobs for
    which this raises, which stay as they are.
    """
    pools = policy.spec.node_pools
    types = {pool.name: pool.gpu_type for pool in pools}
    growing = {pool.name for pool in pools if pool.max_nodes}

    def today_or_as_it_is(view: JobView) -> JobView:
        try:
            return today(view)
        except Exception as error:
            faults[view.key] = error
            return view

    def today(view: JobView) -> JobView:
        allocation = view.running_allocation
        if allocation is None:
            return view
        there = {
            node: pool
            for node in dict.fromkeys(allocation.nodes)
            if (pool := _pool_now(node, pools, nodes, allocation)) is not None
        }
        now = allocation.in_pools(there)
        known = now is not None and all(types.get(part.pool) == part.gpu_type for part in now.by_pool)
        if now is None or not known or not growing.issuperset(now.pools_to_grow):
            held = " and ".join(map(str, allocation.by_pool))
            why = f"it held {held}: its nodes are not in such a pool of the ClusterPolicy any more"
            return dataclasses.replace(view, lost_pool=why)
        if now is allocation:
            return view
        return dataclasses.replace(view, status=view.status.replace(allocation=now))

    return [today_or_as_it_is(view) for view in jobs]


def _pool_now(
    node: str, pools: Sequence[NodePool], nodes: Mapping[str, NodeView], allocation: JobAllocation
) -> str | None:
    """The pool of a gang's node; None: the node is not there, or in none."""
    matching = matching_pools(pools, nodes[node]) if node in nodes else []
    own = {part.pool for part in allocation.by_pool}
    return next((name for name in matching if name in own), matching[0] if matching else None)


def matching_pools(pools: Sequence[NodePool], node: NodeView) -> list[str]:
    """Names of the pools whose selector the node matches."""
    return [pool.name for pool in pools if pool.node_selector.items() <= node.labels.items()]


def held_by_pool(jobs: Sequence[JobView]) -> Counter[str]:
    """Pool -> GPUs of nodes that exist which jobs hold, those of ending gangs included."""
    allocations = [held for view in jobs if (held := view.status.allocation) is not None]
    return _total(
        (part.pool, part.gpus)
        for held in dedupe_shared_allocations(allocations)
        for part in held.on_nodes_by_pool
    )


def provisionable_nodes(
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
        if allocation is None or not allocation.pools_to_grow:
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
