"""The cluster at one moment, as the values that policies decide on."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence, Set

from ballast_policies.protocol.observed import Cause
from ballast_policies.rounds.values import Node
from ballast_policies.scheduling import ClusterState

from ballast_operator.allocator.costs.data_prices import data_prices
from ballast_operator.allocator.costs.teams import SpentBudget, without_suspended_teams
from ballast_operator.allocator.faults import FaultyJob, JobFaults, each_job
from ballast_operator.allocator.problem.admission import Admissions, RefusedJob
from ballast_operator.allocator.problem.capacity import ClusterCapacity, read_capacity
from ballast_operator.allocator.problem.capacity_types import spot_limits
from ballast_operator.allocator.problem.snapshot_job import (
    SnapshotJob,
    colocation_candidates,
    snapshot_jobs,
    speeds_beside,
)
from ballast_operator.allocator.problem.tenants import admit_tenants
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.api.cluster_policy import ClusterPolicySpec
from ballast_operator.api.conditions import some_of
from ballast_operator.kube.kinds import Key, Object
from ballast_operator.observation.findings import FailedThere
from ballast_operator.views.clock import Time, show
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView, closed_by_condition


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot(ClusterState):
    """The cluster at one moment, with those who take no part in decisions.

    Attributes:
        refused: jobs that want GPUs and cannot be placed by this policy.
        spent: teams that have spent their budget, with what that means for their jobs.
        faulty: those that are left out since deciding on them raises.
        sick_nodes: nodes that are closed or avoided by ``spec.nodeHealth``, as text.
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
        spent: teams that have spent their budget.
        regions: pool -> where its nodes were.
        avoided: node -> why all jobs avoid it.
    """

    now: Time
    nodes: Mapping[str, NodeView]
    pods: Sequence[Object]
    jobs: Sequence[JobView]
    measurements: Measurements
    spent: Mapping[str, SpentBudget] = dataclasses.field(default_factory=dict)
    regions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    avoided: Mapping[str, FailedThere] = dataclasses.field(default_factory=dict)


def take_snapshot(
    spec: ClusterPolicySpec,
    seen: Observed,
    admissions: Admissions | None = None,
    *,
    left_out: Mapping[Key, Exception] | None = None,
) -> Snapshot:
    """What the policy ``spec`` has to decide on, without the jobs for which that raises.

    ``admissions``: of earlier snapshots. ``left_out``: jobs that are known to be at fault, with their errors.
    """
    admissions, out = admissions or Admissions(), dict(left_out or {})
    while True:
        try:
            return _take(spec, seen, admissions, out)
        except JobFaults as faults:
            if faults.by_job.keys() <= out.keys():
                raise
            out |= faults.by_job


def _take(
    spec: ClusterPolicySpec, seen: Observed, admissions: Admissions, left_out: Mapping[Key, Exception]
) -> Snapshot:
    now, measurements = seen.now, seen.measurements
    at_fault = [view for view in seen.jobs if view.key in left_out]
    jobs = [view for view in seen.jobs if view.key not in left_out]
    wants = each_job(jobs, lambda view: wants_gpus(view, now), lambda view: view.key)
    wanting, over = without_suspended_teams(list(itertools.compress(jobs, wants)), seen.spent)
    nodes = closed_by_condition(seen.nodes, spec.node_health.unhealthy_conditions)
    capacity = read_capacity(
        spec,
        nodes=nodes,
        pods=seen.pods,
        jobs=jobs,
        wanting=wanting,
        known=seen.regions,
        left_out=at_fault,
    )
    _leave_out_partners(jobs, left_out, capacity.left_out.keys() & capacity.shared.keys())
    capacity = dataclasses.replace(capacity, data_prices=data_prices(spec.data_prices))
    admitted, refused = admissions.admit(spec, capacity, wanting, measurements.profiles)
    admitted, beyond, rooms = admit_tenants(spec.tenants, admitted, seen.jobs)
    shared = colocation_candidates(admitted, capacity, measurements.kinds)
    found = snapshot_jobs(admitted, measurements, capacity, shared, now)
    running = {job.name: job.placement for job in found if job.placement is not None}
    if speeds_there := speeds_beside(running, shared):
        found = tuple(dataclasses.replace(job, beside_speed=speeds_there.get(job.name, 1.0)) for job in found)
    return Snapshot(
        capacity=capacity,
        jobs=found,
        refused=(*refused, *over, *beyond),
        tenants=rooms,
        spent=seen.spent,
        shared=shared,
        spot=spot_limits(spec, capacity.kinds),
        sick_nodes=tuple(
            f"node {node.name} is {said}" for node in capacity.nodes if (said := _sick(node, nodes, seen))
        ),
        faulty=tuple(FaultyJob(view=view, error=left_out[view.key]) for view in at_fault),
    )


def _sick(node: Node, nodes: Mapping[str, NodeView], seen: Observed) -> str:
    """Why the node is closed or avoided for its health, as text; empty: it is not."""
    if node.name in nodes and (why := nodes[node.name].closed) != seen.nodes[node.name].closed:
        return why
    if (failed := seen.avoided.get(node.name)) is None:
        return ""
    return f"avoided until {show(failed.until)}: pods of {some_of(failed.jobs)} failed there"


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
    """Whether the job takes part in the allocation."""
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
