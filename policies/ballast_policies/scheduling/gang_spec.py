"""Request of a job for its gang, and the sizes that this leaves it."""

import abc
import bisect
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import BalanceBy
from ballast_policies.contract.messages import Stage
from ballast_policies.planning.launch import (
    LaunchedPipeline,
    LaunchRanks,
    first_stages,
    launch_partition,
    stage_placement,
    stages_over,
)
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.rounds.gangs import PlannedSpeed, TypesByRank

MOST_SIZES = 32
"""Sizes of a gang that are weighed against each other; of more than these, some in between are left out."""

JobKey = tuple[str, str]
"""(namespace, name) of a job."""


def job_id(key: JobKey) -> str:
    """``namespace/name``: the name of a job in problems, rounds and logs."""
    return f"{key[0]}/{key[1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GangSpec(abc.ABC):
    """A job's configuration, with what else is stated of its gangs.

    Attributes:
        config: by which the next launch runs.
        gpu_types: allowed types; empty: any.
        throughput: steps/s by GPU type and number of GPUs, as stated or planned.
        spread: (GPU type, GPUs) -> nodes -> steps/s, as stated; of 1: on fewer nodes than the others.
        gpu_speeds: GPU type -> its speed as the planner has it; empty: it does not plan.
    """

    config: JobConfig
    gpu_types: tuple[str, ...] = ()
    throughput: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)
    spread: Mapping[tuple[str, int], Mapping[int, float]] = dataclasses.field(default_factory=dict)
    gpu_speeds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    @abc.abstractmethod
    def planned_speeds(self) -> Mapping[TypesByRank, tuple[PlannedSpeed, ...]]:
        """GPUs that it may have, the fastest first, and their plans; none: with its own plan. Empty: any."""

    @property
    @abc.abstractmethod
    def grow(self) -> bool:
        """Its gang may become smaller and larger while it trains."""

    @property
    @abc.abstractmethod
    def mixes_pools(self) -> bool:
        """Its gang may run in several pools at once."""

    @property
    @abc.abstractmethod
    def memory_per_gpu(self) -> float | None:
        """Bytes that each GPU must have; None: as measured."""

    @property
    @abc.abstractmethod
    def own_command(self) -> tuple[Any, ...]:
        """(image, command, arguments) of its pods."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """Equal for jobs that run alike: a model with its batches, or a command of an image."""

    @functools.cached_property
    def variant(self) -> str:
        """Kind as :attr:`kind`; jobs that state other speeds are told apart."""
        speeds: list[Any] = [[t, sorted(known.items())] for t, known in sorted(self.throughput.items())]
        speeds += [[at, sorted(by_nodes.items())] for at, by_nodes in sorted(self.spread.items())]
        return f"{self.kind}-{digest(speeds)[:8]}" if speeds else self.kind

    @functools.cached_property
    def on_nodes(self) -> dict[tuple[int, ...], Self]:
        """Nodes of each size of ``spread`` -> the spec as they have it, with all that it works out later."""
        return {}

    @functools.cached_property
    def config_fields(self) -> Mapping[str, Any]:
        """The configuration as JSON has it."""
        return self.config.to_dict()

    @property
    def is_script(self) -> bool:
        """It runs its template's own command: the trainer's plans, proposals and shrinks do not reach it."""
        return self.config.is_script

    @property
    def max_stages(self) -> int:
        """Most positions of the pipeline, each of ``ranks_per_position`` GPUs."""
        most = self.config.pipeline.max_stages
        assert most is not None, "required in a TrainingJob"
        return most

    @property
    def layers(self) -> int | None:
        """Number of layers of the model; None: not known, or no model."""
        return self.config.model.layers if self.config.model is not None else None

    @property
    def planned_cut(self) -> Partition | None:
        """Partition of the layers by the plan; None: there is no plan."""
        plan = self.config.plan
        return None if plan is None else Partition(bounds=plan.bounds)

    @property
    def planned_gpus(self) -> tuple[tuple[str, int], ...]:
        """The GPU types of a plan of several, in the order of the ranks, and GPUs of each; else empty."""
        plan = self.config.plan
        each = () if plan is None or len(plan.gpus) < 2 else plan.gpus
        return tuple((of_type.gpu_type, of_type.stages * self.ranks_per_position) for of_type in each)

    @property
    def stages_per_rank(self) -> int:
        """Stages of the model that a rank holds, where there are several ranks."""
        pipeline = self.config.pipeline
        return SCHEDULES[pipeline.schedule].stages_on_a_rank(pipeline.stages_per_rank)

    @property
    def ranks_per_position(self) -> int:
        """Tensor- and data-parallel ranks at each position of the pipeline."""
        return self.config.parallelism.ranks_per_position

    @property
    def gpus_per_pod(self) -> int:
        """GPUs of each pod of the next launch, one for each of its ranks."""
        return self.config.parallelism.ranks_per_pod

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of ranks that hold each stage; empty: one each. They fix the size of the gang."""
        return self.config.pipeline.used_replicas

    def positions(self, ranks: int) -> int:
        """Positions of the pipeline of a gang with ``ranks`` ranks; with replicas, its stages."""
        return len(self.replicas) or max(1, ranks // self.ranks_per_position)

    @functools.cached_property
    def is_planned(self) -> bool:
        """True if a launch divides the work as planned for the GPUs that it gets."""
        return any(self.planned_speeds.values())

    def planned(self, gpu_type: str, gpus: int) -> PlannedSpeed | None:
        """The plan for GPUs of one type; None: there is none."""
        return next(iter(self.planned_speeds.get(((gpu_type, gpus),), ())), None)

    @functools.cached_property
    def _planned_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({sum(gpus for _, gpus in each) for each in self.planned_speeds}))

    @property
    def largest_gang(self) -> int:
        """Most ranks: ``max_stages`` positions, or as many as have the layers for their stages."""
        if self.replicas:
            return sum(self.replicas)
        if self.is_planned:
            return self._planned_sizes[-1]
        positions = self.max_stages
        if self.layers is not None:
            # A position alone has the whole model as one stage.
            positions = min(positions, max(1, self.layers // self.stages_per_rank))
        return positions * self.ranks_per_position

    @property
    def smallest_gang(self) -> int:
        """Fewest ranks that the job may be launched with: ``minStages`` positions, in whole pods."""
        if self.replicas:
            return sum(self.replicas)
        if self.is_planned:
            return self._planned_sizes[0]
        step = self.ranks_together(self.gpus_per_pod)
        return -(-self.config.pipeline.min_stages * self.ranks_per_position // step) * step

    def ranks_together(self, per_pod: int) -> int:
        """Ranks that join or leave together: whole positions, in whole pods of ``per_pod`` ranks."""
        return math.lcm(self.ranks_per_position, per_pod)

    def pipeline_form(self, positions: int = 1) -> PipelineForm:
        """Properties of the job's pipeline that its memory depends on, besides its layers."""
        return PipelineForm.of(self.config, positions)

    def first_stages(
        self,
        ranks: int,
        layers: MeasuredLayers | None = None,
        memory: float | Sequence[float] | None = None,
        speeds: tuple[float, ...] = (),
    ) -> tuple[Stage, ...]:
        """The stages of a launch, those of the plan where there is one; empty leaves them to the trainer.

        That is where the number of layers is not known, or is below the number of stages. Where ``layers``
        were not measured the stages are even, and those of a job that keeps its layers where they are or
        spreads something else than time, if they fit. ``memory``: bytes of each GPU, or of each rank's; None:
        not known. ``speeds``: of each rank's GPU, relative; empty: alike.
        """
        placement = stage_placement(
            self.config.pipeline.schedule,
            ranks=ranks // self.ranks_per_position,
            stages_per_rank=self.stages_per_rank,
            replicas=self.replicas,
        )
        planned = self.planned_cut
        if planned is not None and planned.ranks == len(placement):
            return stages_over(planned, placement)
        if self.layers is None or self.layers < len(placement):
            return ()
        even = first_stages(self.layers, placement, self.replicas)
        if layers is None and not speeds:
            return even
        layers = layers or MeasuredLayers()
        if not self.config.rebalance.enabled or self.config.rebalance.by is not BalanceBy.TIME:
            layers = dataclasses.replace(layers, seconds=())
        limit = self.config.rebalance.memory_bytes
        each = (
            memory[:: self.ranks_per_position]
            if isinstance(memory, Sequence)
            else (memory,) * (ranks // self.ranks_per_position)
        )
        has = [min((known for known in (one, limit) if known is not None), default=None) for one in each]
        known_ranks = LaunchRanks(
            placement=placement,
            memory=() if None in has else tuple(float(one) for one in has if one is not None),
            speeds=speeds[:: self.ranks_per_position],
        )
        gain = self.config.rebalance.min_gain
        return launch_partition(even, layers, self.pipeline_form(), known_ranks, min_gain=gain)

    def launched_pipeline(self, layers: MeasuredLayers | None) -> LaunchedPipeline:
        """Layers from which the stages of the next launch are cut, as in :meth:`first_stages`."""
        known, rebalance = layers or MeasuredLayers(), self.config.rebalance
        if not rebalance.enabled or rebalance.by is not BalanceBy.TIME:
            known = dataclasses.replace(known, seconds=())
        if self.memory_per_gpu is not None:
            known = dataclasses.replace(known, held_bytes=(), activation_bytes=())
        return LaunchedPipeline(
            layers=known,
            count=self.layers or 1,
            form=self.pipeline_form(),
            ranks_per_position=1 if self.is_planned else self.ranks_per_position,
            cut=self.planned_cut,
        )

    def suits(self, ranks: int) -> bool:
        """True if a gang may have this many ranks.

        They fill whole pods and positions of the pipeline; some schedules take their microbatches in equal
        rounds.
        """
        if ranks % self.gpus_per_pod:
            return False
        if self.is_planned:
            return ranks in self._planned_sizes
        if self.is_script:
            return True
        if self.replicas:
            return ranks == sum(self.replicas)
        positions, rest = divmod(ranks, self.ranks_per_position)
        pipeline, parallelism = self.config.pipeline, self.config.parallelism
        each = pipeline.microbatches // parallelism.data
        return not rest and SCHEDULES[pipeline.schedule].suits(positions, each)


def digest(parts: list[Any]) -> str:
    """A name of the values, equal for equal ones."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def thinned(sizes: Sequence[int], most: int = MOST_SIZES) -> list[int]:
    """Sizes, at most ``most`` (two or more) of them: the fewest, the most, and others at equal ratios."""
    if len(sizes) <= most:
        return list(sizes)
    ratio = (sizes[-1] / sizes[0]) ** (1 / (most - 1))
    aims = [sizes[0] * ratio**step for step in range(most)]
    around = ((aim, bisect.bisect_left(sizes, aim)) for aim in aims)
    return sorted(
        {min(sizes[max(0, at - 1) : at + 1], key=lambda size: abs(size - aim)) for aim, at in around}
    )
