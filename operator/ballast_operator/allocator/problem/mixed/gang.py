"""What rounds know of a gang that may run in several pools at once."""

import dataclasses
from collections.abc import Mapping

from ballast_policies.contract.job.reshaping import BalanceBy
from ballast_policies.planning.launch.heterogeneous_ranks import LaunchedPipeline
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.rounds import MixedGang, best_parts, mixtures
from ballast_policies.throughput.track import Estimate

from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.allocator.problem.memory import GangMemory
from ballast_operator.allocator.problem.mixed.room import MixedRoom
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.allocator.size_changes import may_move, restart_seconds
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec


def launched_pipeline(spec: JobSpec, layers: MeasuredLayers | None) -> LaunchedPipeline:
    """What the stages of the job's next launch are cut from, as ``JobSpec.first_stages`` does."""
    known, rebalance = layers or MeasuredLayers(), spec.config.rebalance
    if not rebalance.enabled or rebalance.by is not BalanceBy.TIME:
        known = dataclasses.replace(known, seconds=())
    if spec.memory_per_gpu is not None:
        known = dataclasses.replace(known, held_bytes=(), activation_bytes=())
    return LaunchedPipeline(layers=known, count=spec.layers or 1, form=spec.pipeline_form())


def mixed_gang(
    view: JobView,
    room: MixedRoom | None,
    capacity: ClusterCapacity,
    measurements: Measurements,
    speeds: Mapping[str, Estimate],
    base: int,
    fits_one_pool: bool,
) -> MixedGang | None:
    """The gang as rounds see it; None where it has no ``room``: it may be in one pool only.

    Args:
        view: a job with a spec.
        room: of the job.
        capacity: of the pools.
        measurements: what was reported.
        speeds: GPU type -> what is known of ``base`` GPUs.
        base: number of GPUs.
        fits_one_pool: whether some pool can hold its least size.
    """
    if room is None:
        return None
    spec, allocation = view.spec, view.running_allocation
    assert spec is not None
    reported = measurements.reported_by(view.key)
    gang = MixedGang(
        pipeline=launched_pipeline(spec, measurements.profiles.layers(view.key, spec)),
        sizes=room.sizes,
        speeds={gpu_type: speeds[gpu_type].steps_per_second for gpu_type in room.gpu_types},
        base=base,
        fits_one_pool=fits_one_pool,
        measured={t: e.steps_per_second for (t, _), e in reported.items() if t not in capacity.gpu_types},
        memory=within_limit(spec, capacity.memory),
        barred=room.barred,
        per_pod=spec.gpus_per_pod,
        min_gain=spec.config.rebalance.min_gain,
        may_move=may_move(view) and not view.leaving and allocation is not None,
        restart_seconds=restart_seconds(view),
    )
    if fits_one_pool:
        return gang
    size = dataclasses.replace(gang, sizes=(base,))
    return dataclasses.replace(gang, mixtures=mixtures(size, room.gpus))


def within_limit(spec: JobSpec, memory: Mapping[str, float]) -> dict[str, float]:
    """Pool -> bytes of each GPU that the job may fill."""
    limit = spec.config.rebalance.memory_bytes
    return {pool: has if limit is None else min(has, limit) for pool, has in memory.items()}


def holds(spec: JobSpec, room: MixedRoom, memory: GangMemory) -> bool:
    """Whether the gang fits several pools of an empty cluster, the memory of their GPUs included."""
    layers = memory.need.layers if memory.need is not None else None
    gang = MixedGang(
        pipeline=launched_pipeline(spec, layers),
        sizes=room.sizes[:1],
        speeds=dict.fromkeys(room.gpu_types, 1.0),
        base=1,
        memory=within_limit(spec, memory.pools),
        per_pod=spec.gpus_per_pod,
    )
    return bool(best_parts(gang, room.gpus))
