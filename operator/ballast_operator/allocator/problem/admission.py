"""Jobs that some round of a policy can place, and the sizes of their gangs."""

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ballast_policies.contract import ContractError
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.limits import OBJECT
from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.rounds.gangs import PAUSE_SECONDS, RESTART_SECONDS
from ballast_policies.rounds.memory import resize_cooldown_seconds
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
from ballast_policies.scheduling.gang_speeds import GangRequest
from ballast_policies.scheduling.measurements import LayerProfiles
from ballast_policies.scheduling.refusals import Refusal, each_job
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
from ballast_operator.api.cluster_policy import ClusterPolicySpec
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job import JobTopology, can_mix
from ballast_operator.kube.kinds import Key
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec

STOP_SECONDS = 5.0
"""Part of that until its pods have saved and are gone."""


def may_grow_from(view: JobView) -> Time | None:
    """Time from which the gang may take more GPUs; None: as it is now, never."""
    allocation, spec = view.status.allocation, view.spec
    if allocation is None or spec is None or not may_change_size(view):
        return None
    began = allocation.since
    if spec.plans:
        began = began if live_sizes(view) else restarts_from(view, began)
    elif not _same_recipe(view, spec):
        return None
    if allocation.resized_at is None:
        return began
    settling = resize_cooldown_seconds(change_pause(view), allocation.failed_growths)
    return max(began, allocation.resized_at + datetime.timedelta(seconds=settling))


def restarts_from(view: JobView, since: Time) -> Time:
    """Time from which a gang of planned degrees, launched at ``since``, may take more GPUs by a restart."""
    return since + datetime.timedelta(seconds=resize_cooldown_seconds(restart_seconds(view)))


def live_sizes(view: JobView) -> tuple[int, ...]:
    """Sizes that a gang of planned degrees may have without a restart; of another: none."""
    launched = view.launched_spec
    if not view.live_plans or not view.resizable or launched is None or not _same_recipe(view, launched):
        return ()
    return tuple(view.live_plans)


def may_change_size(view: JobView) -> bool:
    """True if the gang trains and can change its size now, maybe by a restart; no script."""
    allocation = view.running_allocation
    if allocation is None or view.shrinking or allocation.joining or view.leaving:
        return False
    by_restart = view.spec is not None and view.spec.grow and bool(view.spec.plans)
    return view.acknowledged and (view.resizable or by_restart)


def _same_recipe(view: JobView, spec: JobSpec) -> bool:
    """True if new pods would train with the configuration that the gang was launched with.

    Most changes of a spec take effect at the next launch; ranks do not read how many
    stages the gang may have.
    """
    try:
        launched = decode_text(dict[str, Any], view.plan_config, limits=OBJECT)
    except ContractError:  # someone has changed the ConfigMap
        return False
    return _recipe(launched, spec) == _recipe(spec.config_fields, spec)


def _recipe(config: Mapping[str, Any], spec: JobSpec) -> dict[str, Any]:
    pipeline = config.get("pipeline")
    if not isinstance(pipeline, Mapping):
        return dict(config)
    rest = {k: v for k, v in pipeline.items() if k not in ("minStages", "maxStages")}
    return {**config, "pipeline": rest} | ({"plan": None} if spec.asked.planner is not None else {})


def change_pause(view: JobView) -> float:
    """Seconds that training stands still when the gang changes its size: as last measured, else a second."""
    allocation = view.status.allocation
    if allocation is not None and allocation.resize_pause_ms is not None:
        return allocation.resize_pause_ms / 1000
    measured = [repack.pause_ms for repack in view.status.repacks if repack.pause_ms is not None]
    return measured[-1] / 1000 if measured else PAUSE_SECONDS


def may_move(view: JobView) -> bool:
    """True if the gang trains, and could save, stop and start in another pool: nothing else is under way."""
    allocation, spec = view.running_allocation, view.spec
    if allocation is None or spec is None or not view.acknowledged:
        return False
    return not (view.shrinking or allocation.joining or (spec.is_script and not view.has_spoken))


def restart_seconds(view: JobView) -> float:
    """Seconds from the gang's stop to its first step elsewhere, as long as its last start took."""
    running, allocation = view.status.condition(JobCondition.RUNNING), view.running_allocation
    if running is None or not running.is_true or allocation is None:
        return RESTART_SECONDS
    started = (running.last_transition_time - allocation.since).total_seconds()
    return STOP_SECONDS + started if started > 0 else RESTART_SECONDS


def trains_from(view: JobView, now: Time) -> float:
    """Epoch seconds when the ranks of the running gang had their plan; infinite: it starts.

    0: none runs, or it is not known, as a clock was set back since. A start ends, one way or the other, by
    the deadlines of its pods and of its plan's acknowledgement.
    """
    running, allocation = view.status.condition(JobCondition.RUNNING), view.running_allocation
    if allocation is None:
        return 0.0
    if running is None or not running.is_true:
        return math.inf
    return running.last_transition_time.timestamp() if running.last_transition_time <= now else 0.0


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
        usable_for: dict[NodeRequest, Mapping[str, int]] = {}

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
    usable_for: dict[NodeRequest, Mapping[str, int]],
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
        refusal = over_all_pools(refusal, view.spec, gpus, may_mix=can_mix(view.spec.config))
        full = capacity.tolerance.without_room(view, offer.pools)
        return with_barred_nodes(refusal, capacity.nodes, barred, offer.gpu_types, full)
    held, sizes = view.held_placement, tuple[int, ...]()
    if unknown and allocation is not None:
        sizes = (allocation.gpus,)
    elif held is not None and (view.shrinking or view.leaving or held.parts):
        sizes = (held.gpus,)
    else:
        now = None if held is None else held.by_pool[0]
        sizes = gang_sizes(view.spec, room, offer.gpu_types, size, held=now, any_size=view.over_quota)
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
