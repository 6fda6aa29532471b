"""Gangs that may run in several pools at once: where there is room for them."""

import dataclasses
from collections.abc import Mapping, Sequence

from ballast_policies.contract.job.reshaping import BalanceBy
from ballast_policies.planning.launch import LaunchedPipeline
from ballast_policies.planning.memory.measured_layers import MeasuredLayers
from ballast_policies.rounds.divisions import best_parts
from ballast_policies.rounds.gangs import MixedGang

from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.allocator.problem.gang_size import Refusal, most_gpus, thinned
from ballast_operator.allocator.problem.memory import GangMemory
from ballast_operator.allocator.problem.tolerance import usable_by_pool
from ballast_operator.api.conditions import JobReason
from ballast_operator.api.training_job import can_mix
from ballast_operator.views.job import JobView
from ballast_operator.views.spec import JobSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedRoom:
    """Where a job's gang could be in several pools of an empty cluster, nodes that may come included.

    Attributes:
        gpus: pool -> (its GPU type, GPUs on which the gang may be started, in whole positions and pods).
        sizes: that the gang may have there, fewest first.
        barred: groups of nodes on which it must not be started.
    """

    gpus: Mapping[str, tuple[str, int]]
    sizes: tuple[int, ...]
    barred: frozenset[str]

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of the pools, sorted."""
        return tuple(sorted({gpu_type for gpu_type, _ in self.gpus.values()}))


def mixed_room(
    view: JobView,
    capacity: ClusterCapacity,
    *,
    may_use: Sequence[str],
    closed: frozenset[str],
    barred: frozenset[str],
    memory: GangMemory,
) -> MixedRoom | None:
    """The room of a job that allows several pools; None: it does not, or fewer than two have some.

    ``closed``: pools that ``spec.spot`` closes to it. ``barred``: groups of nodes that its template does not
    tolerate. Of ``memory`` only what the job states is read; the stages are cut to each GPU's.
    """
    spec = view.spec
    assert spec is not None
    if not spec.mixes_pools or spec.layers is None:
        return None
    least = spec.memory_per_gpu
    shut = closed | {pool for pool in may_use if least is not None and not memory.fits(pool, 1)}
    types = {pool.pool: pool.gpu_type for pool in capacity.pools}
    held = view.running_allocation
    own = {part.pool for part in held.by_pool} if held is not None else set[str]()
    open_types = {types[pool] for pool in may_use if pool not in shut or pool in own}
    barred |= {n.taints for n in capacity.nodes if n.pool in shut - own and n.gpu_type in open_types}
    open_nodes = [node for node in capacity.nodes if node.gpu_type in open_types]
    usable = usable_by_pool(open_nodes, barred, spec.gpus_per_pod)
    together = spec.ranks_together(spec.gpus_per_pod)
    room = {pool: usable[pool] // together * together for pool in may_use}
    gpus = {pool: (types[pool], count) for pool, count in room.items() if count > 0}
    total = sum(count for _, count in gpus.values())
    fewest = max(spec.smallest_gang, 2 * together)
    sizes = [size for size in range(fewest, min(most_gpus(view), total) + 1) if spec.suits(size)]
    if len(gpus) < 2 or not sizes:
        return None
    return MixedRoom(gpus=gpus, sizes=tuple(thinned(sizes if spec.grow else sizes[-1:])), barred=barred)


def over_all_pools(refusal: Refusal, spec: JobSpec, room: Mapping[str, int]) -> Refusal:
    """The refusal for lack of GPUs of one pool, with what several pools together would change.

    ``room``: pool -> GPUs on which the gang may be started.
    """
    if refusal.reason != JobReason.EXCEEDS_CAPACITY or not can_mix(spec.config):
        return refusal
    if spec.planned_gpus:
        needs = ", ".join(f"{gpus} x {gpu_type}" for gpu_type, gpus in spec.planned_gpus)
        has = ", ".join(f"{name} {count}" for name, count in sorted(room.items())) or "none"
        pods = f" in pods of gpusPerPod={spec.gpus_per_pod}" if spec.gpus_per_pod > 1 else ""
        message = (
            f"plan.gpus needs {needs}, each of one pool{pods}, with memory for its layers; its pools have "
            f"room for: {has}. To fix: a plan for the GPUs that there are, or add nodes"
        )
        return dataclasses.replace(refusal, message=message)
    if spec.mixes_pools:
        has = ", ".join(f"{name} {count}" for name, count in sorted(room.items()))
        message = (
            f"needs {spec.smallest_gang} GPUs; its pools do not have them together, with the memory for its "
            f"layers: {has}. To fix: lower pipeline.minStages, or add nodes"
        )
        return dataclasses.replace(refusal, message=message)
    if spec.smallest_gang <= sum(room.values()):
        return dataclasses.replace(refusal, message=f"{refusal.message}, or set mixedPools: Allowed")
    return refusal


def launched_pipeline(spec: JobSpec, layers: MeasuredLayers | None) -> LaunchedPipeline:
    """What the stages of the job's next launch are cut from, as ``JobSpec.first_stages`` does."""
    known, rebalance = layers or MeasuredLayers(), spec.config.rebalance
    if not rebalance.enabled or rebalance.by is not BalanceBy.TIME:
        known = dataclasses.replace(known, seconds=())
    if spec.memory_per_gpu is not None:
        known = dataclasses.replace(known, held_bytes=(), activation_bytes=())
    return LaunchedPipeline(
        layers=known,
        count=spec.layers or 1,
        form=spec.pipeline_form(),
        ranks_per_position=spec.ranks_per_position,
        cut=spec.planned_cut,
    )


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
        base=spec.ranks_per_position,
        memory=within_limit(spec, memory.pools),
        per_pod=spec.gpus_per_pod,
        planned=spec.planned_gpus,
    )
    return bool(best_parts(gang, room.gpus))
