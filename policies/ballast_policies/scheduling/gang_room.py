"""Room for a gang in an empty cluster, its GPUs and their memory, and why no pool has what it asks for."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.rounds.divisions import best_parts, sizes_over_pools
from ballast_policies.rounds.draft import barred_nodes
from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.values import Node, NodeRequest, PoolPart
from ballast_policies.scheduling.gang_spec import GangSpec, thinned
from ballast_policies.scheduling.refusals import Obstacle, Refusal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangMemory:
    """Pools whose GPUs have enough memory for a job.

    Attributes:
        need: as measured; None: nothing was.
        pools: pool -> bytes of each of its GPUs, where that is known.
        types: pool -> its GPU type.
    """

    spec: GangSpec
    need: MemoryNeed | None
    pools: Mapping[str, float]
    types: Mapping[str, str]

    def least(self, pool: str, gpus: int) -> float:
        """Bytes of ``gpus`` on the pool's fullest GPU; 0: not known, infinite: the job has no such plan."""
        planned = self.spec.planned(self.types[pool], gpus)
        if self.spec.is_planned and planned is None:
            return math.inf
        if self.spec.memory_per_gpu is not None:
            return self.spec.memory_per_gpu
        if planned is not None:
            return planned.memory[0]
        return 0.0 if self.need is None else self.need.least(self.spec.positions(gpus))

    def fits(self, pool: str, gpus: int) -> bool:
        """True if a gang of ``gpus`` fits the GPUs of the pool; where something is not known, it does."""
        least = self.least(pool, gpus)
        return least < math.inf and least <= self.pools.get(pool, math.inf) * ROUNDING

    @property
    def limits(self) -> bool:
        """True if memory may keep the job from a pool at all."""
        spec = self.spec
        return spec.is_planned or (bool(self.pools) and bool(spec.memory_per_gpu is not None or self.need))

    def too_small(self, pools: Iterable[str], gpus: int) -> frozenset[str]:
        """Pools that a gang of ``gpus`` does not fit."""
        return frozenset(pool for pool in pools if not self.fits(pool, gpus)) if self.limits else frozenset()

    def shortfall(self, gpus: int, allowed: Sequence[str], wide: Sequence[str]) -> str:
        """Memory that a gang of ``gpus`` needs and ``allowed`` pools have; ``wide`` ones have the GPUs."""
        if all(self.least(pool, gpus) == math.inf for pool in wide):
            types = ", ".join(sorted({self.types[pool] for pool in wide}))
            return f"no plan is for {gpus} x {types}. To fix: other planner.gpus, minStages or maxStages"
        wide = [pool for pool in wide if self.least(pool, gpus) < math.inf]
        known = {pool: self.pools[pool] for pool in allowed if pool in self.pools}
        largest = max(known.values())
        if self.spec.memory_per_gpu is not None:
            needs = f"memoryPerGpu asks for {gigabytes(self.spec.memory_per_gpu)}"
            fix = "lower memoryPerGpu"
        elif self.spec.is_planned:
            known = {pool: self.pools[pool] for pool in wide}
            largest, least = max(known.values()), min(self.least(pool, gpus) for pool in wide)
            needs = f"on {gpus} GPUs its plan takes {gigabytes(least)} of the fullest one"
            fix = "state these pools' memory in planner.gpus, raise pipeline.maxStages"
        else:
            assert self.need is not None
            layer, size = self.need.layers.largest
            if size > largest:
                needs = f"layer {layer} needs {gigabytes(size)}"
                fix = "make microbatches or layers smaller"
            else:
                known = {pool: self.pools[pool] for pool in wide}
                largest, least = max(known.values()), self.need.least(self.spec.positions(gpus))
                needs = f"on {gpus} GPUs its layers take at least {gigabytes(least)} of the fullest one"
                fix = "raise pipeline.maxStages, make microbatches smaller"
        have = ", ".join(f"{pool} {gigabytes(has)}" for pool, has in sorted(known.items()))
        return (
            f"{needs}, the largest GPU has {gigabytes(largest)} (its pools: {have}). "
            f"To fix: {fix}, or add a pool of larger GPUs"
        )

    def left_out(self, pools: Iterable[str], gpus: int) -> str:
        """Pools that a gang of ``gpus`` is not offered, as text; empty: it fits all."""
        small = sorted(pool for pool in self.too_small(pools, gpus) if self.least(pool, gpus) < math.inf)
        if not small:
            return ""
        least = min(self.least(pool, gpus) for pool in small)
        have = ", ".join(f"{pool} (has {gigabytes(self.pools[pool])})" for pool in small)
        return f"on {gpus} GPUs it needs {gigabytes(least)} of each: not offered {have}"


def gigabytes(count: float) -> str:
    """Bytes as people read them: 16 GB."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Space for a gang in an empty cluster.

    Attributes:
        gpus: pool -> GPUs on which it may be started, of the pools of types that it allows.
        memory: which pools have enough memory for it.
        within: label of the level of which it has to be in one domain; empty: none.
    """

    gpus: Mapping[str, int]
    memory: GangMemory
    within: str = ""

    @functools.cached_property
    def most(self) -> int:
        """GPUs of the largest pool."""
        return max(self.gpus.values(), default=0)

    def holds(self, size: int) -> bool:
        """True if one of the pools can hold a gang of ``size``."""
        if size > self.most or not self.memory.limits:
            return size <= self.most
        return any(gpus >= size and self.memory.fits(pool, size) for pool, gpus in self.gpus.items())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedRoom:
    """GPUs of several pools of an empty cluster for a job's gang, nodes that may come included.

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
    memory: GangMemory,
    nodes: Sequence[Node],
    most: int,
    *,
    may_use: Sequence[str],
    own: Collection[str],
    closed: frozenset[str],
    barred: frozenset[str],
) -> MixedRoom | None:
    """The room of a job that allows several pools; None: it does not, or fewer than two have some.

    Of ``memory`` only what the job states is read; the stages are cut to each GPU's.

    Args:
        memory: of the gang.
        nodes: of all pools.
        most: GPUs that it wants at most.
        may_use: pools of types that it allows.
        own: pools in which it runs.
        closed: pools that are closed to it.
        barred: groups of nodes on which it must not be started.
    """
    spec, types = memory.spec, memory.types
    if not spec.mixes_pools or spec.layers is None:
        return None
    least = (spec.memory_per_gpu or 0.0) / ROUNDING
    shut = closed | {pool for pool in may_use if memory.pools.get(pool, least) < least}
    open_types = {types[pool] for pool in may_use if pool not in shut or pool in own}
    barred |= {n.taints for n in nodes if n.pool in shut.difference(own) and n.gpu_type in open_types}
    usable = NodeRequest(barred, spec.gpus_per_pod).usable(n for n in nodes if n.gpu_type in open_types)
    together = spec.gpus_per_pod if spec.is_planned else spec.ranks_together(spec.gpus_per_pod)
    room = {pool: usable[pool] // together * together for pool in may_use}
    gpus = {pool: (types[pool], count) for pool, count in room.items() if count > 0}
    total = sum(count for _, count in gpus.values())
    fewest = max(spec.smallest_gang, 2 * together)
    sizes = [size for size in range(fewest, min(most, total) + 1) if spec.suits(size)]
    if spec.is_planned:
        sizes = sizes_over_pools(_gang_over(spec, gpus, sizes, memory), gpus)
    if len(gpus) < 2 or not sizes:
        return None
    return MixedRoom(gpus=gpus, sizes=tuple(thinned(sizes if spec.grow else sizes[-1:])), barred=barred)


def known_over_planned(spec: GangSpec, rates: Mapping[str, float], gpus: int) -> dict[str, float]:
    """GPU type -> its speed over the planned one; ``rates``: steps/s of ``gpus`` of it, as estimated."""
    planned = {gpu_type: plan for gpu_type in rates if (plan := spec.planned(gpu_type, gpus)) is not None}
    known = {gpu_type: rates[gpu_type] / plan.steps_per_second for gpu_type, plan in planned.items()}
    return {gpu_type: ratio for gpu_type, ratio in known.items() if ratio > 0}


def within_limit(spec: GangSpec, memory: Mapping[str, float]) -> dict[str, float]:
    """Pool -> bytes of each GPU that the job may fill."""
    limit = spec.config.rebalance.memory_bytes
    return {pool: has if limit is None else min(has, limit) for pool, has in memory.items()}


def holds(spec: GangSpec, room: MixedRoom, memory: GangMemory) -> bool:
    """True if the gang fits several pools of an empty cluster, the memory of their GPUs included."""
    return bool(best_parts(_gang_over(spec, room.gpus, room.sizes[:1], memory), room.gpus))


def _gang_over(
    spec: GangSpec, room: Mapping[str, tuple[str, int]], sizes: Sequence[int], memory: GangMemory
) -> MixedGang:
    """The gang in an empty cluster whose GPUs are alike."""
    layers = memory.need.layers if memory.need is not None else None
    return MixedGang(
        pipeline=spec.launched_pipeline(layers),
        sizes=tuple(sizes),
        speeds={gpu_type: 1.0 for gpu_type, _ in room.values()},
        base=spec.ranks_per_position,
        memory=within_limit(spec, memory.pools),
        per_pod=spec.gpus_per_pod,
        planned=spec.planned_speeds,
    )


LACK_OF_ROOM = (Obstacle.EXCEEDS_CAPACITY, Obstacle.EXCEEDS_MEMORY)
"""Refusals of a gang that several pools together may have room for."""


def gang_size(spec: GangSpec, wanted: int, room: Room) -> int:
    """Most ranks, ``wanted`` or fewer, for which one of its pools has room, and which its schedule supports.

    Never below ``minStages``, even if that exceeds the pools or the schedule; see :func:`admission_error`.
    """
    fewest, most = max(1, min(spec.smallest_gang, wanted)), min(wanted, room.most)
    suiting = [size for size in range(most, fewest - 1, -1) if spec.suits(size)]
    return next((size for size in suiting if room.holds(size)), suiting[-1] if suiting else fewest)


def gang_sizes(
    spec: GangSpec,
    room: Room,
    allowed: Sequence[str],
    largest: int,
    held: PoolPart | None = None,
    any_size: bool = False,
) -> tuple[int, ...]:
    """Sizes that the gang may have, fewest ranks first; what it has now is one of them.

    One size where it does not change, and where no pool can hold the smallest.

    ``largest``: by :func:`gang_size`; ``held``: what it has now, None: it does not run; ``any_size``: also of
    a gang that does not grow, before it runs.
    """
    if held is not None and not spec.grow:
        return (held.gpus,)
    if not spec.grow and not any_size:
        return (largest,)
    fewest = max(1, min(spec.smallest_gang, largest))
    suiting = [size for size in range(fewest, largest + 1) if spec.suits(size)]
    if held is None or spec.is_planned:  # another size is another launch, wherever that is
        sizes = [size for size in suiting if room.holds(size)] or [largest if held is None else held.gpus]
    else:  # it shrinks no further than fits where it is
        sizes = [size for size in suiting if room.memory.fits(held.pool, size)] or [held.gpus]
    sizes = thinned(sizes[next(_runnable(spec, sizes, allowed), 0) :])
    if held is None or held.gpus in sizes:
        return tuple(sizes)
    if held.gpus < sizes[0]:
        return (held.gpus,)
    return tuple(sorted({*sizes, held.gpus}))


def _runnable(spec: GangSpec, sizes: Sequence[int], allowed: Sequence[str]) -> Iterator[int]:
    """Positions of sizes that the spec calls impossible (0 steps/s) on no GPU type that it has a use for."""
    of_use = [
        by_stages
        for gpu_type in allowed
        if (by_stages := spec.throughput.get(gpu_type)) and any(rate > 0 for rate in by_stages.values())
    ]
    for position, size in enumerate(sizes):
        if all(by_stages.get(size, 1.0) > 0 for by_stages in of_use):
            yield position


def admission_error(
    spec: GangSpec, gpu_types: Sequence[str], room: Room, allowed: Sequence[str], size: int
) -> Refusal | None:
    """Reason that no round can place the job in pools of ``gpu_types``, some ``allowed``; None: one can."""
    have = ", ".join(gpu_types)
    pipeline = spec.config.pipeline
    if spec.smallest_gang > spec.largest_gang:
        each = f" with {spec.stages_per_rank} stages each" if spec.stages_per_rank > 1 else ""
        each += f" in pods of gpusPerPod={spec.gpus_per_pod}" if spec.gpus_per_pod > 1 else ""
        return Refusal(
            Obstacle.MISCONFIGURED,
            f"pipeline.minStages={pipeline.min_stages}{each} exceeds "
            f"model.layers={spec.layers}. To fix: lower minStages",
        )
    if not allowed:
        return Refusal(
            Obstacle.NO_MATCHING_GPU_TYPE,
            f"gpuTypes allows {', '.join(spec.gpu_types)}; the node pools have {have}. "
            "To fix: add one of these to gpuTypes, or a pool to the ClusterPolicy",
        )
    if not spec.suits(size):
        own = pipeline.microbatches // spec.config.parallelism.data
        unsuited = SCHEDULES[pipeline.schedule].unsuited(spec.positions(size), own)
        return Refusal(
            Obstacle.MISCONFIGURED,
            f"pipeline.microbatches={pipeline.microbatches} does not suit {pipeline.schedule} on "
            f"{size} ranks: {unsuited or 'they do not fill its pods'}. To fix: set a multiple of the number "
            "of ranks",
        )
    if room.most < size:
        sizes = ", ".join(f"{name} {count}" for name, count in sorted(room.gpus.items()))
        per_pod = spec.gpus_per_pod
        pods = f" in pods of gpusPerPod={per_pod}, each on one node" if per_pod > 1 else ""
        have = "have room for" if pods else "have"
        lower = "pipeline.minStages or gpusPerPod" if pods else "pipeline.minStages"
        lower += ", topology.preferred in place of required" if room.within else ""
        pods += f", in one domain of {room.within}" if room.within else ""
        have += " in one domain at most" if room.within else ""
        return Refusal(
            Obstacle.EXCEEDS_CAPACITY,
            f"needs {size} GPUs of one pool{pods}; its pools {have}: {sizes}. "
            f"To fix: lower {lower}, or add nodes",
        )
    if not room.holds(size):
        return _exceeds_memory(spec, room, size)
    return None


def _exceeds_memory(spec: GangSpec, room: Room, size: int) -> Refusal:
    """No pool has both the GPUs and the memory; the message is about the largest gang that has the GPUs."""
    enough = [pool for pool in room.gpus if room.memory.fits(pool, size)]
    if enough:
        sizes = ", ".join(f"{pool} {room.gpus[pool]}" for pool in sorted(enough))
        return Refusal(
            Obstacle.EXCEEDS_CAPACITY,
            f"needs {size} GPUs of one pool; its pools whose GPUs have the memory have: {sizes}. "
            "To fix: lower pipeline.minStages, or add nodes",
        )
    most = min(spec.largest_gang, room.most)
    widest = next((count for count in range(most, size - 1, -1) if spec.suits(count)), size)
    wide = [pool for pool, gpus in room.gpus.items() if gpus >= widest]
    return Refusal(Obstacle.EXCEEDS_MEMORY, room.memory.shortfall(widest, tuple(room.gpus), wide))


def over_all_pools(refusal: Refusal, spec: GangSpec, room: Mapping[str, int], *, may_mix: bool) -> Refusal:
    """The refusal for lack of a pool's GPUs, with what several change.

    ``room``: pool -> usable GPUs. ``may_mix``: the job could allow several pools.
    """
    if refusal.reason != Obstacle.EXCEEDS_CAPACITY or not may_mix:
        return refusal
    if spec.planned_gpus:
        needs = ", ".join(f"{gpus} x {gpu_type}" for gpu_type, gpus in spec.planned_gpus)
        has = ", ".join(f"{name} {count}" for name, count in sorted(room.items())) or "none"
        pods = f" in pods of gpusPerPod={spec.gpus_per_pod}" if spec.gpus_per_pod > 1 else ""
        message = (
            f"plan.gpus needs {needs}{pods}, with memory for its layers; its pools have "
            f"room for: {has}. To fix: a plan for the GPUs that there are, or add nodes"
        )
        return dataclasses.replace(refusal, message=message)
    if spec.mixes_pools:
        has = ", ".join(f"{name} {count}" for name, count in sorted(room.items()))
        message = (
            f"needs {spec.smallest_gang} GPUs; its pools do not have them together, with the memory "
            f"for its layers: {has}. To fix: lower pipeline.minStages, or add nodes"
        )
        return dataclasses.replace(refusal, message=message)
    if spec.smallest_gang <= sum(room.values()):
        return dataclasses.replace(refusal, message=f"{refusal.message}, or set mixedPools: Allowed")
    return refusal


def with_barred_nodes(
    refusal: Refusal, nodes: Sequence[Node], barred: frozenset[str], allowed: Sequence[str], full: str
) -> Refusal:
    """The refusal for lack of GPUs, with the nodes of ``allowed`` types that are closed to the job.

    ``full``: those without room for its pods, as text.
    """
    if refusal.reason != Obstacle.EXCEEDS_CAPACITY:
        return refusal
    tainted: dict[str, Counter[str]] = {}
    closed: dict[str, Counter[str]] = {}
    for node in nodes:
        if node.gpu_type not in allowed:
            continue
        if node.closed:
            closed.setdefault(node.pool, Counter())[node.closed] += 1
        elif node.taints in barred:
            tainted.setdefault(node.pool, Counter())[node.taints] += 1
    words = "".join(
        barred_nodes(pool, tainted.get(pool, {}), closed.get(pool, {}))
        for pool in sorted({*tainted, *closed})
    )
    words += f"; {full}" if full else ""
    if not words:
        return refusal
    what, _, fix = refusal.message.partition(". To fix: ")
    more = "add the tolerations to spec.template, or " if tainted else ""
    more = "lower the requests of spec.template, or " if full else more
    return dataclasses.replace(refusal, message=f"{what}{words}. To fix: {more}{fix}")
