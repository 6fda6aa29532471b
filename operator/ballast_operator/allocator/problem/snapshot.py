"""The cluster at one moment, as the values that policies decide on."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.rounds import Placement
from ballast_policies.rounds.consolidate import SpreadGang
from ballast_policies.rounds.mixed import MixedGang
from ballast_policies.rounds.sharing import SharedGpus
from ballast_policies.rounds.sizes import ElasticGang
from ballast_policies.throughput.track import Estimate

from ballast_operator.allocator.costs.data_prices import data_prices, usd_per_step
from ballast_operator.allocator.costs.spot_limits import spot_limits, within_limits
from ballast_operator.allocator.problem.admission import Admissions, Admitted, RefusedJob, sizes_that_fit
from ballast_operator.allocator.problem.budgets import SpentBudget, without_suspended_teams
from ballast_operator.allocator.problem.capacity import Capacity, read_capacity
from ballast_operator.allocator.problem.mixed.gang import mixed_gang
from ballast_operator.allocator.problem.sharing.who_may import (
    on_own_gpus,
    sharing_text,
    speeds_beside,
    who_may_share,
)
from ballast_operator.allocator.problem.speeds.held import from_where_it_is, spread_gang
from ballast_operator.allocator.problem.speeds.requests import GangRequest
from ballast_operator.allocator.problem.tenants import TenantRooms, admit_tenants
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.allocator.size_changes import change_pause, may_grow_from, may_move, restart_seconds
from ballast_operator.allocator.wanting import as_job, wants_gpus
from ballast_operator.api.cluster_policy import ClusterPolicySpec
from ballast_operator.kube.kinds import Key, Object
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob:
    """A job that wants GPUs.

    Attributes:
        key: which job.
        job: the same as policies see it; its name is ``namespace/name``.
        launches: ``status.launches``.
        placement: where its gang runs; None: it holds no GPUs, or its launch is ending.
        running_since: when that launch was decided, epoch seconds; 0 without a placement.
        elastic: the sizes that its gang may have, with their speeds; None: it has one size.
        grows_from: from when on its gang may take more GPUs; None: as it is now, never.
        pods: names of its gang's pods, by rank.
        not_tolerated: taints of nodes (``Node.taints``) on which it must not be started.
        gpus_per_pod: GPUs of each of its pods, which are on one node.
        layers: as measured by it or another of its kind; None: nothing is known.
        mixed: what is known of it as a gang in several pools; None: it may be in one only.
        closed_pools: that ``spec.spot`` closes to it, or where it is not known what its data costs.
        left_out: pools that it is not offered, by these or for lack of memory, as text.
        usd_per_step: pool -> what reading ``spec.dataLocation`` costs there; empty: nothing.
        data_region: where that is.
        measured: whether its speed is stated or measured somewhere; otherwise every figure is a guess.
        spread: of a running gang on more nodes than would hold it; None: it is not.
        beside_speed: of a running job that shares its GPU, its speed over that alone.
    """

    key: Key
    job: Job
    launches: int = 0
    placement: Placement | None = None
    running_since: float = 0.0
    elastic: ElasticGang | None = None
    grows_from: Time | None = None
    pods: tuple[str, ...] = ()
    not_tolerated: frozenset[str] = frozenset()
    gpus_per_pod: int = 1
    measured: bool = True
    layers: MeasuredLayers | None = None
    mixed: MixedGang | None = None
    closed_pools: frozenset[str] = frozenset()
    left_out: str = ""
    usd_per_step: Mapping[str, float] = dataclasses.field(default_factory=dict)
    data_region: str = ""
    spread: SpreadGang | None = None
    beside_speed: float = 1.0

    @property
    def name(self) -> str:
        """Its name in problems and rounds."""
        return self.job.name

    def speed(self, placement: Placement) -> float:
        """Steps/s where it is placed; 0: not known."""
        gpus, elastic = len(placement.nodes), self.elastic
        if placement.parts:
            return self.mixed.speed_at(placement) if self.mixed is not None else 0.0
        known = 0.0 if self.spread is None else self.spread.speed_at(placement)
        if elastic is not None and not known:
            known = elastic.speed(placement.gpu_type, gpus)
        alone = known or self.job.throughput.get(placement.gpu_type, 0.0)
        return alone * self.beside_speed if placement == self.placement else alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The cluster at one moment.

    Attributes:
        capacity: of the policy's pools.
        jobs: those that want GPUs, by age.
        refused: those that want GPUs and cannot be placed by this policy.
        tenants: what namespaces with a limit on GPUs may still be given.
        spent: teams that have spent their budget, with what that means for their jobs.
        shared: which jobs may share which GPUs.
    """

    capacity: Capacity
    jobs: tuple[SnapshotJob, ...]
    refused: tuple[RefusedJob, ...] = ()
    tenants: TenantRooms = dataclasses.field(default_factory=TenantRooms)
    spent: Mapping[str, SpentBudget] = dataclasses.field(default_factory=dict)
    shared: SharedGpus = dataclasses.field(default_factory=SharedGpus)

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
    def elastic(self) -> Mapping[str, ElasticGang]:
        """Job name -> its sizes, for jobs that may have several."""
        return {job.name: job.elastic for job in self.jobs if job.elastic is not None}

    @functools.cached_property
    def mixed(self) -> Mapping[str, MixedGang]:
        """Job name -> what is known of it as a gang in several pools, for jobs that may be one."""
        return {job.name: job.mixed for job in self.jobs if job.mixed is not None}

    @functools.cached_property
    def spread(self) -> Mapping[str, SpreadGang]:
        """Job name -> its gang, for running gangs on more nodes than would hold them."""
        return {job.name: job.spread for job in self.jobs if job.spread is not None}

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
    def closed_pools(self) -> Mapping[str, frozenset[str]]:
        """Job name -> pools that are closed to it by what it asks for, for jobs with such pools."""
        return {job.name: job.closed_pools for job in self.jobs if job.closed_pools}

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
    spent: Mapping[str, SpentBudget] | None = None,
    admissions: Admissions | None = None,
    regions: Mapping[str, str] | None = None,
) -> Snapshot:
    """What the policy ``spec`` has to decide on.

    ``spent``: teams that have spent their budget. ``admissions``: of earlier snapshots; None: there are none.
    ``regions``: pool -> where its nodes were.
    """
    wanting, over = without_suspended_teams([view for view in jobs if wants_gpus(view, now)], spent or {})
    capacity = read_capacity(
        spec.node_pools, nodes=nodes, pods=pods, jobs=jobs, wanting=wanting, known=regions
    )
    capacity = dataclasses.replace(capacity, data_prices=data_prices(spec.data_prices))
    admitted, refused = (admissions or Admissions()).admit(spec, capacity, wanting, measurements.profiles)
    refused += over
    shrinkable = frozenset(one.view.key for one in admitted if one.shrinks)
    tenants = admit_tenants(
        spec.tenants, [(one.view, one.gpus) for one in admitted], jobs, shrinkable=shrinkable
    )
    refused += [
        RefusedJob(key=one.view.key, launches=one.view.status.launches, refusal=tenants.refused[one.view.key])
        for one in admitted
        if one.view.key in tenants.refused
    ]
    admitted = [
        one if one.gpus == gpus else dataclasses.replace(one, gpus=gpus)
        for one in admitted
        if (gpus := tenants.gpus.get(one.view.key)) is not None
    ]
    requests = [one.request(capacity.node_sizes) for one in admitted]
    speeds = measurements.estimates(requests, capacity.gpu_types)
    shared = who_may_share(admitted, capacity, measurements.kinds)
    found = tuple(
        _snapshot_job(
            one, request, speeds[request.key], measurements, capacity, now, sharing_text(one, shared)
        )
        for one, request in zip(admitted, requests, strict=True)
    )
    running = {job.name: job.placement for job in found if job.placement is not None}
    if speeds_there := speeds_beside(running, shared):
        found = tuple(dataclasses.replace(job, beside_speed=speeds_there.get(job.name, 1.0)) for job in found)
    return Snapshot(
        capacity=within_limits(
            capacity,
            spot_limits(spec, capacity.kinds),
            on_own_gpus(running, shared),
            [job.job.gpus if job.elastic is None else job.elastic.most for job in found],
        ),
        jobs=found,
        refused=tuple(refused),
        tenants=tenants.rooms,
        spent=spent or {},
        shared=shared,
    )


def _snapshot_job(
    one: Admitted,
    request: GangRequest,
    speeds: Mapping[str, Estimate],
    measurements: Measurements,
    capacity: Capacity,
    now: Time,
    alone: str,
) -> SnapshotJob:
    view, known = one.view, {gpu_type: speeds[gpu_type] for gpu_type in one.gpu_types}
    rates = {gpu_type: speed.steps_per_second for gpu_type, speed in known.items()}
    allocation = view.running_allocation
    held, packed = view.held_placement, rates
    per_pod = one.spec.gpus_per_pod if allocation is None else allocation.gpus_per_pod
    elastic, grows_from = None, may_grow_from(view)
    if len(one.sizes) > 1:
        by_size = sizes_that_fit(one, measurements.by_size(request, known, one.sizes), capacity)
        if by_size:
            if held is not None:
                packed = {t: sizes[held.gpus] for t, sizes in by_size.items() if held.gpus in sizes}
            elastic = ElasticGang(
                speeds=from_where_it_is(view, request, measurements, capacity, by_size),
                together=one.spec.ranks_together(per_pod),
                per_pod=per_pod,
                may_shrink=one.shrinks,
                may_grow=grows_from is not None and grows_from <= now,
                may_move=may_move(view),
                pause_seconds=change_pause(view),
                restart_seconds=restart_seconds(view),
            )
    return SnapshotJob(
        key=view.key,
        job=as_job(view, one.spec, gpus=one.gpus, rates=rates, now=now),
        launches=view.status.launches,
        placement=held.placement if held is not None else None,
        running_since=allocation.since.timestamp() if allocation is not None else 0.0,
        elastic=elastic,
        grows_from=grows_from,
        pods=held.pods if held is not None else (),
        not_tolerated=one.not_tolerated,
        gpus_per_pod=per_pod,
        layers=measurements.profiles.layers(view.key, one.spec),
        closed_pools=one.closed_pools,
        left_out="; ".join(filter(None, (one.left_out, alone))),
        usd_per_step=usd_per_step(view, capacity.regions, capacity.data_prices),
        data_region=one.spec.data.region if one.spec.data is not None else "",
        measured=any(speed.source != "unknown" for speed in known.values()),
        spread=spread_gang(view, request, measurements, capacity, packed),
        mixed=mixed_gang(view, one.mixed, capacity, measurements, speeds, one.gpus, one.fits_one_pool),
    )
