"""Jobs that some round of a policy can place, and the sizes of their gangs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

from ballast_policies.contract.job.pipeline import BalanceBy
from ballast_policies.planning.launch import LaunchedPipeline
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.rounds.divisions import best_parts, sizes_over_pools
from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.values import TopologyRequest
from ballast_policies.scheduling.faults import each_job
from ballast_policies.scheduling.gang_speeds import GangRequest
from ballast_policies.scheduling.layer_profiles import LayerProfiles
from ballast_policies.scheduling.state import NodeSizes

from ballast_operator.allocator.costs.data_prices import (
    left_out_for_data,
    no_priced_pool,
    pools_without_price,
)
from ballast_operator.allocator.problem.capacity import (
    ClusterCapacity,
    left_out,
    no_pool_left,
    pools_closed,
)
from ballast_operator.allocator.problem.gang_size import (
    GangMemory,
    Room,
    admission_error,
    gang_size,
    gang_sizes,
    may_change_size,
    most_gpus,
)
from ballast_operator.allocator.problem.tolerance import usable_by_pool, with_barred_nodes
from ballast_operator.api.cluster_policy import ClusterPolicySpec
from ballast_operator.api.conditions import JobReason
from ballast_operator.api.training_job import JobTopology, can_mix
from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import JobView, Refusal
from ballast_operator.views.planned_degrees import thinned
from ballast_operator.views.spec import JobSpec

LACK_OF_ROOM = (JobReason.EXCEEDS_CAPACITY, JobReason.EXCEEDS_MEMORY)
"""Refusals of a gang that several pools together may have room for."""


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedJob:
    """A job that wants GPUs and takes no part in the decision."""

    view: JobView
    refusal: Refusal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedRoom:
    """GPUs of several pools of an empty cluster for a job's gang, nodes that may come included.

    Attributes:
        gpus: pool -> (its GPU type, GPUs on which the gang may be started, in whole positions and pods).
        sizes: that the gang may have there, fewest first.
        barred: groups of nodes on which it must not be started.
    """

    gpus: Mapping[str, tuple[str, int]]
    sizes: tuple[int, ...]
    barred: frozenset[str]

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of the pools, sorted."""
        return tuple(sorted({gpu_type for gpu_type, _ in self.gpus.values()}))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A job that some round can place.

    Attributes:
        gpus: the size of its gang; of an elastic one the least.
        sizes: that the gang may have, fewest first.
        shrinks: it runs and can give back what it holds beyond ``gpus``.
        not_tolerated: barring taints.
        memory: which pools have the memory for it.
        closed_pools: that ``spec.spot`` closes to it, or where it is not known what its data costs.
        left_out: pools that it is not offered, by these or for lack of memory, as text.
        mixed: where it could be in several pools at once; None: it may not.
        fits_one_pool: whether some pool can hold its least size.
        topology: what it asks of the domains of its nodes; None: nothing.
        most_of_type: GPU type -> most GPUs that ``maxGpusByType`` leaves it there; absent: any number.
    """

    view: JobView
    gpus: int
    sizes: tuple[int, ...]
    shrinks: bool
    gpu_types: tuple[str, ...]
    not_tolerated: frozenset[str]
    memory: GangMemory
    closed_pools: frozenset[str] = frozenset()
    left_out: str = ""
    mixed: MixedRoom | None = None
    fits_one_pool: bool = True
    topology: TopologyRequest | None = None
    most_of_type: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def spec(self) -> JobSpec:
        """The view's, known to be there."""
        assert self.view.spec is not None
        return self.view.spec

    def request(self, nodes: NodeSizes) -> GangRequest:
        """Its least gang, whose speed is asked; ``nodes``: of the pools."""
        barred = self.not_tolerated
        asked = GangRequest(key=self.view.key, spec=self.spec, stages=self.gpus, nodes=nodes, barred=barred)
        return asked.on_its_nodes


class Admissions:
    """Jobs that some round can place, from decision to decision.

    An admission is a function of the job's view, of what its kind was measured to need of memory, and of
    the cluster. The first two are immutable values that are replaced where they change, so that they
    are compared by identity; of thousands of waiting jobs those are looked at that have changed.
    """

    def __init__(self) -> None:
        self._cluster: tuple[object, ...] = ()
        self._found: dict[Key, tuple[JobView, MemoryNeed | None, Admitted | Refusal]] = {}

    def admit(
        self,
        spec: ClusterPolicySpec,
        capacity: ClusterCapacity,
        views: Sequence[JobView],
        profiles: LayerProfiles,
    ) -> tuple[list[Admitted], list[RefusedJob]]:
        """(jobs that a round can place, those none can); ``profiles``: measured layers. Raises JobFaults."""
        # All that an admission reads besides the job: while it is equal, what was found for a job holds.
        cluster = (
            tuple(capacity.types.items()),
            capacity.gpu_types,
            capacity.nodes,
            capacity.levels,
            capacity.kinds,
            capacity.memory,
            capacity.regions,
            capacity.data_prices,
            capacity.tolerance.not_tolerated,
            capacity.tolerance.too_full,
        )
        known = self._found if cluster == self._cluster else {}
        self._cluster, self._found = cluster, {}
        usable_for: dict[tuple[object, ...], Mapping[str, int]] = {}

        def admit(view: JobView) -> Admitted | Refusal:
            assert view.spec is not None
            need = profiles.need(view.key, view.spec)
            before = known.get(view.key)
            if before is None or before[0] is not view or before[1] is not need:
                before = view, need, _admit_one(spec, capacity, view, usable_for, need)
            self._found[view.key] = before
            return before[2]

        found = list(zip(views, each_job(views, admit, lambda view: view.key), strict=True))
        return (
            [one for _, one in found if isinstance(one, Admitted)],
            [RefusedJob(view, why) for view, why in found if isinstance(why, Refusal)],
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Offer:
    """The pools that a job may use, ``pools``, without those that are ``closed`` to it.

    ``own``: those of its gang, which keeps what it has there. ``left_out``: why others are closed, as text.
    """

    gpu_types: tuple[str, ...]
    pools: tuple[str, ...]
    own: frozenset[str]
    closed: frozenset[str]
    left_out: str

    @classmethod
    def to(cls, spec: ClusterPolicySpec, capacity: ClusterCapacity, view: JobView) -> Self | Refusal:
        """Options that the job is offered, or why there are none."""
        assert view.spec is not None
        wanted, spot = view.spec.gpu_types, view.spec.asked.spot
        gpu_types = tuple(gpu_type for gpu_type in capacity.gpu_types if not wanted or gpu_type in wanted)
        pools = tuple(pool.name for pool in spec.node_pools if pool.gpu_type in gpu_types)
        allocation = view.running_allocation
        own = frozenset(part.pool for part in allocation.by_pool) if allocation is not None else frozenset()
        other_kind = pools_closed(spot, capacity.kinds) - own
        unpriced = pools_without_price(view.spec.data, capacity.regions, capacity.data_prices)
        open_to_it = [pool for pool in pools if pool not in other_kind | own]
        nothing = no_pool_left(spot, other_kind, pools) or no_priced_pool(unpriced, open_to_it)
        if nothing is not None and own.isdisjoint(pools):
            return nothing
        words = (
            left_out(spot, other_kind.intersection(pools)),
            left_out_for_data(unpriced, set(open_to_it)),
            capacity.tolerance.without_room(view, pools),
        )
        closed = other_kind | (unpriced.keys() - own)
        return cls(gpu_types, pools, own, closed, "; ".join(filter(None, words)))


def _admit_one(
    spec: ClusterPolicySpec,
    capacity: ClusterCapacity,
    view: JobView,
    usable_for: dict[tuple[object, ...], Mapping[str, int]],
    need: MemoryNeed | None,
) -> Admitted | Refusal:
    assert view.spec is not None
    offer = _Offer.to(spec, capacity, view)
    if isinstance(offer, Refusal):
        return offer
    allocation = view.running_allocation
    topology = _topology(view.spec.asked.topology, capacity.levels)
    unknown = ""
    if isinstance(topology, Refusal):
        if allocation is None:
            return topology
        unknown = topology.message  # of its next launch: the gang stays as it is
        topology = None
    within = topology if topology is not None and topology.required else None
    memory = GangMemory(spec=view.spec, need=need, pools=capacity.memory, types=capacity.types)
    for avoid in (True, False):  # nodes that the job avoids are better than none
        barred = capacity.tolerance.barred(view, avoid=avoid)
        alike = barred, view.spec.gpus_per_pod, within
        if alike not in usable_for:
            usable_for[alike] = usable_by_pool(capacity.nodes, *alike)
        usable = usable_for[alike]
        gpus = {pool: usable[pool] for pool in offer.pools if pool not in offer.closed}
        # A plan of several GPU types is for no single pool.
        level = "" if within is None else within.label
        room = Room(gpus={} if view.spec.planned_gpus else gpus, memory=memory, within=level)
        size = gang_size(view, room)
        refusal = admission_error(view.spec, spec.node_pools, room, offer.gpu_types, size)
        if refusal is None or allocation is not None or not view.avoided:
            break
    mixed = mixed_room(view, capacity, may_use=offer.pools, closed=offer.closed, barred=barred, memory=memory)
    if allocation is None and refusal is not None:
        if refusal.reason in LACK_OF_ROOM and mixed is not None and holds(view.spec, mixed, memory):
            return Admitted(
                view=view,
                gpus=mixed.sizes[0],
                sizes=mixed.sizes[:1],
                shrinks=False,
                gpu_types=mixed.gpu_types,
                not_tolerated=mixed.barred,
                memory=memory,
                closed_pools=offer.closed,
                left_out=offer.left_out,
                mixed=mixed,
                fits_one_pool=False,
            )
        refusal = over_all_pools(refusal, view.spec, gpus)
        full = capacity.tolerance.without_room(view, offer.pools)
        return with_barred_nodes(refusal, capacity.nodes, barred, offer.gpu_types, full)
    sizes = (allocation.gpus,) if unknown and allocation else gang_sizes(view, room, offer.gpu_types, size)
    if view.over_quota:  # the least alone may fit; it grows from there
        sizes, mixed = sizes[:1], None if mixed is None else dataclasses.replace(mixed, sizes=mixed.sizes[:1])
    size = sizes[0]
    small = memory.too_small(room.gpus, size)
    gpu_types, closed = offer.gpu_types, (small | offer.closed) - offer.own
    if barred or closed:
        holding = {
            pool.gpu_type
            for pool in spec.node_pools
            if usable[pool.name] >= size and pool.name not in small | offer.closed
        }
        holding |= {part.gpu_type for part in allocation.by_pool} if allocation is not None else set()
        gpu_types = tuple(gpu_type for gpu_type in gpu_types if gpu_type in holding)
        # Of the other types no node is asked for; of these, the nodes of closed pools are barred.
        barred |= {
            node.taints for node in capacity.nodes if node.pool in closed and node.gpu_type in gpu_types
        }
    words = memory.left_out(room.gpus, size) if small else "", offer.left_out, unknown
    return Admitted(
        view=view,
        gpus=size,
        sizes=sizes,
        shrinks=len(sizes) > 1 and may_change_size(view),
        gpu_types=gpu_types,
        not_tolerated=barred,
        memory=memory,
        closed_pools=offer.closed,
        mixed=mixed,
        fits_one_pool=refusal is None,
        topology=None if topology is None else dataclasses.replace(topology, most=sizes[-1]),
        left_out="; ".join(filter(None, words)),
    )


def _topology(asked: JobTopology | None, levels: Sequence[str]) -> TopologyRequest | Refusal | None:
    """Request of a job for domains of its nodes, of which the policy knows ``levels``."""
    if asked is None:
        return None
    label = asked.required or asked.preferred or ""
    if label in levels:
        return TopologyRequest(label, levels.index(label), asked.required is not None)
    field = "required" if asked.required else "preferred"
    return Refusal(
        JobReason.MISCONFIGURED,
        f"topology.{field}={label} is none of the ClusterPolicy's topology.levels "
        f"({', '.join(levels) or 'it has none'}). To fix: name one of these, or add it there",
    )


def sizes_that_fit(
    one: Admitted, by_size: Mapping[str, Mapping[int, float]], capacity: ClusterCapacity
) -> dict[str, dict[int, float]]:
    """GPU type -> size -> steps/s, without sizes above its namespace's limit, or above a pool's memory.

    Of pools that are closed to the job nothing is asked; the size that it has stays.
    """
    by_size = {
        gpu_type: {size: rate for size, rate in found.items() if size <= one.most_of_type.get(gpu_type, size)}
        for gpu_type, found in by_size.items()
    }
    if not one.memory.limits:
        return {gpu_type: dict(found) for gpu_type, found in by_size.items()}
    held = one.view.held_placement
    open_pools = {(n.gpu_type, n.pool) for n in capacity.nodes if n.taints not in one.not_tolerated}
    fitting = {
        gpu_type: {
            size: rate
            for size, rate in found.items()
            if (held is not None and size == held.gpus)
            or all(one.memory.fits(pool, size) for of_type, pool in open_pools if of_type == gpu_type)
        }
        for gpu_type, found in by_size.items()
    }
    return {gpu_type: found for gpu_type, found in fitting.items() if found}


def mixed_room(
    view: JobView,
    capacity: ClusterCapacity,
    *,
    may_use: Sequence[str],
    closed: frozenset[str],
    barred: frozenset[str],
    memory: GangMemory,
) -> MixedRoom | None:
    """The room of a job that allows several pools; None: it does not, or fewer than two have some.

    ``closed``: pools that ``spec.spot`` closes to it. ``barred``: groups of nodes that its template does not
    tolerate. Of ``memory`` only what the job states is read; the stages are cut to each GPU's.
    """
    spec = view.spec
    assert spec is not None
    if not spec.mixes_pools or spec.layers is None:
        return None
    least = (spec.memory_per_gpu or 0.0) / ROUNDING
    shut = closed | {pool for pool in may_use if memory.pools.get(pool, least) < least}
    types = capacity.types
    held = view.running_allocation
    own = {part.pool for part in held.by_pool} if held is not None else set[str]()
    open_types = {types[pool] for pool in may_use if pool not in shut or pool in own}
    barred |= {n.taints for n in capacity.nodes if n.pool in shut - own and n.gpu_type in open_types}
    open_nodes = [node for node in capacity.nodes if node.gpu_type in open_types]
    usable = usable_by_pool(open_nodes, barred, spec.gpus_per_pod)
    together = spec.gpus_per_pod if spec.plans else spec.ranks_together(spec.gpus_per_pod)
    room = {pool: usable[pool] // together * together for pool in may_use}
    gpus = {pool: (types[pool], count) for pool, count in room.items() if count > 0}
    total = sum(count for _, count in gpus.values())
    fewest = max(spec.smallest_gang, 2 * together)
    sizes = [size for size in range(fewest, min(most_gpus(view), total) + 1) if spec.suits(size)]
    if spec.plans:
        sizes = sizes_over_pools(_gang_over(spec, gpus, sizes, memory), gpus)
    if len(gpus) < 2 or not sizes:
        return None
    return MixedRoom(gpus=gpus, sizes=tuple(thinned(sizes if spec.grow else sizes[-1:])), barred=barred)


def known_over_planned(spec: JobSpec, rates: Mapping[str, float], gpus: int) -> dict[str, float]:
    """GPU type -> its speed over the planned one; ``rates``: steps/s of ``gpus`` of it, as estimated."""
    planned = {gpu_type: by_size[gpus] for gpu_type, by_size in spec.plans.items() if gpus in by_size}
    known = {t: rates.get(t, 0.0) * degrees.step_seconds for t, degrees in planned.items()}
    return {gpu_type: ratio for gpu_type, ratio in known.items() if ratio > 0}


def over_all_pools(refusal: Refusal, spec: JobSpec, room: Mapping[str, int]) -> Refusal:
    """The refusal for lack of a pool's GPUs, with what several change; ``room``: pool -> usable GPUs."""
    if refusal.reason != JobReason.EXCEEDS_CAPACITY or not can_mix(spec.config):
        return refusal
    if spec.planned_gpus:
        needs = ", ".join(f"{gpus} x {gpu_type}" for gpu_type, gpus in spec.planned_gpus)
        has = ", ".join(f"{name} {count}" for name, count in sorted(room.items())) or "none"
        pods = f" in pods of gpusPerPod={spec.gpus_per_pod}" if spec.gpus_per_pod > 1 else ""
        message = (
            f"plan.gpus needs {needs}{pods}, with memory for its layers; its pools have "
            f"room for: {has}. To fix: a plan for the GPUs that there are, or add nodes"
        )
        return dataclasses.replace(refusal, message=message)
    if spec.mixes_pools:
        has = ", ".join(f"{name} {count}" for name, count in sorted(room.items()))
        message = (
            f"needs {spec.smallest_gang} GPUs; its pools do not have them together, with the memory "
            f"for its layers: {has}. To fix: lower pipeline.minStages, or add nodes"
        )
        return dataclasses.replace(refusal, message=message)
    if spec.smallest_gang <= sum(room.values()):
        return dataclasses.replace(refusal, message=f"{refusal.message}, or set mixedPools: Allowed")
    return refusal


def launched_pipeline(spec: JobSpec, layers: MeasuredLayers | None) -> LaunchedPipeline:
    """Layers from which the stages of the job's next launch are cut, as in ``JobSpec.first_stages``."""
    known, rebalance = layers or MeasuredLayers(), spec.config.rebalance
    if not rebalance.enabled or rebalance.by is not BalanceBy.TIME:
        known = dataclasses.replace(known, seconds=())
    if spec.memory_per_gpu is not None:
        known = dataclasses.replace(known, held_bytes=(), activation_bytes=())
    return LaunchedPipeline(
        layers=known,
        count=spec.layers or 1,
        form=spec.pipeline_form(),
        ranks_per_position=1 if spec.plans else spec.ranks_per_position,
        cut=spec.planned_cut,
    )


def within_limit(spec: JobSpec, memory: Mapping[str, float]) -> dict[str, float]:
    """Pool -> bytes of each GPU that the job may fill."""
    limit = spec.config.rebalance.memory_bytes
    return {pool: has if limit is None else min(has, limit) for pool, has in memory.items()}


def holds(spec: JobSpec, room: MixedRoom, memory: GangMemory) -> bool:
    """True if the gang fits several pools of an empty cluster, the memory of their GPUs included."""
    return bool(best_parts(_gang_over(spec, room.gpus, room.sizes[:1], memory), room.gpus))


def _gang_over(
    spec: JobSpec, room: Mapping[str, tuple[str, int]], sizes: Sequence[int], memory: GangMemory
) -> MixedGang:
    """The gang in an empty cluster whose GPUs are alike."""
    layers = memory.need.layers if memory.need is not None else None
    return MixedGang(
        pipeline=launched_pipeline(spec, layers),
        sizes=tuple(sizes),
        speeds={gpu_type: 1.0 for gpu_type, _ in room.values()},
        base=spec.ranks_per_position,
        memory=within_limit(spec, memory.pools),
        per_pod=spec.gpus_per_pod,
        planned=spec.planned_speeds,
    )
