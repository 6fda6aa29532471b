"""Jobs that some round of a policy can place within the limits of tenants, and the sizes of their gangs."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Self

from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.rounds.tenants import ALL_TYPES, LimitField, TenantJob, TenantLimit, admit_by_tenant
from ballast_policies.rounds.values import NodeRequest, TopologyRequest
from ballast_policies.scheduling.gang_room import (
    LACK_OF_ROOM,
    GangMemory,
    MixedRoom,
    Room,
    admission_error,
    gang_size,
    gang_sizes,
    holds,
    mixed_room,
    over_all_pools,
    with_barred_nodes,
)
from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.scheduling.gang_speeds import NO_NODES, GangRequest
from ballast_policies.scheduling.measurements import LayerProfiles
from ballast_policies.scheduling.refusals import Refusal, each_job
from ballast_policies.scheduling.state import NodeSizes, TenantRooms

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
from ballast_operator.api.cluster_policy import ClusterPolicySpec, EntityShare, Tenants
from ballast_operator.api.conditions import JobReason
from ballast_operator.api.training_job import JobTopology, can_mix
from ballast_operator.kube.kinds import Key
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec


def most_gpus(view: JobView) -> int:
    """Most GPUs that the job wants: after its own repack at most its ranks, as its model stays smaller."""
    spec = view.spec
    assert spec is not None
    wanted = spec.largest_gang
    own = [repack for repack in view.status.repacks if not repack.asked]
    if own:
        kept = len(own[-1].survivors) if own[-1].gpus is None else own[-1].gpus
        # gpusPerPod may have been changed since.
        wanted = min(wanted, -(-kept // spec.gpus_per_pod) * spec.gpus_per_pod)
    return wanted


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedJob:
    """A job that wants GPUs and takes no part in the decision."""

    view: JobView
    refusal: Refusal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultyJob:
    """A job that a decision leaves out; while its gang runs, it keeps its GPUs."""

    view: JobView
    error: Exception

    @property
    def message(self) -> str:
        """Message for people."""
        waits = self.view.status.allocation is None
        stays = "it waits" if waits else "it keeps its GPUs as they are"
        error = f"{type(self.error).__name__}: {self.error}"[:700]
        return (
            f"the allocator cannot consider the job, {stays}: {error}. "
            "To fix: report this message, with the operator's log"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admitted(GangRequest):
    """A job that some round can place, with the size of its gang; of an elastic one the least.

    Attributes:
        sizes: that the gang may have, fewest first.
        shrinks: it runs and can give back what it holds beyond ``gpus``.
        memory: which pools have the memory for it.
        closed_pools: that ``spec.spot`` closes to it, or where it is not known what its data costs.
        left_out: pools that it is not offered, by these or for lack of memory, as text.
        mixed: where it could be in several pools at once; None: it may not.
        fits_one_pool: whether some pool can hold its least size.
        topology: what it asks of the domains of its nodes; None: nothing.
        most_of_type: GPU type -> most GPUs that ``maxGpusByType`` leaves it there; absent: any number.
    """

    view: JobView
    spec: JobSpec
    sizes: tuple[int, ...]
    shrinks: bool
    gpu_types: tuple[str, ...]
    memory: GangMemory
    closed_pools: frozenset[str] = frozenset()
    left_out: str = ""
    mixed: MixedRoom | None = None
    fits_one_pool: bool = True
    topology: TopologyRequest | None = None
    most_of_type: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Admissions:
    """Jobs that some round can place, from decision to decision.

    An admission is a function of the job's view, of what its kind was measured to need of memory, and of
    the cluster. The first two are immutable values that are replaced where they change, so that they
    are compared by identity; of thousands of waiting jobs those are looked at that have changed.
    """

    def __init__(self) -> None:
        self._cluster: tuple[object, ...] = ()
        self._nodes = NO_NODES
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
        if cluster != self._cluster:
            self._nodes = capacity.node_sizes  # what is worked out by it is kept with it
        self._cluster, self._found = cluster, {}
        usable_for: dict[NodeRequest, Mapping[str, int]] = {}

        def admit(view: JobView) -> Admitted | Refusal:
            assert view.spec is not None
            need = profiles.need(view.key, view.spec)
            before = known.get(view.key)
            if before is None or before[0] is not view or before[1] is not need:
                before = view, need, _admit_one(spec, capacity, view, usable_for, need, self._nodes)
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
            capacity.tolerance.without_room(view, pools)[1],
        )
        closed = other_kind | (unpriced.keys() - own)
        return cls(gpu_types, pools, own, closed, "; ".join(filter(None, words)))


def _admit_one(
    spec: ClusterPolicySpec,
    capacity: ClusterCapacity,
    view: JobView,
    usable_for: dict[NodeRequest, Mapping[str, int]],
    need: MemoryNeed | None,
    nodes: NodeSizes,
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
    wanted = most_gpus(view)
    memory = GangMemory(spec=view.spec, need=need, pools=capacity.memory, types=capacity.types)
    for avoid in (True, False):  # nodes that the job avoids are better than none
        barred = capacity.tolerance.barred(view, avoid=avoid)
        asks = NodeRequest(barred, view.spec.gpus_per_pod, topology)
        if asks not in usable_for:
            usable_for[asks] = asks.usable(capacity.nodes)
        usable = usable_for[asks]
        gpus = {pool: usable[pool] for pool in offer.pools if pool not in offer.closed}
        # A plan of several GPU types is for no single pool.
        level = "" if asks.required is None else asks.required.label
        room = Room(gpus={} if view.spec.planned_gpus else gpus, memory=memory, within=level)
        size = gang_size(view.spec, wanted, room)
        refusal = admission_error(view.spec, capacity.gpu_types, room, offer.gpu_types, size)
        if refusal is None or allocation is not None or not view.avoided:
            break
    mixed = mixed_room(
        memory,
        capacity.nodes,
        wanted,
        may_use=offer.pools,
        own=offer.own,
        closed=offer.closed,
        barred=barred,
    )
    if allocation is None and refusal is not None:
        if refusal.reason not in LACK_OF_ROOM or mixed is None or not holds(view.spec, mixed, memory):
            refusal = over_all_pools(refusal, view.spec, gpus, may_mix=can_mix(view.spec.config))
            too_full, full = capacity.tolerance.without_room(view, offer.pools)
            others = [node for node in capacity.nodes if node.closed or node.name not in too_full]
            return with_barred_nodes(refusal, others, barred, offer.gpu_types, full)
        sizes, gpu_types, barred, topology = mixed.sizes[:1], mixed.gpu_types, mixed.barred, None
        left_out = offer.left_out
    else:
        sizes = _sizes_in_one_pool(view, room, offer.gpu_types, size, stays=bool(unknown))
        if view.over_quota:  # the least alone may fit; it grows from there
            sizes = sizes[:1]
            mixed = None if mixed is None else dataclasses.replace(mixed, sizes=mixed.sizes[:1])
        small = memory.too_small(room.gpus, sizes[0])
        shut = small | offer.closed
        holding = {part.gpu_type for part in allocation.by_pool} if allocation is not None else set()
        holding |= {
            pool.gpu_type
            for pool in spec.node_pools
            if usable[pool.name] >= sizes[0] and pool.name not in shut
        }
        gpu_types = tuple(gpu_type for gpu_type in offer.gpu_types if gpu_type in holding)
        # Of the other types no node is asked for; of these, the nodes of closed pools are barred.
        barred |= {
            taints
            for gpu_type, pool, taints in capacity.alike
            if pool in shut - offer.own and gpu_type in gpu_types
        }
        words = memory.left_out(room.gpus, sizes[0]) if small else "", offer.left_out, unknown
        left_out = "; ".join(filter(None, words))
    return Admitted(
        key=view.key,
        view=view,
        spec=view.spec,
        nodes=nodes,
        gpus=sizes[0],
        sizes=sizes,
        shrinks=len(sizes) > 1 and view.may_change_size,
        gpu_types=gpu_types,
        barred=barred,
        memory=memory,
        closed_pools=offer.closed,
        mixed=mixed,
        fits_one_pool=refusal is None,
        topology=None if topology is None else dataclasses.replace(topology, most=sizes[-1]),
        left_out=left_out,
    ).on_its_nodes


def _sizes_in_one_pool(
    view: JobView, room: Room, allowed: Sequence[str], largest: int, *, stays: bool
) -> tuple[int, ...]:
    """Sizes that the gang may have, fewest first; ``stays``: a gang that runs keeps its own."""
    assert view.spec is not None
    allocation, held = view.running_allocation, view.held_placement
    if stays and allocation is not None:
        return (allocation.gpus,)
    if held is not None and (view.shrinking or view.leaving or held.parts):
        return (held.gpus,)
    now = None if held is None else held.by_pool[0]
    return gang_sizes(view.spec, room, allowed, largest, held=now, any_size=view.over_quota)


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


def admit_tenants(
    tenants: Tenants,
    admitted: Sequence[Admitted],
    jobs: Sequence[JobView],
    teams: Mapping[str, EntityShare] = MappingProxyType({}),
) -> tuple[list[Admitted], list[RefusedJob], TenantRooms]:
    """(jobs that take part, as the limits leave them; jobs that do not; what is left to be given).

    ``admitted``: by age. ``jobs``: all there are. ``teams``: those of the policy's objective.
    """
    limits = _Limits(tenants, teams, admitted)
    if not limits.stated:
        return list(admitted), [], TenantRooms()
    asked = {one.view.key: limits.asked(one) for one in admitted}
    holding = (view for view in jobs if view.status.allocation is not None and view.key not in asked)
    found = admit_by_tenant(list(asked.values()), limits.stated, map(limits.holding, holding))
    within, refused = [], []
    for one in admitted:
        job = asked[one.view.key]
        if job.name in found.over:
            refused.append(RefusedJob(one.view, limits.refusal(job, found.over[job.name])))
            continue
        gpus, most = found.sizes[job.name], found.by_type[job.name]
        sized = one if one.gpus == gpus else dataclasses.replace(one, gpus=gpus)
        within.append(_with_most(sized, most) if most else sized)
    rooms = {tenant.partition(" ")[2]: gpus for tenant, gpus in found.room.items()}
    left = {namespace: tenants.of(namespace).max_gpus or 0 for namespace in rooms}
    for view in jobs:
        if view.key[0] in left:
            left[view.key[0]] -= _held(view)[ALL_TYPES]
    return within, refused, TenantRooms(gpus=rooms, left={name: max(0, gpus) for name, gpus in left.items()})


class _Limits:
    """Limits of namespaces and of teams, each with the jobs of the teams inside it.

    Attributes:
        stated: those that can keep a job out, with the words for the tenant.
    """

    def __init__(
        self, tenants: Tenants, teams: Mapping[str, EntityShare], admitted: Sequence[Admitted]
    ) -> None:
        self._tenants, self._teams = tenants, teams
        namespaces = {one.view.key[0] for one in admitted}
        stated = {f"namespace {name}": tenants.of(name).to_dict() for name in namespaces}
        stated |= {f"team {name}": own.to_dict() for name, own in teams.items()}
        self.stated = {
            TenantLimit(tenant, field, gpu_type): most
            for tenant, fields in stated.items()
            for field in LimitField
            if field in fields
            for gpu_type, most in (
                fields[field] if field is LimitField.GPUS_BY_TYPE else {ALL_TYPES: fields[field]}
            ).items()
            if field is not LimitField.WAITING_JOBS or most < len(admitted)
        }
        self._of_gpus = any(
            limit.field in (LimitField.GPUS, LimitField.GPUS_BY_TYPE) for limit in self.stated
        )

    def asked(self, one: Admitted) -> TenantJob:
        """The job that a round can place, as limits count it."""
        running, job = one.view.running_allocation, self.holding(one.view)
        keeps = 0 if running is None else one.gpus
        if not one.shrinks:
            keeps = max(keeps, job.held[ALL_TYPES])
        return dataclasses.replace(
            job,
            held={**job.held, ALL_TYPES: keeps},
            sizes=_sizes(one) if self._of_gpus else (one.gpus,),
            grown=one.sizes if len(one.sizes) > 1 or running is not None else (),
            types=one.gpu_types,
            runs_on=frozenset() if running is None else frozenset(part.gpu_type for part in running.by_pool),
        )

    def holding(self, view: JobView) -> TenantJob:
        """The job with its GPUs, of its namespace, its team, and so on outwards."""
        tenants = [f"namespace {view.key[0]}"]
        team = view.spec.asked.entity if view.spec is not None else None
        while team is not None and team in self._teams:
            tenants.append(f"team {team}")
            team = self._teams[team].parent
        return TenantJob(name=job_id(view.key), tenants=tuple(tenants), held=_held(view))

    def refusal(self, job: TenantJob, limit: TenantLimit) -> Refusal:
        """The same for all that wait for the limit, and while the queue moves: no write for a move."""
        (tenant, field, _), bound = limit, self.stated[limit]
        what, _, name = tenant.partition(" ")
        reason, path = JobReason.NAMESPACE_LIMIT, self._tenants.field_of(name, field)
        if what == "team":
            reason, path = JobReason.TEAM_LIMIT, f"objective.entities.{name}.{field}"
        by_type = field is LimitField.GPUS_BY_TYPE
        fix = "ask the cluster's administrator to raise " + (path if by_type else f"{path}={bound}")
        if by_type:
            at_most = {each: self.stated.get(TenantLimit(tenant, field, each)) for each in job.types}
            bounds = ", ".join(f"{most} {each}" for each, most in at_most.items() if most is not None)
            never = all(self._never(job, each) for each in job.types)
            why = f"the job needs {job.least}" if never else "its older jobs have them or come first"
            said = f"{tenant} may have {bounds} at a time, and {why}"
            fix = f"{'' if never else 'wait, '}allow other gpuTypes, or {fix}"
        elif field is LimitField.GPUS and job.sizes[-1] > bound:
            said = f"needs {job.sizes[-1]} GPUs at least, and the jobs of {tenant} may hold {bound} at a time"
            fix = f"lower pipeline.minStages, or {fix}"
        elif field is LimitField.WAITING_JOBS:
            said = f"the {bound} oldest waiting jobs of {tenant} take part in the allocation, and this "
            said += "one is younger"
            fix = f"wait, delete older ones, or {fix}"
        else:
            what = "GPUs" if field is LimitField.GPUS else "jobs with GPUs"
            said = f"{tenant} may have {bound} {what} at a time, and its older jobs run or come first"
            fix = f"wait, or {fix}"
        return Refusal(reason, f"{said}. To fix: {fix} of the ClusterPolicy")

    def _never(self, job: TenantJob, gpu_type: str) -> bool:
        limits = (TenantLimit(tenant, LimitField.GPUS_BY_TYPE, gpu_type) for tenant in job.tenants)
        return any(job.least > self.stated.get(limit, job.least) for limit in limits)


def _with_most(one: Admitted, most: Mapping[str, int]) -> Admitted:
    """The job on these types only, with at most so many GPUs there."""
    largest = max(most.values())
    fitting = tuple(size for size in one.sizes if size <= largest)
    gpus = one.gpus
    if len(one.sizes) == 1 and one.view.running_allocation is None:
        gpus = next(size for size in _sizes(one) if size <= largest)
        fitting = (gpus,)
    types = tuple(name for name in one.gpu_types if most.get(name, 0) >= gpus)
    closed = [name for name in one.gpu_types if name not in types]
    told = f"{' and '.join(closed)}: no room within maxGpusByType of its namespace or team" if closed else ""
    mixed = one.mixed
    if mixed is not None and any(most.get(name, 0) < mixed.sizes[-1] for name in mixed.gpu_types):
        mixed = None
    return dataclasses.replace(
        one,
        gpus=gpus,
        sizes=fitting or one.sizes,
        gpu_types=types,
        left_out="; ".join(filter(None, (one.left_out, told))),
        most_of_type=most,
        mixed=mixed,
    )


def _held(view: JobView) -> Counter[str]:
    """GPU type -> GPUs of the job's pods, those of all types included."""
    found: Counter[str] = Counter()
    if (allocation := view.status.allocation) is not None:
        found[ALL_TYPES] = allocation.gpus
        for part in allocation.by_pool:
            found[part.gpu_type] += part.gpus
    return found


def _sizes(one: Admitted) -> tuple[int, ...]:
    """Sizes that the gang may be launched with, most first."""
    if one.view.running_allocation is not None:
        return (one.gpus,)
    smaller = range(one.gpus - 1, max(1, one.spec.smallest_gang) - 1, -1)
    return (one.gpus, *(size for size in smaller if one.spec.suits(size)))
