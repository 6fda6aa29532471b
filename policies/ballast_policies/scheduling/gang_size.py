"""GPUs that a job's gang asks for, and why no pool has them, or the memory for it."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.rounds.draft import barred_nodes
from ballast_policies.rounds.values import Node, PoolPart
from ballast_policies.scheduling.gang_room import Room
from ballast_policies.scheduling.gang_spec import GangSpec, thinned
from ballast_policies.scheduling.refusals import Obstacle, Refusal

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

    Args:
        spec: of the job.
        room: in the pools that are open to it.
        allowed: GPU types.
        largest: by :func:`gang_size`.
        held: what it has now; None: it does not run.
        any_size: also of a gang that does not grow, before it runs.
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
