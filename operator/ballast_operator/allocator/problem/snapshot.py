"""The cluster at one moment, as the values that policies decide on.

Jobs that the ClusterPolicy's tenant limits keep out take no part, and are told why.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

from ballast_policies.protocol.observed import Cause
from ballast_policies.rounds.tenants import (
    TenantAdmission,
    TenantJob,
    TenantLimit,
    TenantLimits,
    TypedGang,
    admit_by_tenant,
    most_by_type,
)
from ballast_policies.rounds.values import Node
from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.scheduling.measurements import Measurements
from ballast_policies.scheduling.refusals import JobFaults, Refusal, each_job
from ballast_policies.scheduling.state import ClusterState, TenantRooms

from ballast_operator.allocator.costs.data_prices import data_prices
from ballast_operator.allocator.costs.teams import SpentBudget, without_suspended_teams
from ballast_operator.allocator.faults import FaultyJob
from ballast_operator.allocator.problem.admission import Admissions, Admitted, RefusedJob
from ballast_operator.allocator.problem.capacity import ClusterCapacity, read_capacity, spot_limits
from ballast_operator.allocator.problem.snapshot_job import (
    SnapshotJob,
    colocation_candidates,
    snapshot_jobs,
)
from ballast_operator.api.cluster_policy import ClusterPolicySpec, EntityShare, Tenants
from ballast_operator.api.conditions import JobReason, some_of
from ballast_operator.kube.kinds import Key, Object
from ballast_operator.observation.findings import AvoidedNode
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView, closed_by_condition


def admit_tenants(
    tenants: Tenants,
    admitted: Sequence[Admitted],
    jobs: Sequence[JobView],
    teams: Mapping[str, EntityShare] = MappingProxyType({}),
) -> tuple[list[Admitted], list[RefusedJob], TenantRooms]:
    """(jobs that take part, as the limits leave them; jobs that do not; what is left to be given).

    ``admitted``: by age. ``jobs``: all there are. ``teams``: those of the policy's objective.
    """
    within, refused, rooms = _within_numbers(tenants, admitted, jobs)
    within, beyond = _within_types(_ByType(tenants, teams, admitted), within, jobs)
    return within, refused + beyond, rooms


class _ByType:
    """``maxGpusByType`` of namespaces and of teams, each with the jobs of the teams inside it.

    Attributes:
        limits: of each that has some, by the words for it.
    """

    def __init__(
        self, tenants: Tenants, teams: Mapping[str, EntityShare], admitted: Sequence[Admitted]
    ) -> None:
        self._tenants, self._teams = tenants, teams
        namespaces = {one.view.key[0] for one in admitted}
        stated = {f"namespace {name}": tenants.of(name).max_gpus_by_type for name in namespaces}
        stated |= {f"team {name}": own.max_gpus_by_type for name, own in teams.items()}
        self.limits = {owner: by_type for owner, by_type in stated.items() if by_type}

    def of(self, view: JobView) -> tuple[str, ...]:
        """Owners whose limits hold for the job: its namespace, its team, and so on outwards."""
        owners, team = [f"namespace {view.key[0]}"], view.spec.asked.entity if view.spec is not None else None
        while team is not None and team in self._teams:
            owners.append(f"team {team}")
            team = self._teams[team].parent
        return tuple(name for name in owners if name in self.limits)

    def refusal(self, gang: TypedGang, owner: str) -> Refusal:
        """Refusal of a gang for which the owner's limits leave no type."""
        what, _, name = owner.partition(" ")
        limits = self.limits[owner]
        bounds = ", ".join(f"{limits[each]} {each}" for each in gang.types if each in limits)
        least, every = gang.sizes[0], [self.limits[tenant] for tenant in gang.tenants]
        never = all(any(least > by_type.get(each, least) for by_type in every) for each in gang.types)
        if what == "team":
            reason, field = JobReason.TEAM_LIMIT, f"objective.entities.{name}.{TenantLimit.GPUS_BY_TYPE}"
        else:
            reason, field = JobReason.NAMESPACE_LIMIT, self._tenants.field_of(name, TenantLimit.GPUS_BY_TYPE)
        message = (
            f"{owner} may have {bounds} at a time, and "
            + (f"the job needs {least}" if never else "its older jobs have them or come first")
            + f". To fix: {'' if never else 'wait, '}allow other gpuTypes, or ask the cluster's "
            f"administrator to raise {field} of the ClusterPolicy"
        )
        return Refusal(reason, message)


def _within_numbers(
    tenants: Tenants, admitted: Sequence[Admitted], jobs: Sequence[JobView]
) -> tuple[list[Admitted], list[RefusedJob], TenantRooms]:
    if _limits_nothing(tenants, len(admitted)):
        return list(admitted), [], TenantRooms()
    limited = tenants.each_namespace.max_gpus is not None or any(
        own.max_gpus is not None for own in tenants.namespaces.values()
    )
    wanting = {one.view.key for one in admitted}
    others: Counter[str] = Counter()
    for view in jobs:
        if view.key not in wanting:
            others[view.key[0]] += _held(view)
    asked = [
        TenantJob(
            name=job_id(one.view.key),
            tenant=one.view.key[0],
            sizes=_sizes(one) if limited else (one.gpus,),
            running=one.view.running_allocation is not None,
            held=one.gpus if one.shrinks else _held(one.view),
        )
        for one in admitted
    ]
    found = admit_by_tenant(asked, lambda namespace: limits_of(tenants, namespace), held_by_others=others)
    within, refused = [], []
    for one, job in zip(admitted, asked, strict=True):
        if (limit := found.over.get(job.name)) is not None:
            refusal = _refusal(tenants, job.tenant, limit, gpus=job.sizes[-1], never=job.name in found.never)
            refused.append(RefusedJob(one.view, refusal))
        else:
            gpus = found.sizes[job.name]
            within.append(one if one.gpus == gpus else dataclasses.replace(one, gpus=gpus))
    return within, refused, _rooms(tenants, found, asked, jobs)


def _within_types(
    limited: _ByType, admitted: Sequence[Admitted], jobs: Sequence[JobView]
) -> tuple[list[Admitted], list[RefusedJob]]:
    """(jobs with the GPU types and sizes that ``maxGpusByType`` leaves them, jobs that it leaves none)."""
    if not limited.limits:
        return list(admitted), []
    of = {one.view.key: limited.of(one.view) for one in admitted if one.gpu_types}
    asked = {one.view.key: _typed(one, owners) for one in admitted if (owners := of.get(one.view.key))}
    others: dict[str, Counter[str]] = {}
    for view in jobs:
        if view.key not in asked:
            for owner in limited.of(view):
                others.setdefault(owner, Counter()).update(_held_by_type(view))
    found, without = most_by_type(list(asked.values()), limited.limits, others)
    within, refused = [], []
    for one in admitted:
        gang = asked.get(one.view.key)
        if gang is None:
            within.append(one)
        elif gang.name in without:
            refused.append(RefusedJob(one.view, limited.refusal(gang, without[gang.name])))
        else:
            within.append(_with_most(one, found[gang.name]))
    return within, refused


def _typed(one: Admitted, owners: tuple[str, ...]) -> TypedGang:
    running = one.view.running_allocation
    sizes = one.sizes if len(one.sizes) > 1 or running is not None else _sizes(one)[::-1]
    return TypedGang(
        name=job_id(one.view.key),
        tenants=owners,
        sizes=sizes,
        types=one.gpu_types,
        held=_held_by_type(one.view),
        runs_on=frozenset() if running is None else frozenset(part.gpu_type for part in running.by_pool),
    )


def _held_by_type(view: JobView) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in view.status.allocation.by_pool if view.status.allocation is not None else ():
        found[part.gpu_type] += part.gpus
    return found


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


def _limits_nothing(tenants: Tenants, jobs: int) -> bool:
    """True if there are so few jobs that all take part, of whichever tenant."""
    every = tenants.each_namespace
    of_gpus = tenants.namespaces or every.max_gpus is not None or every.max_running_jobs is not None
    return not of_gpus and jobs <= every.max_waiting_jobs


def _rooms(
    tenants: Tenants, found: TenantAdmission, asked: Sequence[TenantJob], jobs: Sequence[JobView]
) -> TenantRooms:
    if not found.room:
        return TenantRooms()
    gpus, held = Counter(found.room), Counter[str]()
    for job in asked:
        # What waits takes its least size only when it is placed; its earlier launch is gone by then.
        if job.tenant in found.room and not job.running and job.name in found.sizes:
            gpus[job.tenant] += max(found.sizes[job.name], job.held)
    for view in jobs:
        held[view.key[0]] += _held(view)
    limits = {tenant: limits_of(tenants, tenant).gpus for tenant in found.room}
    left = {tenant: max(0, most - held[tenant]) for tenant, most in limits.items() if most is not None}
    return TenantRooms(gpus=dict(gpus), left=left)


def limits_of(tenants: Tenants, namespace: str) -> TenantLimits:
    """The limits of the namespace that do not depend on GPU types."""
    limits = tenants.of(namespace)
    return TenantLimits(
        gpus=limits.max_gpus, running_jobs=limits.max_running_jobs, waiting_jobs=limits.max_waiting_jobs
    )


def _held(view: JobView) -> int:
    allocation = view.status.allocation
    return 0 if allocation is None else allocation.gpus


def _sizes(one: Admitted) -> tuple[int, ...]:
    """Sizes that the gang may be launched with, most first."""
    if one.view.running_allocation is not None:
        return (one.gpus,)
    smaller = range(one.gpus - 1, max(1, one.spec.smallest_gang) - 1, -1)
    return (one.gpus, *(size for size in smaller if one.spec.suits(size)))


def _refusal(tenants: Tenants, namespace: str, limit: TenantLimit, *, gpus: int, never: bool) -> Refusal:
    """The same for all that wait for the limit, and unchanged while the queue moves: no write for a move."""
    field, bound = tenants.field_of(namespace, limit), tenants.of(namespace).to_dict()[limit]
    raise_it = f"ask the cluster's administrator to raise {field}={bound} of the ClusterPolicy"
    if never:
        message = (
            f"needs {gpus} GPUs at least, and the jobs of namespace {namespace} may hold {bound} at a time. "
            f"To fix: lower pipeline.minStages, or {raise_it}"
        )
    elif limit is TenantLimit.WAITING_JOBS:
        message = (
            f"the {bound} oldest waiting jobs of namespace {namespace} take part in the allocation, and this "
            f"one is younger. To fix: wait, delete older ones, or {raise_it}"
        )
    else:
        what = "GPUs" if limit is TenantLimit.GPUS else "jobs with GPUs"
        message = (
            f"namespace {namespace} may have {bound} {what} at a time, and its older jobs run or come first. "
            f"To fix: wait, or {raise_it}"
        )
    return Refusal(JobReason.NAMESPACE_LIMIT, message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot(ClusterState):
    """The cluster at one moment, with those who take no part in decisions.

    Attributes:
        refused: jobs that want GPUs and cannot be placed by this policy.
        spent: teams that have spent their budget, with what that means for their jobs.
        faulty: those that are left out since deciding on them raises.
        sick_nodes: nodes that are closed or avoided by ``spec.nodeHealth``, or have lost GPUs, as text.
    """

    capacity: ClusterCapacity
    jobs: tuple[SnapshotJob, ...]
    refused: tuple[RefusedJob, ...] = ()
    spent: Mapping[str, SpentBudget] = dataclasses.field(default_factory=dict)
    faulty: tuple[FaultyJob, ...] = ()
    sick_nodes: tuple[str, ...] = ()

    @functools.cached_property
    def by_name(self) -> Mapping[str, SnapshotJob]:
        """Job name -> job."""
        return {job.name: job for job in self.jobs}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cluster as it is seen at one moment.

    Attributes:
        pods: of others.
        stuck: pods of jobs that were to have ended a while ago.
        status: of the ClusterPolicy, as an operator has left it.
        regions: pool -> where its nodes were.
        avoided: node -> why all jobs avoid it.
    """

    now: Time
    nodes: Mapping[str, NodeView]
    pods: Sequence[Object]
    jobs: Sequence[JobView]
    status: Object | None = None
    regions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    avoided: Mapping[str, AvoidedNode] = dataclasses.field(default_factory=dict)
    stuck: Sequence[Object] = ()


def take_snapshot(
    spec: ClusterPolicySpec,
    seen: Observed,
    measurements: Measurements,
    admissions: Admissions | None = None,
    *,
    spent: Mapping[str, SpentBudget] = MappingProxyType({}),
    left_out: Mapping[Key, Exception] | None = None,
) -> Snapshot:
    """Input of a decision under ``spec``, without the jobs for which that raises.

    ``measurements``: of trainers. ``admissions``: of earlier snapshots. ``spent``: teams that have spent
    their budget. ``left_out``: jobs that are known to be at fault, with their errors.
    """
    admissions, out = admissions or Admissions(), dict(left_out or {})
    while True:
        try:
            return _take(spec, seen, measurements, admissions, spent, out)
        except JobFaults as faults:
            if faults.by_job.keys() <= out.keys():
                raise
            out |= faults.by_job


def _take(
    spec: ClusterPolicySpec,
    seen: Observed,
    measurements: Measurements,
    admissions: Admissions,
    spent: Mapping[str, SpentBudget],
    left_out: Mapping[Key, Exception],
) -> Snapshot:
    now = seen.now
    at_fault = [view for view in seen.jobs if view.key in left_out]
    jobs = [view for view in seen.jobs if view.key not in left_out]
    wants = each_job(jobs, lambda view: wants_gpus(view, now), lambda view: view.key)
    wanting, over = without_suspended_teams(list(itertools.compress(jobs, wants)), spent)
    nodes = closed_by_condition(seen.nodes, spec.node_health.unhealthy_conditions)
    healthy = dataclasses.replace(seen, nodes=nodes)
    capacity = read_capacity(spec, healthy, jobs=jobs, wanting=wanting, left_out=at_fault)
    _leave_out_partners(jobs, left_out, capacity.left_out.keys() & capacity.shared.keys())
    capacity = dataclasses.replace(capacity, data_prices=data_prices(spec.data_prices))
    admitted, refused = admissions.admit(spec, capacity, wanting, measurements.profiles)
    admitted, beyond, rooms = admit_tenants(spec.tenants, admitted, seen.jobs, spec.objective.entities)
    shared = colocation_candidates(admitted, capacity, measurements.kinds)
    found = snapshot_jobs(admitted, measurements, capacity, shared, now)
    running = {job.name: job.placement for job in found if job.placement is not None}
    if speeds_there := shared.colocated_speeds(running):
        found = tuple(dataclasses.replace(job, beside_speed=speeds_there.get(job.name, 1.0)) for job in found)
    return Snapshot(
        capacity=capacity,
        jobs=found,
        refused=(*refused, *over, *beyond),
        tenants=rooms,
        spent=spent,
        shared=shared,
        spot=spot_limits(spec, capacity.kinds),
        sick_nodes=(
            *(f"node {node.name} is {said}" for node in capacity.nodes if (said := _sick(node, nodes, seen))),
            *capacity.shrunk,
        ),
        faulty=tuple(FaultyJob(view=view, error=left_out[view.key]) for view in at_fault),
    )


def _sick(node: Node, nodes: Mapping[str, NodeView], seen: Observed) -> str:
    """Reason that the node is closed or avoided for its health, as text; empty: it is not."""
    if node.name in nodes and (why := nodes[node.name].closed) != seen.nodes[node.name].closed:
        return why
    return str(seen.avoided.get(node.name, ""))


def _leave_out_partners(jobs: Sequence[JobView], left_out: Mapping[Key, Exception], nodes: Set[str]) -> None:
    """A GPU of which one job is left out stays as it is: so is the job that shares it."""
    beside: dict[Key, Exception] = {
        view.key: RuntimeError("it shares a GPU with one of " + some_of(["/".join(key) for key in left_out]))
        for view in jobs
        if nodes and (held := view.running_allocation) is not None and not nodes.isdisjoint(held.nodes)
    }
    if beside:
        raise JobFaults(beside)


def wants_gpus(view: JobView, now: Time) -> bool:
    """True if the job takes part in the allocation."""
    status = view.status
    if view.deleting or view.spec is None or status.finished:
        return False
    if view.finished_step is not None and status.allocation is not None:
        return False
    if view.blocked is not None and status.allocation is None:
        return False
    if view.hold(now) is not None or (status.next_launch_at is not None and status.next_launch_at > now):
        return False
    return (
        status.allocation is None
        or status.allocation.ending is None
        or status.allocation.ending.cause is not Cause.COMPLETED
    )
