"""Jobs that want GPUs, as decisions see them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ballast_policies.allocation.problem import Job
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.rounds.divisions import mixtures
from ballast_policies.rounds.gangs import (
    ElasticGang,
    MixedGang,
    SharedGpus,
    SharingJob,
)
from ballast_policies.rounds.values import NodeRequest
from ballast_policies.scheduling.gang_room import gigabytes, known_over_planned, within_limit
from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.scheduling.gang_speeds import GangRequest
from ballast_policies.scheduling.measurements import Measurements
from ballast_policies.scheduling.refusals import each_job
from ballast_policies.scheduling.state import ClusterJob
from ballast_policies.throughput.paired import PairSpeeds
from ballast_policies.throughput.speeds import Estimate, Speeds

from ballast_operator.allocator.costs.data_prices import usd_per_step, usd_to_move
from ballast_operator.allocator.problem.admission import (
    Admitted,
    change_pause,
    live_sizes,
    may_change_size,
    may_grow_from,
    may_move,
    restart_seconds,
    restarts_from,
    sizes_that_fit,
    trains_from,
)
from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.api.node_pool import SharesGpu
from ballast_operator.kube.kinds import Key
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec


def colocation_candidates(
    jobs: Sequence[Admitted], capacity: ClusterCapacity, kinds: Mapping[str, Speeds]
) -> SharedGpus:
    """Jobs that may share the pools' GPUs; ``kinds``: kind of training -> speeds alone and in pairs."""
    if not capacity.shared:
        return SharedGpus()
    found, stated = {}, dict[str, dict[str, float]]()
    for one in jobs:
        memory = needed_memory(one)
        if one.spec.asked.shares_gpu is SharesGpu.ALLOWED and not why_alone(one) and memory is not None:
            kind = one.spec.kind
            said = {gpu_type: by_size[1] for gpu_type, by_size in one.spec.throughput.items() if 1 in by_size}
            stated.setdefault(kind, said)
            at = [key.alone_in_pool for key in kinds.get(kind, {}) if key.nodes == 1]
            known = {gang[0] for gang in at if gang is not None and gang[1] == 1}
            found[job_id(one.view.key)] = SharingJob(
                kind=kind, memory=memory, known_alone=frozenset(known | stated[kind].keys())
            )
    return SharedGpus(jobs=found, memory=capacity.shared, speeds=PairSpeeds.of(kinds, stated))


def needed_memory(one: Admitted) -> float | None:
    """Bytes that it needs of its GPU: as stated, else as measured; None: not known."""
    if one.spec.memory_per_gpu is not None:
        return one.spec.memory_per_gpu
    if one.memory.need is None:
        return None
    return one.memory.need.least(one.spec.positions(1)) or None


def why_alone(one: Admitted) -> str:
    """Reason that a job that allows it does not share a GPU, as text; empty: it may."""
    spec, allocation = one.spec, one.view.running_allocation
    if spec.smallest_gang != 1 or spec.largest_gang != 1:
        sizes = f"{spec.smallest_gang} to {spec.largest_gang} GPUs"
        return (
            f"it may have {sizes}, and jobs of exactly one share. To fix: pipeline.minStages and maxStages: 1"
        )
    if needed_memory(one) is None:
        return "what memory it needs is neither stated nor measured yet. To fix: set memoryPerGpu"
    if allocation is not None and allocation.shared_gpu is None:
        return "it was launched on a GPU of its own"
    return ""


def sharing_text(one: Admitted, shared: SharedGpus) -> str:
    """Reason that a job runs alone although it allows sharing; empty: it does not allow it, or may share."""
    if one.spec.asked.shares_gpu is SharesGpu.NEVER:
        return ""
    if not shared.memory:
        return "sharesGpu: no pool has a node whose GPU two jobs may share"
    why = why_alone(one)
    if why:
        return f"sharesGpu: {why}"
    memory, most = needed_memory(one) or 0.0, max(shared.memory.values())
    if memory >= most:
        known = f"the largest has {gigabytes(most)}" if most else "their memory is not known"
        return f"sharesGpu: it needs {gigabytes(memory)} of GPUs that are shared, and {known}"
    if not shared.jobs[job_id(one.view.key)].known_alone:
        return "sharesGpu: it shares once its speed alone is reported, or stated in throughput"
    return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob(ClusterJob):
    """A TrainingJob that wants GPUs, and what it is told with its GPUs; its name is ``namespace/name``.

    Attributes:
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
    """The job as it is now; ``alone``: why it does not share a GPU, as text; empty: nothing to say."""
    view, known = one.view, {gpu_type: speeds[gpu_type] for gpu_type in one.gpu_types}
    rates = {gpu_type: speed.steps_per_second for gpu_type, speed in known.items()}
    allocation = view.running_allocation
    held, packed = view.held_placement, rates
    at = held.placement if held is not None and not held.parts else None
    per_pod = one.spec.gpus_per_pod if allocation is None else allocation.gpus_per_pod
    degrees = None if allocation is None else allocation.degrees
    elastic, grows_from = None, may_grow_from(view)
    may_grow = grows_from is not None and grows_from <= now
    if len(one.sizes) > 1:
        by_size = sizes_that_fit(one, measurements.by_size(request, known, one.sizes), capacity)
        if by_size:
            if held is not None:
                packed = {t: sizes[held.gpus] for t, sizes in by_size.items() if held.gpus in sizes}
            from_here: dict[str, Mapping[int, float]] = {**by_size}
            if at is not None:
                free = sum(
                    node.gpus - capacity.in_use.get(node.name, 0)
                    for node in capacity.nodes
                    if node.name in at.nodes
                )
                from_here = measurements.from_where_it_is(request, at, by_size, free)
            live = live_sizes(view)
            if held is not None and one.spec.plans and restarts_from(view, held.since) > now:
                here = from_here.get(held.gpu_type, {})
                here = {size: rate for size, rate in here.items() if size <= held.gpus or size in live}
                from_here |= {held.gpu_type: here} if here else {}
            elastic = ElasticGang(
                speeds=from_here,
                together=math.lcm(per_pod, degrees.gpus_per_stage if degrees is not None else 1)
                if one.spec.plans
                else one.spec.ranks_together(per_pod),
                live=not one.spec.plans,
                live_sizes=live,
                per_pod=per_pod,
                may_shrink=one.shrinks,
                may_grow=may_grow,
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
        trains_from=trains_from(view, now),
        elastic=elastic,
        grows_from=None if grows_from is None else grows_from.timestamp(),
        pods=held.pods if held is not None else (),
        asks=NodeRequest(one.not_tolerated, per_pod, one.topology),
        layers=measurements.profiles.layers(view.key, one.spec),
        closed_pools=one.closed_pools,
        left_out="; ".join(filter(None, (view.lost_pool, one.left_out, alone))),
        usd_per_step=usd_per_step(view, capacity.regions, capacity.data_prices),
        usd_to_move=usd_to_move(view, capacity.regions, capacity.data_prices),
        data_region=one.spec.data.region if one.spec.data is not None else "",
        measured=any(speed.source != "unknown" for speed in known.values()),
        spread=None
        if at is None
        else measurements.spread_gang(
            request,
            at,
            packed,
            per_pod=per_pod,
            restart_seconds=restart_seconds(view),
            may_move=may_move(view) and not view.leaving,
        ),
        mixed=mixed_gang(one, capacity, measurements, speeds, may_grow=may_grow),
    )


def snapshot_jobs(
    admitted: Sequence[Admitted],
    measurements: Measurements,
    capacity: ClusterCapacity,
    shared: SharedGpus,
    now: Time,
) -> tuple[SnapshotJob, ...]:
    """A job for each that is admitted; ``shared``: who may share which GPUs. Raises JobFaults."""
    requests = each_job(admitted, lambda one: one.request(capacity.node_sizes), lambda one: one.view.key)
    speeds = measurements.estimates(requests, capacity.gpu_types)

    def seen(job: tuple[Admitted, GangRequest]) -> SnapshotJob:
        one, request = job
        alone = sharing_text(one, shared)
        return snapshot_job(one, request, speeds[request.key], measurements, capacity, now, alone)

    return tuple(each_job(zip(admitted, requests, strict=True), seen, lambda job: job[1].key))


def mixed_gang(
    one: Admitted,
    capacity: ClusterCapacity,
    measurements: Measurements,
    speeds: Mapping[str, Estimate],
    *,
    may_grow: bool,
) -> MixedGang | None:
    """The gang in several pools as rounds see it; None where it has no room: it may be in one pool only.

    ``speeds``: GPU type -> what is known of the GPUs that it asks for. ``may_grow``: it may take more now.
    """
    view, room, spec, allocation = one.view, one.mixed, one.spec, one.view.running_allocation
    if room is None:
        return None
    resizes = allocation is not None and bool(allocation.parts) and may_change_size(view) and not spec.plans
    rates = {gpu_type: speeds[gpu_type].steps_per_second for gpu_type in room.gpu_types}
    gang = MixedGang(
        pipeline=spec.launched_pipeline(measurements.profiles.layers(view.key, spec)),
        sizes=room.sizes,
        speeds={gpu_type: spec.gpu_speeds.get(gpu_type, rate) for gpu_type, rate in rates.items()},
        base=one.gpus,
        fits_one_pool=one.fits_one_pool,
        measured={
            at: known.steps_per_second
            for at, known in measurements.reported_by(view.key).items()
            if at.nodes is None
        },
        memory=within_limit(spec, capacity.memory),
        barred=room.barred,
        per_pod=spec.gpus_per_pod,
        planned=spec.planned_speeds,
        known_over_planned=known_over_planned(spec, rates, one.gpus),
        min_gain=spec.config.rebalance.min_gain,
        may_move=may_move(view) and not view.leaving and allocation is not None,
        may_shrink=resizes,
        may_grow=resizes and may_grow,
        pause_seconds=change_pause(view),
        restart_seconds=restart_seconds(view),
    )
    if one.fits_one_pool:
        return gang
    size = dataclasses.replace(gang, sizes=(one.gpus,))
    return dataclasses.replace(gang, mixtures=mixtures(size, room.gpus))


def as_job(view: JobView, spec: JobSpec, *, gpus: int, rates: Mapping[str, float], now: Time) -> Job:
    """The job as the policies see it; times in seconds."""
    status, asked = view.status, spec.asked
    done = status.progress.step if status.progress is not None else 0
    elapsed = 0.0 if view.created is None else (now - view.created).total_seconds()
    return Job(
        name=job_id(view.key),
        throughput=rates,
        gpus=gpus,
        weight=asked.weight,
        entity=asked.entity,
        user=asked.user or "",
        # A job that is about to end still counts: its last step is not announced yet.
        steps_remaining=float(max(1, spec.config.total_steps - done)),
        elapsed=max(0.0, elapsed - status.suspended_seconds),
        isolated_elapsed=status.isolated.seconds if status.isolated is not None else 0.0,
        deadline=None if asked.deadline is None else (asked.deadline - now).total_seconds(),
        budget=None if asked.budget is None else max(0.0, asked.budget - status.cost_so_far),
    )
