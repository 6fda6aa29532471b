"""GPUs that a job's gang asks for, and whether any pool has them, with the memory for it.

And how a running gang may change its size now, and what a change costs; the pauses are decision 0131.
"""

import dataclasses
import datetime
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ballast_policies.contract import ContractError
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.limits import OBJECT
from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.rounds.memory import resize_cooldown_seconds
from ballast_policies.simulator.decisions import DEFAULT_PAUSE_SECONDS, DEFAULT_RESTART_SECONDS

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.node_pool import NodePool
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView, Refusal
from ballast_operator.views.planned_degrees import thinned
from ballast_operator.views.spec import JobSpec

STOP_SECONDS = 5.0
"""Part of that until its pods have saved and are gone."""


def may_grow_from(view: JobView) -> Time | None:
    """Time from which the gang may take more GPUs; None: as it is now, never."""
    allocation, spec = view.status.allocation, view.spec
    if allocation is None or spec is None or not may_change_size(view):
        return None
    began = allocation.since
    if spec.plans:
        began = began if live_sizes(view) else restarts_from(view, began)
    elif not _same_recipe(view, spec):
        return None
    if allocation.resized_at is None:
        return began
    settling = resize_cooldown_seconds(change_pause(view), allocation.failed_growths)
    return max(began, allocation.resized_at + datetime.timedelta(seconds=settling))


def restarts_from(view: JobView, since: Time) -> Time:
    """Time from which a gang of planned degrees, launched at ``since``, may take more GPUs by a restart."""
    return since + datetime.timedelta(seconds=resize_cooldown_seconds(restart_seconds(view)))


def live_sizes(view: JobView) -> tuple[int, ...]:
    """Sizes that a gang of planned degrees may have without a restart; of another: none."""
    launched = view.launched_spec
    if not view.live_plans or not view.resizable or launched is None or not _same_recipe(view, launched):
        return ()
    return tuple(view.live_plans)


def may_change_size(view: JobView) -> bool:
    """True if the gang trains and can change its size now, maybe by a restart; no script."""
    allocation = view.running_allocation
    if allocation is None or view.shrinking or allocation.joining or view.leaving:
        return False
    by_restart = view.spec is not None and view.spec.grow and bool(view.spec.plans)
    return view.acknowledged and (view.resizable or by_restart)


def _same_recipe(view: JobView, spec: JobSpec) -> bool:
    """True if new pods would train with the configuration that the gang was launched with.

    Most changes of a spec take effect at the next launch; ranks do not read how many
    stages the gang may have.
    """
    try:
        launched = decode_text(dict[str, Any], view.plan_config, limits=OBJECT)
    except ContractError:  # someone has changed the ConfigMap
        return False
    return _recipe(launched, spec) == _recipe(spec.config_fields, spec)


def _recipe(config: Mapping[str, Any], spec: JobSpec) -> dict[str, Any]:
    pipeline = config.get("pipeline")
    if not isinstance(pipeline, Mapping):
        return dict(config)
    rest = {k: v for k, v in pipeline.items() if k not in ("minStages", "maxStages")}
    return {**config, "pipeline": rest} | ({"plan": None} if spec.asked.planner is not None else {})


def change_pause(view: JobView) -> float:
    """Seconds that training stands still when the gang changes its size: as last measured, else a second."""
    allocation = view.status.allocation
    if allocation is not None and allocation.resize_pause_ms is not None:
        return allocation.resize_pause_ms / 1000
    measured = [repack.pause_ms for repack in view.status.repacks if repack.pause_ms is not None]
    return measured[-1] / 1000 if measured else DEFAULT_PAUSE_SECONDS


def may_move(view: JobView) -> bool:
    """True if the gang trains, and could save, stop and start in another pool: nothing else is under way."""
    allocation, spec = view.running_allocation, view.spec
    if allocation is None or spec is None or not view.acknowledged:
        return False
    return not (view.shrinking or allocation.joining or (spec.is_script and not view.has_spoken))


def restart_seconds(view: JobView) -> float:
    """Seconds from the gang's stop to its first step elsewhere, as long as its last start took."""
    began, allocation = trains_from(view), view.running_allocation
    if allocation is None or began == math.inf:
        return DEFAULT_RESTART_SECONDS
    started = began - allocation.since.timestamp()
    return STOP_SECONDS + started if started > 0 else DEFAULT_RESTART_SECONDS


def trains_from(view: JobView) -> float:
    """Epoch seconds when the ranks of the running gang had their plan; infinite: it starts, 0: none runs.

    A start ends, one way or the other, by the deadlines of its pods and of its plan's acknowledgement.
    """
    running, allocation = view.status.condition(JobCondition.RUNNING), view.running_allocation
    if allocation is None:
        return 0.0
    return running.last_transition_time.timestamp() if running is not None and running.is_true else math.inf


def most_gpus(view: JobView) -> int:
    """Most GPUs that the job wants: after its own repack at most its ranks, as its model stays smaller."""
    spec = view.spec
    assert spec is not None
    wanted = spec.largest_gang
    own = [repack for repack in view.status.repacks if not repack.asked]
    if own:
        kept = len(own[-1].survivors) if own[-1].gpus is None else own[-1].gpus
        # gpusPerPod may have been changed since.
        wanted = min(wanted, -(-kept // spec.gpus_per_pod) * spec.gpus_per_pod)
    return wanted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangMemory:
    """Pools whose GPUs have enough memory for a job.

    Attributes:
        need: as measured; None: nothing was.
        pools: pool -> bytes of each of its GPUs, where that is known.
        types: pool -> its GPU type.
    """

    spec: JobSpec
    need: MemoryNeed | None
    pools: Mapping[str, float]
    types: Mapping[str, str]

    def least(self, pool: str, gpus: int) -> float:
        """Bytes of ``gpus`` on the pool's fullest GPU; 0: not known, infinite: the job has no such plan."""
        planned = self.spec.plans.get(self.types[pool], {}).get(gpus)
        if self.spec.plans and planned is None:
            return math.inf
        if self.spec.memory_per_gpu is not None:
            return self.spec.memory_per_gpu
        if planned is not None:
            return planned.memory_bytes
        return 0.0 if self.need is None else self.need.least(self.spec.positions(gpus))

    def fits(self, pool: str, gpus: int) -> bool:
        """True if a gang of ``gpus`` fits the GPUs of the pool; where something is not known, it does."""
        least = self.least(pool, gpus)
        return least < math.inf and least <= self.pools.get(pool, math.inf) * ROUNDING

    @property
    def limits(self) -> bool:
        """True if memory may keep the job from a pool at all."""
        spec = self.spec
        return bool(spec.plans) or (bool(self.pools) and bool(spec.memory_per_gpu is not None or self.need))

    def too_small(self, pools: Iterable[str], gpus: int) -> frozenset[str]:
        """Those of the pools that a gang of ``gpus`` does not fit."""
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
        elif self.spec.plans:
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


def gang_size(view: JobView, room: Room) -> int:
    """Most ranks that the job can use, one of its pools has room for, and its schedule supports.

    Never below ``minStages``, even if that exceeds the pools or the schedule; see :func:`admission_error`.
    """
    spec = view.spec
    assert spec is not None
    wanted = most_gpus(view)
    fewest, most = max(1, min(spec.smallest_gang, wanted)), min(wanted, room.most)
    suiting = [size for size in range(most, fewest - 1, -1) if spec.suits(size)]
    return next((size for size in suiting if room.holds(size)), suiting[-1] if suiting else fewest)


def gang_sizes(view: JobView, room: Room, allowed: Sequence[str], largest: int) -> tuple[int, ...]:
    """Sizes that the gang may have, fewest ranks first; what it has now is one of them.

    One size where it does not change, and where no pool can hold the smallest.
    ``largest``: by :func:`gang_size`.
    """
    spec, held = view.spec, view.held_placement
    assert spec is not None
    if held is not None and (not spec.grow or view.shrinking or view.leaving or held.parts):
        return (held.gpus,)
    if not spec.grow and not view.over_quota:
        return (largest,)
    fewest = max(1, min(spec.smallest_gang, largest))
    suiting = [size for size in range(fewest, largest + 1) if spec.suits(size)]
    if held is None or spec.plans:  # another size is another launch, wherever that is
        sizes = [size for size in suiting if room.holds(size)] or [largest if held is None else held.gpus]
    else:  # it shrinks no further than fits where it is
        sizes = [size for size in suiting if room.memory.fits(held.pool, size)] or [held.gpus]
    sizes = thinned(sizes[next(_runnable(spec, sizes, allowed), 0) :])
    if held is None or held.gpus in sizes:
        return tuple(sizes)
    if held.gpus < sizes[0]:
        return (held.gpus,)
    return tuple(sorted({*sizes, held.gpus}))


def _runnable(spec: JobSpec, sizes: Sequence[int], allowed: Sequence[str]) -> Iterator[int]:
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
    spec: JobSpec, pools: Sequence[NodePool], room: Room, allowed: Sequence[str], size: int
) -> Refusal | None:
    """Reason that no round of this policy can place the job; None: one can."""
    have = ", ".join(sorted({pool.gpu_type for pool in pools}))
    pipeline = spec.config.pipeline
    if spec.smallest_gang > spec.largest_gang:
        each = f" with {spec.stages_per_rank} stages each" if spec.stages_per_rank > 1 else ""
        each += f" in pods of gpusPerPod={spec.gpus_per_pod}" if spec.gpus_per_pod > 1 else ""
        return Refusal(
            JobReason.MISCONFIGURED,
            f"pipeline.minStages={pipeline.min_stages}{each} exceeds "
            f"model.layers={spec.layers}. To fix: lower minStages",
        )
    if not allowed:
        return Refusal(
            JobReason.NO_MATCHING_GPU_TYPE,
            f"gpuTypes allows {', '.join(spec.gpu_types)}; the node pools have {have}. "
            "To fix: add one of these to gpuTypes, or a pool to the ClusterPolicy",
        )
    if not spec.suits(size):
        own = pipeline.microbatches // spec.config.parallelism.data
        unsuited = SCHEDULES[pipeline.schedule].unsuited(spec.positions(size), own)
        return Refusal(
            JobReason.MISCONFIGURED,
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
            JobReason.EXCEEDS_CAPACITY,
            f"needs {size} GPUs of one pool{pods}; its pools {have}: {sizes}. "
            f"To fix: lower {lower}, or add nodes",
        )
    if not room.holds(size):
        return _exceeds_memory(spec, room, size)
    return None


def _exceeds_memory(spec: JobSpec, room: Room, size: int) -> Refusal:
    """No pool has both the GPUs and the memory; the message is about the largest gang that has the GPUs."""
    enough = [pool for pool in room.gpus if room.memory.fits(pool, size)]
    if enough:
        sizes = ", ".join(f"{pool} {room.gpus[pool]}" for pool in sorted(enough))
        return Refusal(
            JobReason.EXCEEDS_CAPACITY,
            f"needs {size} GPUs of one pool; its pools whose GPUs have the memory have: {sizes}. "
            "To fix: lower pipeline.minStages, or add nodes",
        )
    most = min(spec.largest_gang, room.most)
    widest = next((count for count in range(most, size - 1, -1) if spec.suits(count)), size)
    wide = [pool for pool, gpus in room.gpus.items() if gpus >= widest]
    return Refusal(JobReason.EXCEEDS_MEMORY, room.memory.shortfall(widest, tuple(room.gpus), wide))
