"""The part of ``TrainingJob.spec`` that the operator acts on, as a value."""

import dataclasses
import functools
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ballast_policies.allocation.planned_gangs import PlannedGang, TensorProfile
from ballast_policies.contract import Stage
from ballast_policies.contract.errors import ContractError, Problem
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import PipelineConfig, PlanConfig
from ballast_policies.contract.job.reshaping import BalanceBy
from ballast_policies.contract.limits import MOST_STEP
from ballast_policies.planning.launch import LaunchRanks, launch_partition
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.planning.stages import first_stages, stage_placement, stages_over
from ballast_policies.prices.egress import JobData

from ballast_operator.api.base import memory_bytes
from ballast_operator.api.costs import DataLocation, OnLimit, SpotUse
from ballast_operator.api.job_allocation import LaunchDegrees
from ballast_operator.api.node_pool import SharesGpu
from ballast_operator.api.read import InvalidObject, read_training_job
from ballast_operator.api.training_job import JobTopology, MixedPools, PlannerConfig, TrainingJobSpec
from ballast_operator.kube.kinds import Object
from ballast_operator.trainer_template import filled_in, trainer_template
from ballast_operator.views.clock import Time
from ballast_operator.views.node_constraints import NodeRequirements, read_requirements
from ballast_operator.views.nodes import PodNeed, pod_requests

MOST_SIZES = 32
"""Sizes of a gang that are weighed against each other; of more than these, some in between are left out."""

MOST_PLANNED = 500_000
"""Of a job that is planned, GPU types x sizes x profiles x the square of its layers: a second of CPU."""

MOST_CUT = 100_000_000
"""Of such a job, stages that are cut times the square of the layers: two more seconds."""


def thinned(sizes: Sequence[int], most: int = MOST_SIZES) -> list[int]:
    """At most ``most`` of the sizes, two or more: the fewest, the most, and others at equal ratios."""
    if len(sizes) <= most:
        return list(sizes)
    ratio = (sizes[-1] / sizes[0]) ** (1 / (most - 1))
    aims = [sizes[0] * ratio**step for step in range(most)]
    return sorted({min(sizes, key=lambda size: abs(size - aim)) for aim in aims})


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a job asks for; the rest is as :class:`TrainingJobSpec` has it.

    Attributes:
        config: the trainer's share of the spec.
        gpu_types: allowed types; empty: any.
        throughput: steps/s by GPU type and number of GPUs.
        template: PodTemplateSpec.
        memory_per_gpu: bytes that each GPU must have; None: as measured.
        grow: its gang may become smaller and larger while it trains.
        mixes_pools: its gang may run in several pools at once.
        shares_gpu: another job may run on its GPU.
        entity: the team; None: none.
        user: of the team; empty: not stated.
        active_deadline_seconds: how long it may hold GPUs, over all launches; None: no limit.
        data: what it reads, and from where; None: that costs nothing.
        topology: how near to each other its nodes are; None: as policies have it.
        plans: GPU type -> GPUs -> how a launch there divides the work; empty: as ``config`` says.
    """

    config: JobConfig
    gpu_types: tuple[str, ...]
    throughput: Mapping[str, Mapping[int, float]]
    weight: float
    suspend: bool
    backoff_limit: int
    template: Mapping[str, Any]
    memory_per_gpu: float | None = None
    grow: bool = True
    mixes_pools: bool = False
    shares_gpu: bool = False
    entity: str | None = None
    user: str = ""
    deadline: Time | None = None
    on_deadline_missed: OnLimit = OnLimit.CONTINUE
    active_deadline_seconds: int | None = None
    budget: float | None = None
    on_budget_exhausted: OnLimit = OnLimit.SUSPEND
    spot: SpotUse = SpotUse.ALLOW
    data: JobData | None = None
    topology: JobTopology | None = None
    plans: Mapping[str, Mapping[int, LaunchDegrees]] = dataclasses.field(default_factory=dict)

    def with_degrees(self, degrees: LaunchDegrees) -> "JobSpec":
        """The spec of a launch that divides the work so.

        Raises:
            ContractError: the trainer does not run the job with these degrees.
        """
        if degrees not in self._launched:
            config, stages = self.config, len(degrees.layers)
            config = config.replace(
                pipeline=config.pipeline.replace(
                    min_stages=stages, max_stages=stages, microbatches=degrees.microbatches
                ),
                parallelism=config.parallelism.replace(tensor=degrees.tensor, data=degrees.data),
                training=config.training.replace(recompute=degrees.recompute),
                plan=PlanConfig(layers=degrees.layers),
            )
            self._launched[degrees] = dataclasses.replace(self, config=config, plans={})
        return self._launched[degrees]

    def degrees_on(self, gpu_type: str, gpus: int) -> LaunchDegrees | None:
        """The plan of a launch on so many GPUs of a type; None: there is none."""
        return self.plans.get(gpu_type, {}).get(gpus)

    @functools.cached_property
    def _launched(self) -> dict[LaunchDegrees, "JobSpec"]:
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
    def holds_copies(self) -> bool:
        """Its ranks hold copies of each other's layers, and go on in place where one is lost."""
        return self.config.checkpoint.in_memory_every_steps > 0 and not self.is_script

    @property
    def own_command(self) -> tuple[Any, ...]:
        """(image, command, arguments) of the template's first container."""
        containers = (self.template.get("spec") or {}).get("containers") or [{}]
        return tuple(containers[0].get(field) for field in ("image", "command", "args"))

    @property
    def max_stages(self) -> int:
        """Most positions of the pipeline, each of ``ranks_per_position`` GPUs."""
        most = self.config.pipeline.max_stages
        assert most is not None, "required in a TrainingJob"
        return most

    @property
    def checkpoint_path(self) -> str | None:
        """Where checkpoints go, as the pods see it; None: a script that says nothing of it."""
        return self.config.checkpoint.path

    @property
    def layers(self) -> int | None:
        """Number of layers of the model; None: not known, or no model."""
        return self.config.model.layers if self.config.model is not None else None

    @property
    def planned_cut(self) -> Partition | None:
        """Where the plan cuts the layers; None: there is no plan."""
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
        """By stage, how many ranks hold it; empty: one each. They fix the size of the gang."""
        return self.config.pipeline.used_replicas

    def positions(self, ranks: int) -> int:
        """Positions of the pipeline of a gang with ``ranks`` ranks; with replicas, its stages."""
        return len(self.replicas) or max(1, ranks // self.ranks_per_position)

    @property
    def largest_gang(self) -> int:
        """Most ranks: ``max_stages`` positions, or as many as have the layers for their stages."""
        if self.replicas:
            return sum(self.replicas)
        if self.plans:
            return max(max(by_size) for by_size in self.plans.values())
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
        if self.plans:
            return min(min(by_size) for by_size in self.plans.values())
        step = self.ranks_together(self.gpus_per_pod)
        return -(-self.config.pipeline.min_stages * self.ranks_per_position // step) * step

    def ranks_together(self, per_pod: int) -> int:
        """Ranks that join or leave together: whole positions, in whole pods of ``per_pod`` ranks."""
        return math.lcm(self.ranks_per_position, per_pod)

    @property
    def tolerations(self) -> tuple[Mapping[str, Any], ...]:
        """Of the template's pods."""
        return tuple((self.template.get("spec") or {}).get("tolerations") or ())

    @functools.cached_property
    def node_requirements(self) -> NodeRequirements:
        """What the template asks of its nodes."""
        return read_requirements(self.template)

    @functools.cached_property
    def pod_need(self) -> PodNeed:
        """What its least gang asks of a node besides GPUs."""
        asks = pod_requests(self.template.get("spec") or {})
        pods = max(1, self.smallest_gang // self.gpus_per_pod)
        return PodNeed(asks=tuple(sorted(asks.items())), pods=pods, gpus_per_pod=self.gpus_per_pod)

    @functools.cached_property
    def node_signature(self) -> tuple[str, NodeRequirements, PodNeed]:
        """Equal for jobs that may be started on the same nodes."""
        return json.dumps(self.tolerations, sort_keys=True), self.node_requirements, self.pod_need

    @functools.cached_property
    def kind(self) -> str:
        """Equal for jobs that run alike: a model with its batches, or a command of an image."""
        if self.is_script:
            return _digest(["script", *self.own_command])[:16]
        pipeline = self.config_fields["pipeline"]
        batches = {
            key: pipeline.get(key) for key in ("globalBatchSize", "microbatches", "schedule", "stagesPerRank")
        }
        parts = [self.config_fields["model"], batches, self.config_fields.get("dynamics")]
        return _digest([*parts, {t: dict(of) for t, of in self.plans.items()}] if self.plans else parts)[:16]

    @functools.cached_property
    def variant(self) -> str:
        """As :attr:`kind`; jobs that state other speeds are told apart."""
        speeds = [[t, sorted(by_stages.items())] for t, by_stages in sorted(self.throughput.items())]
        return f"{self.kind}-{_digest(speeds)[:8]}" if speeds else self.kind

    def pipeline_form(self, positions: int = 1) -> PipelineForm:
        """What the memory of the job's pipeline depends on besides its layers."""
        pipeline = self.config.pipeline
        return PipelineForm(
            schedule=pipeline.schedule,
            positions=positions,
            microbatches=max(1, pipeline.microbatches // self.config.parallelism.data),
            stages_per_rank=self.stages_per_rank,
            replicas=self.replicas,
            optimizer=self.config.training.optimizer,
            averaged=self.config.parallelism.data > 1,
            gradient_shares=self.config.parallelism.gradient_shares,
            weights_shared=self.config.parallelism.weight_shares > 1,
        )

    def first_stages(
        self,
        ranks: int,
        layers: MeasuredLayers | None = None,
        memory: float | Sequence[float] | None = None,
        speeds: tuple[float, ...] = (),
    ) -> tuple[Stage, ...]:
        """The stages of a launch, those of the plan where there is one; empty leaves them to the trainer.

        That is where the number of layers is not known, or is below the number of stages.

        Args:
            ranks: of the gang.
            layers: as measured; None: even stages. Even are also those of a job that keeps its layers where
                they are or spreads something else than time, if they fit.
            memory: bytes of each GPU, or of each rank's; None: not known.
            speeds: relative speed of each rank's GPU; empty: alike.
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

    def suits(self, ranks: int) -> bool:
        """Whether a gang may have this many ranks.

        They fill whole pods and positions of the pipeline; some schedules take their microbatches in equal
        rounds.
        """
        if ranks % self.gpus_per_pod:
            return False
        if self.plans:
            return any(ranks in by_size for by_size in self.plans.values())
        if self.is_script:
            return True
        if self.replicas:
            return ranks == sum(self.replicas)
        positions, rest = divmod(ranks, self.ranks_per_position)
        pipeline, parallelism = self.config.pipeline, self.config.parallelism
        each = pipeline.microbatches // parallelism.data
        return not rest and SCHEDULES[pipeline.schedule].suits(positions, each)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def read_spec(item: Object) -> tuple[JobSpec | None, str]:
    """(spec, why it cannot be used): exactly one of them says something."""
    try:
        job = read_training_job({**item, "status": {}})
    except InvalidObject as error:
        return None, str(error)
    try:
        return _spec(job.spec), ""
    except ContractError as error:
        return None, "; ".join(str(problem.below("spec")) for problem in error.problems)


def spec_of_launch(plan_config: str, team: str) -> JobSpec:
    """What a job was launched with, as far as its plan's ConfigMap says; it never fails for good.

    Args:
        plan_config: the trainer's configuration, as JSON; where it cannot be read, the gang counts as
            a script's.
        team: that pays for it.
    """
    try:
        config = JobConfig.from_json(plan_config)
    except ContractError:
        config = JobConfig(total_steps=MOST_STEP, pipeline=PipelineConfig(max_stages=1))
    return JobSpec(
        config=config,
        gpu_types=(),
        throughput={},
        weight=1.0,
        suspend=False,
        backoff_limit=sys.maxsize,
        template={},
        entity=team or None,
    )


def _spec(spec: TrainingJobSpec) -> JobSpec:
    pipeline, parallelism = spec.config.pipeline, spec.config.parallelism
    throughput: dict[str, dict[int, float]] = {}
    for known in spec.throughput:
        gpus = sum(pipeline.used_replicas) or known.stages * parallelism.ranks_per_position
        throughput.setdefault(known.gpu_type, {})[gpus] = known.steps_per_second
    found = JobSpec(
        config=spec.config,
        gpu_types=spec.planned_types or spec.gpu_types,
        throughput=throughput,
        weight=spec.weight,
        suspend=spec.suspend,
        grow=spec.grow is not False,
        mixes_pools=spec.mixed_pools is MixedPools.ALLOWED,
        shares_gpu=spec.shares_gpu is SharesGpu.ALLOWED,
        memory_per_gpu=None if spec.memory_per_gpu is None else memory_bytes(spec.memory_per_gpu),
        backoff_limit=spec.backoff_limit,
        template=filled_in(spec.template.as_object(), trainer_template()),
        entity=spec.entity,
        user=spec.user or "",
        deadline=spec.deadline,
        on_deadline_missed=spec.on_deadline_missed,
        active_deadline_seconds=spec.active_deadline_seconds,
        budget=spec.budget,
        on_budget_exhausted=spec.on_budget_exhausted,
        spot=spec.spot,
        topology=spec.topology,
        data=None if spec.data_location is None else _data(spec.data_location, spec.config.total_steps),
    )
    return found if spec.planner is None else _planned(found, spec.planner)


def _planned(spec: JobSpec, planner: PlannerConfig) -> JobSpec:
    """The spec with a plan for each number of GPUs that the job may have of each type, if there is one.

    Speeds are as predicted where ``throughput`` does not state them: reports replace both.

    Raises:
        ContractError: nothing can be planned, or the trainer does not run what is planned.
    """
    config, pods = spec.config, spec.config.parallelism
    if pods.gpus_per_pod is None:
        most = max(profile.tensor for profile in planner.profiles)
        config = config.replace(parallelism=pods.replace(gpus_per_pod=most))
        spec = dataclasses.replace(spec, config=config)
    counts = [sum(layer.repeat for layer in profile.layers) for profile in planner.profiles]
    most = MOST_PLANNED // (len(planner.gpus) * len(counts) * max(counts) ** 2)
    if most < 2:
        reason = (
            f"{max(counts)} layers are too many for profiles: {len(counts)} and gpus: {len(planner.gpus)}"
        )
        raise ContractError(Problem("planner", f"{reason}. To fix: fewer of them, or state the degrees"))
    whole = range(spec.smallest_gang, spec.largest_gang + 1, spec.gpus_per_pod)
    sizes = tuple(thinned(whole, min(most, MOST_SIZES)))
    try:
        plans = _planned_degrees(planner, config.pipeline.global_batch_size, sizes)
    except ContractError as error:
        reason = "; ".join(problem.reason.partition(". To fix")[0] for problem in error.problems)
        fix = "profiles of one model; other minStages, maxStages or globalBatchSize"
        raise ContractError(Problem("planner", f"{reason}. To fix: {fix}")) from None
    if spec.layers not in (None, counts[0]):
        reason = f"it has {counts[0]} layers, model.layers is {spec.layers}. To fix: a profile of this model"
        raise ContractError(Problem("planner.profiles[0].layers", reason))
    if not plans:
        what = (
            "too many plans to try for the GPUs" if plans is None else "no plan fits the memory of its GPUs"
        )
        reason = f"{what}, {sizes[0]} to {sizes[-1]} of a type. To fix: other minStages and maxStages"
        raise ContractError(Problem("planner", reason))
    for gpu_type, by_size in plans.items():
        for gpus, degrees in by_size.items():
            try:
                spec.with_degrees(degrees)
            except ContractError as error:
                where = f"planned on {gpus} x {gpu_type}: {degrees}"
                reason = f"{where}; the trainer refuses it: {error}"
                raise ContractError(Problem("planner", reason)) from None
    stated = spec.throughput
    throughput = {
        gpu_type: {
            gpus: stated.get(gpu_type, {}).get(gpus, 1 / by_size[gpus].step_seconds)
            if gpus in by_size
            else 0.0
            for gpus in sizes
        }
        for gpu_type, by_size in plans.items()
    }
    return dataclasses.replace(spec, gpu_types=tuple(plans), throughput=throughput, plans=plans)


@functools.lru_cache(maxsize=256)
def _planned_degrees(
    planner: PlannerConfig, batch_size: int, sizes: tuple[int, ...]
) -> Mapping[str, Mapping[int, LaunchDegrees]] | None:
    """GPU type -> GPUs -> degrees, those without a plan left out; None: too many are to be tried.

    Kept for the next edit of the job, and for others that differ elsewhere: it may take seconds.

    Raises:
        ContractError: nothing can be planned.
    """
    gang = PlannedGang(
        profiles=tuple(
            TensorProfile(tensor=each.tensor, microbatch_size=each.microbatch_size, layers=each.layers)
            for each in planner.profiles
        ),
        speeds={gpu.gpu_type: gpu.speed for gpu in planner.gpus},
        batch_size=batch_size,
        sizes=sizes,
        memory_bytes={gpu.gpu_type: gpu.memory_bytes for gpu in planner.gpus},
        bandwidth=planner.bandwidth,
    )
    listed = gang.listed(dict.fromkeys(gang.speeds, sizes[-1]), MOST_CUT)
    if listed is None:
        return None
    plans: dict[str, dict[int, LaunchDegrees]] = {}
    for one in listed:
        (gpu_type, gpus), found = *one.gpus.items(), gang.plan_of(one)
        plans.setdefault(gpu_type, {})[gpus] = LaunchDegrees(
            tensor=found.degrees.tensor,
            data=found.degrees.data,
            microbatches=found.degrees.microbatches * found.degrees.data,
            recompute=found.degrees.recompute,
            layers=tuple(np.diff(found.cut.bounds).tolist()),
            step_seconds=found.seconds,
            memory_bytes=found.memory_bytes,
        )
    return plans


def _data(data: DataLocation, total_steps: int) -> JobData:
    each = 0.0
    if data.read_per_step is not None:
        each = memory_bytes(data.read_per_step)
    elif data.read_in_all is not None:
        each = memory_bytes(data.read_in_all) / max(1, total_steps)
    size = None if data.checkpoint_size is None else memory_bytes(data.checkpoint_size)
    return JobData(region=data.region, bytes_per_step=each, checkpoint_bytes=size)
