"""A job that wants GPUs, as decisions see it."""

import dataclasses
from collections.abc import Mapping

from ballast_policies.allocation.problem import Job
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.rounds import ElasticGang, MixedGang, Placement, SpreadGang
from ballast_policies.throughput.track import Estimate

from ballast_operator.allocator.costs.data_prices import usd_per_step
from ballast_operator.allocator.problem.admission import Admitted, sizes_that_fit
from ballast_operator.allocator.problem.capacity import Capacity
from ballast_operator.allocator.problem.mixed.gang import mixed_gang
from ballast_operator.allocator.problem.speeds.held import from_where_it_is, spread_gang
from ballast_operator.allocator.problem.speeds.requests import GangRequest
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.allocator.size_changes import change_pause, may_grow_from, may_move, restart_seconds
from ballast_operator.allocator.wanting import as_job
from ballast_operator.kube.kinds import Key
from ballast_operator.views.clock import Time


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


def snapshot_job(
    one: Admitted,
    request: GangRequest,
    speeds: Mapping[str, Estimate],
    measurements: Measurements,
    capacity: Capacity,
    now: Time,
    alone: str,
) -> SnapshotJob:
    """The job as it is now.

    Args:
        one: as it was admitted.
        request: its gang, whose speed was asked.
        speeds: GPU type -> what is known of that.
        measurements: what was reported.
        capacity: of the pools.
        now: the time.
        alone: why it does not share a GPU, as text; empty: there is nothing to say.
    """
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
        left_out="; ".join(filter(None, (view.lost_pool, one.left_out, alone))),
        usd_per_step=usd_per_step(view, capacity.regions, capacity.data_prices),
        data_region=one.spec.data.region if one.spec.data is not None else "",
        measured=any(speed.source != "unknown" for speed in known.values()),
        spread=spread_gang(view, request, measurements, capacity, packed),
        mixed=mixed_gang(view, one.mixed, capacity, measurements, speeds, one.gpus, one.fits_one_pool),
    )
