"""The plan of a whole pipeline before it runs: GPU order, stages, schedule, and the predicted step.

``ballast plan`` prints it.  Seconds are per microbatch unless said otherwise.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ballast_policies.planning.balancers.exact import partition_by_rank
from ballast_policies.planning.balancers.network import network_aware_partition
from ballast_policies.planning.balancers.several_stages import refine
from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.memory.rank_bytes import LayerSums, rank_bytes
from ballast_policies.planning.memory.stage_bytes import ROUNDING, StageBytes
from ballast_policies.planning.partition import Partition, PlanningError, even_partition, imbalance, sums_of
from ballast_policies.planning.profile import GpuKind, LayerProfile
from ballast_policies.planning.rank_capacity import TakenBytes, taken_by_sums
from ballast_policies.planning.schedules.costs import StageCosts, stage_costs
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE, build_schedule, stages_of
from ballast_policies.planning.schedules.schedule import Schedule
from ballast_policies.planning.schedules.simulate import BubbleSplit, Trace, simulate, split_bubble
from ballast_policies.planning.schedules.validate import ScheduleFacts, validate

_MOST_ACTIONS = 150_000
"""Actions simulated while a partition is refined: about a second."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """Layers ``first_layer`` to ``end_layer - 1`` on ``rank``.

    ``seconds`` per step on its GPU; ``bytes`` of its rank, with all its stages, at the fullest moment.
    """

    stage: int
    rank: int
    gpu_type: str
    first_layer: int
    end_layer: int
    seconds: float
    bytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The plan and its prediction.

    Attributes:
        stages: by stage.
        schedule: the order of actions.
        facts: microbatches in flight, versions held.
        costs: what was simulated.
        trace: the simulated step.
        imbalance: largest load of a rank over the mean load, less 1.
        bubble: idle time, split.
        even_step_seconds: of the same layers to each stage, same ranks, same schedule.
    """

    stages: tuple[PlannedStage, ...]
    schedule: Schedule
    facts: ScheduleFacts
    costs: StageCosts
    trace: Trace
    imbalance: float
    bubble: BubbleSplit
    even_step_seconds: float

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step (of all its microbatches; without the optimizer)."""
        return self.trace.makespan

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """GPU types by rank."""
        by_rank = {stage.rank: stage.gpu_type for stage in self.stages}
        return tuple(by_rank[rank] for rank in range(self.schedule.ranks))


def plan_pipeline(
    profile: LayerProfile,
    gpus: Sequence[GpuKind],
    *,
    microbatches: int,
    schedule: str = "1F1B",
    chunks: int = 1,
    bandwidth: float | None = None,
) -> PipelinePlan:
    """The plan with the shortest simulated step that was found.

    GPUs are ordered and layers cut so that the slowest rank is fastest; with a bandwidth also so
    that slow links cost least; then boundaries shift while the simulated step gets shorter.

    Args:
        profile: the layers.
        gpus: all of them are used, one rank each.
        microbatches: per step.
        schedule: a name of ``schedules.SCHEDULES``.
        chunks: stages a rank, where the schedule leaves it open.
        bandwidth: bytes/s between ranks; None: transfers are free.

    Raises:
        PlanningError: fewer layers than stages, or nothing fits the memory.
        ScheduleError: the schedule is unknown or does not suit the counts.
    """
    ranks = sum(kind.count for kind in gpus)
    if ranks == 1:
        # One rank alone has the whole model as one stage, whatever the schedule.
        schedule, chunks = DEFAULT_SCHEDULE, 1
    built = build_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)
    stages = stages_of(schedule, ranks, chunks)
    form = PipelineForm(
        schedule=schedule, positions=ranks, microbatches=microbatches, stages_per_rank=stages // ranks
    )
    problem = _Problem(profile, tuple(gpus), built, validate(built), bandwidth, form)
    if profile.layers < stages:
        raise PlanningError(
            f"{profile.layers} layers cannot be cut into {stages} stages ({schedule} on {ranks} ranks). "
            "To fix: use fewer ranks or chunks"
        )
    types = problem.arranged_types()
    best = problem.best_partition(types)
    costs = problem.costs(best, types)
    trace = simulate(built, costs)
    even = problem.costs(even_partition(profile.layers, stages), types)
    return PipelinePlan(
        stages=problem.planned_stages(best, types),
        schedule=built,
        facts=problem.facts,
        costs=costs,
        trace=trace,
        imbalance=imbalance(trace.busy),
        bubble=split_bubble(built, costs),
        even_step_seconds=simulate(built, even).makespan,
    )


@dataclasses.dataclass(frozen=True)
class _Problem:
    profile: LayerProfile
    gpus: tuple[GpuKind, ...]
    schedule: Schedule
    facts: ScheduleFacts
    bandwidth: float | None
    form: PipelineForm

    def arranged_types(self) -> tuple[str, ...]:
        """GPU types by rank; decided for one stage a rank, also where there are more."""
        seconds = np.add(self.profile.forward_seconds, self.profile.backward_seconds)
        limits = self._one_stage_a_rank and any(kind.memory_bytes is not None for kind in self.gpus)
        return arrange_ranks(
            {kind.gpu_type: (seconds / kind.speed).tolist() for kind in self.gpus},
            {kind.gpu_type: kind.count for kind in self.gpus},
            taken=self._stage_bytes() if limits else None,
            memory_by_type={k.gpu_type: self._memory(k.gpu_type) for k in self.gpus} if limits else None,
        ).gpu_types

    def best_partition(self, types: Sequence[str]) -> Partition:
        speeds = self._stage_speeds(types)
        seconds = np.add(self.profile.forward_seconds, self.profile.backward_seconds)
        matrix = seconds[None, :] / speeds[:, None]
        try:
            start = partition_by_rank(
                matrix, taken=self._stage_bytes(), memory=[self._stage_memory(types, s) for s in self._all]
            )
        except PlanningError:
            if self._one_stage_a_rank:
                raise
            # Stages that share a rank may fit its memory though each does not fit its part.
            start = self._emptiest(types)
        starts = [start, even_partition(self.profile.layers, self.schedule.stages)]
        if self.bandwidth is not None:
            aware = network_aware_partition(
                seconds.tolist(),
                self.schedule.stages,
                boundary_seconds=self._boundary_seconds(),
                speeds=speeds.tolist(),
            )
            starts.append(aware)
        if not any(self._fits(each, types) for each in starts):
            # What is there for a moment is too much for them.
            starts.append(self._emptiest(types))
        actions = sum(len(row) for row in self.schedule.actions)

        def step(partition: Partition) -> float:
            if not self._fits(partition, types):
                return float("inf")
            return simulate(self.schedule, self.costs(partition, types)).makespan

        return refine(min(starts, key=step), step, most_evaluations=max(2, _MOST_ACTIONS // actions))

    def costs(self, partition: Partition, types: Sequence[str]) -> StageCosts:
        speed = {kind.gpu_type: kind.speed for kind in self.gpus}
        return stage_costs(
            partition,
            forward_seconds=self.profile.forward_seconds,
            backward_seconds=self.profile.backward_seconds,
            microbatches=1,
            boundary_seconds=() if self.bandwidth is None else self._boundary_seconds(),
            speeds=[speed[gpu_type] for gpu_type in types],
        )

    def planned_stages(self, partition: Partition, types: Sequence[str]) -> tuple[PlannedStage, ...]:
        seconds = np.add(self.profile.forward_seconds, self.profile.backward_seconds)
        loads = partition.loads(seconds.tolist(), self._stage_speeds(types).tolist())
        loads = loads * self.schedule.microbatches
        held = self._held(partition)
        return tuple(
            PlannedStage(
                stage=stage,
                rank=self._rank(stage),
                gpu_type=types[self._rank(stage)],
                first_layer=partition.bounds[stage],
                end_layer=partition.bounds[stage + 1],
                seconds=float(loads[stage]),
                bytes=float(held[stage]),
            )
            for stage in self._all
        )

    @property
    def _all(self) -> range:
        return range(self.schedule.stages)

    @property
    def _one_stage_a_rank(self) -> bool:
        return self.schedule.stages == self.schedule.ranks

    def _rank(self, stage: int) -> int:
        return self.schedule.stage_ranks[stage][0]

    def _memory(self, gpu_type: str) -> float:
        limits = [kind.memory_bytes for kind in self.gpus if kind.gpu_type == gpu_type]
        return float("inf") if limits[0] is None else limits[0]

    def _stage_memory(self, types: Sequence[str], stage: int) -> float:
        """A rank's memory, shared evenly by its stages."""
        own = self.schedule.stages // self.schedule.ranks
        return self._memory(types[self._rank(stage)]) / own

    def _stage_speeds(self, types: Sequence[str]) -> np.ndarray:
        speed = {kind.gpu_type: kind.speed for kind in self.gpus}
        return np.array([speed[types[self._rank(stage)]] for stage in self._all])

    @functools.cached_property
    def _sums(self) -> LayerSums:
        return self.profile.sums

    @functools.cached_property
    def _one_stage(self) -> StageBytes:
        return StageBytes(self._sums, self.form)

    def _stage_bytes(self) -> TakenBytes:
        """Bytes that layers take as a stage; of several stages a rank, without temporary ones."""
        if self._one_stage_a_rank:
            return self._one_stage.taken
        held = np.asarray(self.profile.held_bytes, dtype=float)
        kept = np.asarray(self.profile.activation_bytes, dtype=float)
        weights = np.asarray(self.profile.weight_bytes, dtype=float)
        flying, versions = np.array(self.facts.stage_in_flight), np.array(self.facts.versions_held)
        rows = held + np.outer(versions - 1, weights) + np.outer(flying, kept)
        return taken_by_sums(sums_of(rows))

    def _held(self, partition: Partition) -> list[float]:
        """Bytes of each stage's rank."""
        if self._one_stage_a_rank:
            found: list[float] = self._one_stage.of_cut(partition).tolist()
            return found
        ranks = rank_bytes(partition, self.schedule, self.facts, self._sums, self.form)
        return [ranks[self._rank(stage)].total for stage in self._all]

    def _fullness(self, partition: Partition, types: Sequence[str]) -> float:
        """The largest part of a rank's memory that is taken."""
        held = self._held(partition)
        return max(held[stage] / self._memory(types[self._rank(stage)]) for stage in self._all)

    def _fits(self, partition: Partition, types: Sequence[str]) -> bool:
        return self._fullness(partition, types) <= ROUNDING

    def _emptiest(self, types: Sequence[str]) -> Partition:
        even = even_partition(self.profile.layers, self.schedule.stages)
        found = refine(even, lambda partition: self._fullness(partition, types))
        if (part := self._fullness(found, types)) > ROUNDING:
            need = f"the fullest GPU would need {part:.3g} times its memory"
            raise PlanningError(f"layers do not fit: {need}. To fix: more GPUs or memory, or fewer chunks")
        return found

    def _boundary_seconds(self) -> list[float]:
        assert self.bandwidth is not None
        return [size / self.bandwidth for size in self.profile.output_bytes[:-1]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Ranks in pipeline order, and the layers of each.

    Attributes:
        gpu_types: by rank.
        partition: layers to ranks.
        loads: seconds per step of each rank.
    """

    gpu_types: tuple[str, ...]
    partition: Partition
    loads: tuple[float, ...]


def arrange_ranks(
    seconds_by_type: Mapping[str, Sequence[float]],
    gpus: Mapping[str, int],
    *,
    taken: TakenBytes | None = None,
    memory_by_type: Mapping[str, float] | None = None,
    most_orders: int = 2000,
) -> Arrangement:
    """The order of GPU types along the pipeline, and the cuts, with the smallest largest load.

    A layer may be 3 x faster on one type and 1.2 x on another: a slow GPU belongs where layers lose least.
    GPUs of a type follow each other, as the ranks of a gang in several pools do. All orders are tried where
    there are at most ``most_orders``; beyond, swaps of two types, best first, until none helps.

    Args:
        seconds_by_type: GPU type -> seconds per step of each layer on it, shape (L,).
        gpus: GPU type -> how many ranks of it.
        taken: bytes of layers at a place of the pipeline.
        memory_by_type: GPU type -> bytes that one holds; needs ``taken``.
        most_orders: limit of the exhaustive search.

    Raises:
        PlanningError: no order was found whose memory is enough.
    """

    def arranged(turns: Sequence[str]) -> Arrangement | None:
        order = [gpu_type for gpu_type in turns for _ in range(gpus[gpu_type])]
        matrix = np.array([seconds_by_type[gpu_type] for gpu_type in order], dtype=float)
        memory = None if memory_by_type is None else [memory_by_type[gpu_type] for gpu_type in order]
        try:
            partition = partition_by_rank(matrix, taken=taken, memory=memory)
        except PlanningError:
            return None
        loads = [matrix[rank, a:b].sum() for rank, (a, b) in enumerate(itertools.pairwise(partition.bounds))]
        return Arrangement(gpu_types=tuple(order), partition=partition, loads=tuple(map(float, loads)))

    starts = sorted(gpus), sorted(gpus, key=lambda gpu_type: sum(seconds_by_type[gpu_type]))
    tried = [
        arranged(order) for order in itertools.islice(itertools.permutations(starts[0]), most_orders + 1)
    ]
    if len(tried) > most_orders:
        tried = _swapped([*starts, *(start[::-1] for start in starts)], arranged)
    fitting = [arrangement for arrangement in tried if arrangement is not None]
    if not fitting:
        layers = len(seconds_by_type[starts[0][0]])
        raise PlanningError(
            f"{layers} layers do not fit the memory of {sum(gpus.values())} ranks in any order tried: "
            "use more ranks, fewer microbatches in flight, or ranks with more memory"
        )
    return min(fitting, key=_badness)


def _badness(arrangement: Arrangement | None) -> tuple[float, ...]:
    """The largest load, then the sum (which fills the pipeline), then a unique order; worst: no fit."""
    if arrangement is None:
        return (float("inf"),)
    return (max(arrangement.loads), sum(arrangement.loads), *arrangement.loads)


def _swapped(
    starts: Sequence[Sequence[str]], arranged: Callable[[Sequence[str]], Arrangement | None]
) -> list[Arrangement | None]:
    """Best arrangement that swapping two types reaches from each start."""
    found = []
    for start in starts:
        order, best = tuple(start), arranged(start)
        while True:
            swaps = {
                (*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :])
                for i in range(len(order))
                for j in range(i + 1, len(order))
            }
            scored = [(arranged(swap), swap) for swap in sorted(swaps)]
            better, next_order = min(scored, key=lambda pair: _badness(pair[0]), default=(None, order))
            if _badness(better) >= _badness(best):
                break
            order, best = next_order, better
        found.append(best)
    return found
