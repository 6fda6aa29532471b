"""A job that wants GPUs, as decisions see it."""

import dataclasses
from collections.abc import Mapping

from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.rounds import ElasticGang
from ballast_policies.scheduling import ClusterJob
from ballast_policies.throughput.track import Estimate

from ballast_operator.allocator.costs.data_prices import usd_per_step
from ballast_operator.allocator.problem.admission import Admitted, sizes_that_fit
from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.allocator.problem.mixed.gang import mixed_gang
from ballast_operator.allocator.problem.speeds.held import from_where_it_is, spread_gang
from ballast_operator.allocator.problem.speeds.requests import GangRequest
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.allocator.size_changes import change_pause, may_grow_from, may_move, restart_seconds
from ballast_operator.allocator.wanting import as_job
from ballast_operator.kube.kinds import Key
from ballast_operator.views.clock import Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob(ClusterJob):
    """A TrainingJob that wants GPUs, and what it is told with its GPUs; its name is ``namespace/name``.

    Attributes:
        key: which job.
        pods: names of its gang's pods, by rank.
        layers: as measured by it or another of its kind; None: nothing is known.
    """

    key: Key
    pods: tuple[str, ...] = ()
    layers: MeasuredLayers | None = None


def snapshot_job(
    one: Admitted,
    request: GangRequest,
    speeds: Mapping[str, Estimate],
    measurements: Measurements,
    capacity: ClusterCapacity,
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
        tenant=view.key[0],
        job=as_job(view, one.spec, gpus=one.gpus, rates=rates, now=now),
        launches=view.status.launches,
        placement=held.placement if held is not None else None,
        running_since=allocation.since.timestamp() if allocation is not None else 0.0,
        elastic=elastic,
        grows_from=None if grows_from is None else grows_from.timestamp(),
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
