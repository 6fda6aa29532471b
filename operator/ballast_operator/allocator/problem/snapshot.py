"""The cluster at one moment, as the values that policies decide on."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence

from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.rounds import Placement
from ballast_policies.throughput.track import Estimate

from ballast_operator.allocator.problem.capacity import Capacity, read_capacity
from ballast_operator.allocator.problem.gang_size import (
    Refusal,
    admission_error,
    gang_size,
    growth_sizes,
    may_grow,
)
from ballast_operator.allocator.problem.tenants import Tenancy, admit_tenants
from ballast_operator.allocator.problem.throughput import GangRequest, Measurements
from ballast_operator.allocator.problem.tolerance import usable_by_pool, with_barred_nodes
from ballast_operator.api.cause import Cause
from ballast_operator.api.cluster_policy import ClusterPolicySpec
from ballast_operator.api.conditions import JobReason
from ballast_operator.kube.kinds import Key, Object, job_id
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView
from ballast_operator.views.spec import JobSpec

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob:
    """A job that wants GPUs.

    Attributes:
        key: which job.
        job: the same as policies see it; its name is ``namespace/name``.
        launches: ``status.launches``.
        placement: where its gang runs; None: it holds no GPUs, or its launch is ending.
        running_since: when that launch was decided, epoch seconds; 0 without a placement.
        growth_sizes: sizes that the gang could grow to now, fewest ranks first.
        not_tolerated: taints of nodes (``Node.taints``) on which it must not be started.
        gpus_per_pod: GPUs of each of its pods, which are on one node.
        measured: whether its speed is stated or measured somewhere; otherwise every figure is a guess.
    """

    key: Key
    job: Job
    launches: int = 0
    placement: Placement | None = None
    running_since: float = 0.0
    growth_sizes: tuple[int, ...] = ()
    not_tolerated: frozenset[str] = frozenset()
    gpus_per_pod: int = 1
    measured: bool = True

    @property
    def name(self) -> str:
        """Its name in problems and rounds."""
        return self.job.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusedJob:
    """A job that this policy can never place."""

    key: Key
    launches: int
    refusal: Refusal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The cluster at one moment.

    Attributes:
        capacity: of the policy's pools.
        jobs: those that want GPUs, by age.
        refused: those that want GPUs and cannot be placed by this policy.
    """

    capacity: Capacity
    jobs: tuple[SnapshotJob, ...]
    refused: tuple[RefusedJob, ...] = ()

    @functools.cached_property
    def problem(self) -> Problem:
        """The jobs and the capacity as an allocation problem."""
        return Problem(
            gpu_types=self.capacity.gpu_types,
            capacity=dict(self.capacity.gpus_by_type),
            jobs=tuple(job.job for job in self.jobs),
            prices=self.capacity.prices,
        )

    @functools.cached_property
    def by_name(self) -> Mapping[str, SnapshotJob]:
        """Job name -> job."""
        return {job.name: job for job in self.jobs}

    @functools.cached_property
    def running(self) -> Mapping[str, Placement]:
        """Job name -> its placement, for jobs that have one."""
        return {job.name: job.placement for job in self.jobs if job.placement is not None}

    @functools.cached_property
    def running_since(self) -> Mapping[str, float]:
        """Job name -> epoch seconds, for jobs that have a placement."""
        return {job.name: job.running_since for job in self.jobs if job.placement is not None}

    @functools.cached_property
    def not_tolerated(self) -> Mapping[str, frozenset[str]]:
        """Job name -> taints of nodes on which it must not be started, for jobs that have some."""
        return {job.name: job.not_tolerated for job in self.jobs if job.not_tolerated}

    @functools.cached_property
    def gpus_per_pod(self) -> Mapping[str, int]:
        """Job name -> GPUs of each of its pods, for jobs whose pods have several."""
        return {job.name: job.gpus_per_pod for job in self.jobs if job.gpus_per_pod > 1}

    @functools.cached_property
    def unmeasured(self) -> frozenset[str]:
        """Names of the jobs of whose speed nothing is known."""
        return frozenset(job.name for job in self.jobs if not job.measured)


def take_snapshot(
    spec: ClusterPolicySpec,
    *,
    nodes: Mapping[str, NodeView],
    pods: Sequence[Object],
    jobs: Sequence[JobView],
    measurements: Measurements,
    now: Time,
) -> Snapshot:
    """What the policy ``spec`` has to decide on."""
    wanting = [view for view in jobs if wants_gpus(view, now)]
    capacity = read_capacity(spec.node_pools, nodes=nodes, pods=pods, jobs=jobs, wanting=wanting)
    admitted, refused = _admit(spec, capacity, wanting)
    tenants = admit_tenants(spec.tenants, [(one.view, one.gpus) for one in admitted], jobs)
    refused += [
        RefusedJob(key=one.view.key, launches=one.view.status.launches, refusal=tenants.refused[one.view.key])
        for one in admitted
        if one.view.key in tenants.refused
    ]
    admitted = [
        dataclasses.replace(one, gpus=tenants.gpus[one.view.key])
        for one in admitted
        if one.view.key in tenants.gpus
    ]
    requests = [GangRequest(key=one.view.key, spec=one.spec, stages=one.gpus) for one in admitted]
    speeds = measurements.estimates(requests, capacity.gpu_types)
    return Snapshot(
        capacity=capacity,
        jobs=tuple(_snapshot_job(one, speeds[one.view.key], tenants, now) for one in admitted),
        refused=tuple(refused),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Admitted:
    """A job that some round can place: the size of its gang, the GPU types it may use, barring taints."""

    view: JobView
    spec: JobSpec
    gpus: int
    gpu_types: tuple[str, ...]
    not_tolerated: frozenset[str]


def _admit(
    spec: ClusterPolicySpec, capacity: Capacity, views: Sequence[JobView]
) -> tuple[list[_Admitted], list[RefusedJob]]:
    """(jobs that some round can place, jobs that none can)."""
    admitted, refused = [], []
    usable_for: dict[tuple[frozenset[str], int], Mapping[str, int]] = {}
    for view in views:
        try:
            found: _Admitted | Refusal = _admit_one(spec, capacity, view, usable_for)
        except Exception as error:
            if view.running_allocation is not None:
                raise  # refused, it would lose its GPUs
            logger.exception("job=%s/%s cannot be considered", *view.key)
            message = f"the allocator cannot consider the job: {type(error).__name__}: {error}"
            found = Refusal(reason=JobReason.INTERNAL_ERROR, message=message)
        if isinstance(found, _Admitted):
            admitted.append(found)
        else:
            refused.append(RefusedJob(key=view.key, launches=view.status.launches, refusal=found))
    return admitted, refused


def _admit_one(
    spec: ClusterPolicySpec,
    capacity: Capacity,
    view: JobView,
    usable_for: dict[tuple[frozenset[str], int], Mapping[str, int]],
) -> _Admitted | Refusal:
    assert view.spec is not None
    allowed = tuple(t for t in capacity.gpu_types if not view.spec.gpu_types or t in view.spec.gpu_types)
    allocation = view.running_allocation
    for avoid in (True, False):  # nodes that the job avoids are better than none
        barred = capacity.tolerance.barred(view, avoid=avoid)
        alike = barred, view.spec.gpus_per_pod
        if alike not in usable_for:
            usable_for[alike] = usable_by_pool(capacity.nodes, *alike)
        usable = usable_for[alike]
        size = gang_size(view, spec.node_pools, usable, allowed)
        refusal = admission_error(view.spec, spec.node_pools, usable, allowed, size)
        if refusal is None or allocation is not None or not view.avoided:
            break
    if allocation is None:
        if refusal is not None:
            return with_barred_nodes(refusal, capacity.nodes, barred, allowed)
    else:
        size = allocation.gpus
    if barred:
        room = {pool.gpu_type for pool in spec.node_pools if usable[pool.name] >= size}
        room |= {allocation.gpu_type} if allocation is not None else set()
        allowed = tuple(gpu_type for gpu_type in allowed if gpu_type in room)
    return _Admitted(view=view, spec=view.spec, gpus=size, gpu_types=allowed, not_tolerated=barred)


def _snapshot_job(one: _Admitted, speeds: Mapping[str, Estimate], tenants: Tenancy, now: Time) -> SnapshotJob:
    view, known = one.view, {gpu_type: speeds[gpu_type] for gpu_type in one.gpu_types}
    rates = {gpu_type: speed.steps_per_second for gpu_type, speed in known.items()}
    allocation = view.running_allocation
    return SnapshotJob(
        key=view.key,
        job=as_job(view, one.spec, gpus=one.gpus, rates=rates, now=now),
        launches=view.status.launches,
        placement=allocation.placement if allocation is not None else None,
        running_since=allocation.since.timestamp() if allocation is not None else 0.0,
        growth_sizes=tenants.growth(view.key, growth_sizes(view)) if may_grow(view, now) else (),
        not_tolerated=one.not_tolerated,
        gpus_per_pod=one.spec.gpus_per_pod if allocation is None else allocation.gpus_per_pod,
        measured=any(speed.source != "unknown" for speed in known.values()),
    )


def wants_gpus(view: JobView, now: Time) -> bool:
    """Whether the job takes part in the allocation."""
    status = view.status
    if view.deleting or view.spec is None or status.finished or view.finished_step is not None:
        return False
    if view.blocked is not None and status.allocation is None:
        return False
    if view.spec.suspend or (status.next_launch_at is not None and status.next_launch_at > now):
        return False
    return (
        status.allocation is None
        or status.allocation.ending is None
        or status.allocation.ending.cause is not Cause.COMPLETED
    )


def as_job(view: JobView, spec: JobSpec, *, gpus: int, rates: Mapping[str, float], now: Time) -> Job:
    """The job as the policies see it; times in seconds."""
    status = view.status
    done = status.progress.step if status.progress is not None else 0
    elapsed = 0.0 if view.created is None else (now - view.created).total_seconds()
    return Job(
        name=job_id(view.key),
        throughput=rates,
        gpus=gpus,
        weight=spec.weight,
        entity=spec.entity,
        # A job that is about to end still counts: its last step is not announced yet.
        steps_remaining=float(max(1, spec.config.total_steps - done)),
        elapsed=max(0.0, elapsed - status.suspended_seconds),
        isolated_elapsed=status.isolated.seconds if status.isolated is not None else 0.0,
        deadline=None if spec.deadline is None else (spec.deadline - now).total_seconds(),
    )
