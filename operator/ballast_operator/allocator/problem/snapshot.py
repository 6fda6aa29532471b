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
from ballast_policies.rounds.tenants import ALL_TYPES, LimitField, TenantJob, TenantLimit, admit_by_tenant
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
