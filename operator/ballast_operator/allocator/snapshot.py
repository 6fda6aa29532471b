"""One look at the cluster, as the values that the policies decide on."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.rounds import Placement
from ballast_policies.throughput.track import Estimate

from ballast_operator.allocator.capacity import Capacity, read_capacity
from ballast_operator.allocator.gang_size import Refusal, admission_error, gang_size, growth_sizes, may_grow
from ballast_operator.allocator.throughput import GangRequest, Measurements
from ballast_operator.api.cause import Cause
from ballast_operator.api.cluster_policy import ClusterPolicySpec
from ballast_operator.kube.kinds import Key, Object, job_id
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView
from ballast_operator.views.spec import JobSpec


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
        measured: whether its speed is stated or measured somewhere; otherwise every figure is a guess.
    """

    key: Key
    job: Job
    launches: int = 0
    placement: Placement | None = None
    running_since: float = 0.0
    growth_sizes: tuple[int, ...] = ()
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
    capacity = read_capacity(spec.node_pools, nodes=nodes, pods=pods, jobs=jobs)
    admitted, refused = _admit(spec, capacity, [view for view in jobs if wants_gpus(view, now)])
    requests = [GangRequest(key=view.key, spec=job_spec, stages=size) for view, job_spec, size, _ in admitted]
    speeds = measurements.estimates(requests, capacity.gpu_types)
    return Snapshot(
        capacity=capacity,
        jobs=tuple(
            _snapshot_job(
                view, job_spec, size, {gpu_type: speeds[view.key][gpu_type] for gpu_type in allowed}, now
            )
            for view, job_spec, size, allowed in admitted
        ),
        refused=tuple(refused),
    )


def _admit(
    spec: ClusterPolicySpec, capacity: Capacity, views: Sequence[JobView]
) -> tuple[list[tuple[JobView, JobSpec, int, tuple[str, ...]]], list[RefusedJob]]:
    """((job, its spec, size of its gang, GPU types that it may use) of each, jobs that cannot be placed)."""
    admitted, refused = [], []
    by_pool = capacity.gpus_by_pool
    for view in views:
        assert view.spec is not None
        allowed = tuple(t for t in capacity.gpu_types if not view.spec.gpu_types or t in view.spec.gpu_types)
        allocation = view.running_allocation
        if allocation is not None:
            admitted.append((view, view.spec, len(allocation.pods), allowed))
            continue
        size = gang_size(view, spec.node_pools, by_pool, allowed)
        refusal = admission_error(view.spec, spec.node_pools, by_pool, allowed, size)
        if refusal is None:
            admitted.append((view, view.spec, size, allowed))
        else:
            refused.append(RefusedJob(key=view.key, launches=view.status.launches, refusal=refusal))
    return admitted, refused


def _snapshot_job(
    view: JobView, spec: JobSpec, gpus: int, speeds: Mapping[str, Estimate], now: Time
) -> SnapshotJob:
    rates = {gpu_type: speed.steps_per_second for gpu_type, speed in speeds.items()}
    allocation = view.running_allocation
    return SnapshotJob(
        key=view.key,
        job=as_job(view, spec, gpus=gpus, rates=rates, now=now),
        launches=view.status.launches,
        placement=allocation.placement if allocation is not None else None,
        running_since=allocation.since.timestamp() if allocation is not None else 0.0,
        growth_sizes=growth_sizes(view) if may_grow(view, now) else (),
        measured=any(speed.source != "unknown" for speed in speeds.values()),
    )


def wants_gpus(view: JobView, now: Time) -> bool:
    """Whether the job takes part in the allocation."""
    status = view.status
    if view.deleting or view.spec is None or status.finished or view.finished_step is not None:
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
        steps_remaining=float(max(1, spec.total_steps - done)),
        elapsed=max(0.0, elapsed - status.suspended_seconds),
        isolated_elapsed=status.isolated.seconds if status.isolated is not None else 0.0,
        deadline=None if spec.deadline is None else (spec.deadline - now).total_seconds(),
    )
