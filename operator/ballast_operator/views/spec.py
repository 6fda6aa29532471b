"""The part of ``TrainingJob.spec`` that the operator acts on, as a value."""

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ballast_policies.contract.errors import ContractError, Problem
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.job.pipeline import PipelineConfig, PlanConfig
from ballast_policies.contract.limits import MOST_STEP
from ballast_policies.planning.partition import even_partition
from ballast_policies.planning.planners.cost_model import RECOMPUTED
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES, trained_schedules
from ballast_policies.prices.egress import JobData
from ballast_policies.rounds.gangs import PlannedSpeed, TypesByRank, types_by_rank
from ballast_policies.rounds.values import PoolPart
from ballast_policies.scheduling.gang_spec import GangSpec, digest

from ballast_operator.api.base import memory_bytes
from ballast_operator.api.job_allocation import JobAllocation, LaunchDegrees
from ballast_operator.api.read import InvalidObject, read_job_status, read_training_job
from ballast_operator.api.template import filled_in, trainer_template
from ballast_operator.api.training_job import MixedPools, PlannerConfig, TrainingJobSpec
from ballast_operator.api.training_job_status import MeasuredOnType
from ballast_operator.kube.kinds import Object
from ballast_operator.views.node_constraints import NodeRequirements, read_requirements
from ballast_operator.views.nodes import PodNeed, pod_requests
from ballast_operator.views.planned_degrees import DegreesQuestion, PlannedLaunch, candidates, planned_degrees

LEAST_STEP_SECONDS = 1e-15
"""Least seconds of a plan's step; shorter ones are none."""

BEING_PLANNED = "its degrees are being planned"
"""Reason that a spec cannot be used yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec(GangSpec):
    """Request of a job, and how a launch divides its work.

    Attributes:
        asked: as its user wrote it.
        template: PodTemplateSpec, with what the administrator fills in.
        plans: GPU type -> GPUs -> how a launch there divides the work; empty: as ``config`` says.
        mixes: GPUs of several types -> how a launch there does, in several pools.
        in_parts: GPUs of a type -> how a launch on those of several pools may, the fastest first.
        question: what the plans answer; None: there are none, or one that runs.
    """

    asked: TrainingJobSpec
    template: Mapping[str, Any]
    plans: Mapping[str, Mapping[int, LaunchDegrees]] = dataclasses.field(default_factory=dict)
    mixes: Mapping[TypesByRank, PlannedLaunch] = dataclasses.field(default_factory=dict)
    in_parts: Mapping[TypesByRank, tuple[PlannedLaunch, ...]] = dataclasses.field(default_factory=dict)
    question: DegreesQuestion | None = None

    @functools.cached_property
    def grow(self) -> bool:
        """Its gang may become smaller and larger while it trains."""
        return self.asked.grow is not False

    @functools.cached_property
    def mixes_pools(self) -> bool:
        """Its gang may run in several pools at once."""
        return self.asked.mixed_pools is MixedPools.ALLOWED

    @functools.cached_property
    def memory_per_gpu(self) -> float | None:
        """Bytes that each GPU must have; None: as measured."""
        stated = self.asked.memory_per_gpu
        return None if stated is None else memory_bytes(stated)

    @functools.cached_property
    def planned_as(self) -> str:
        """Equal for specs of equal planners whose layers take as long."""
        return self._digest_with(self.asked.planner)

    @functools.cached_property
    def measured_as(self) -> str:
        """Equal for specs whose layers take as long, and with which the planner states the same of them."""
        planner = self.asked.planner
        return self._digest_with(None if planner is None else planner.model_copy(update={"trial": None}))

    def _digest_with(self, planner: PlannerConfig | None) -> str:
        config = self.config
        parts = (planner, config.model, *config.dynamics)
        stated = [None if part is None else part.to_dict() for part in parts]
        return digest([*stated, config.training.precision])[:16]

    def is_planned_by(self, measured: Sequence[MeasuredOnType]) -> bool:
        """True if its plans are from what was measured of its layers."""
        return self.question is not None and self.question.measured == self.measured_alike(measured)

    def measured_alike(self, measured: Sequence[MeasuredOnType]) -> tuple[MeasuredOnType, ...]:
        """Measurements that count: made with this planner, and with each layer's."""
        planner = self.asked.planner
        if planner is None:
            return ()
        types, degrees = {gpu.gpu_type for gpu in planner.gpus}, {one.tensor for one in planner.profiles}
        layers = sum(layer.repeat for layer in planner.profiles[0].layers)
        return tuple(
            one
            for one in measured
            if one.of == self.measured_as and one.gpu_type in types and one.tensor in degrees
            if len(one.ratios) == layers
        )

    def with_planner(self, planner: PlannerConfig) -> "JobSpec":
        """The planned spec with an equal ``planner``, for several to share: it is most of what each holds."""
        if self.question is None or self.question.planner is planner:
            return self
        asked = self.asked.model_copy(update={"planner": planner})
        return dataclasses.replace(
            self, asked=asked, question=dataclasses.replace(self.question, planner=planner)
        )

    @functools.cached_property
    def data(self) -> JobData | None:
        """Data that it reads, and its region; None: that costs nothing."""
        stated = self.asked.data_location
        return None if stated is None else stated.read_in(self.config.total_steps)

    def with_degrees(self, degrees: LaunchDegrees) -> "JobSpec":
        """The spec of a launch that divides the work so. Raises ContractError: no trainer runs that."""
        if degrees not in self._launched:
            config, ranks = self.config, degrees.positions
            config = config.replace(
                pipeline=config.pipeline.replace(
                    min_stages=ranks,
                    max_stages=ranks,
                    microbatches=degrees.microbatches,
                    schedule=degrees.schedule,
                ),
                parallelism=config.parallelism.replace(
                    tensor=degrees.tensor,
                    data=degrees.data,
                    zero_stage=config.parallelism.zero_stage if degrees.data > 1 else 0,
                ),
                training=config.training.replace(
                    recompute=degrees.recompute, recompute_every=degrees.recompute_every
                ),
                plan=PlanConfig(layers=degrees.layers),
            )
            launched = dataclasses.replace(self, config=config, plans={}, mixes={}, in_parts={})
            self._launched[degrees] = launched
        return self._launched[degrees]

    def degrees_on(self, parts: Sequence[PoolPart]) -> LaunchDegrees | None:
        """The plan of a launch on GPUs of these pools, in their order; None: there is none."""
        each = (plan.degrees for plan in self.planned_launches.get(types_by_rank(parts), ()))
        return next((d for d in each if not any(part.gpus % d.gpus_per_stage for part in parts)), None)

    def candidates_on(
        self, parts: Sequence[PoolPart], memory: float | None = None
    ) -> tuple[LaunchDegrees, ...]:
        """Plans of a launch on GPUs of these pools: the first to launch, those after it to try; none: ().

        Their schedule is 1F1B in several pools, for which other schedules are not cut, and where the gang may
        become smaller or larger, which others allow at few sizes; those who join repeat the forwards that the
        launch does, so that such a gang repeats no others. ``memory``: bytes of each GPU there; None: as the
        planner states.
        """
        planned, gpus, trial = self.degrees_on(parts), types_by_rank(parts), None
        if planned is None or self.question is None:
            return () if planned is None else (planned,)
        schedules: tuple[str, ...] = (DEFAULT_SCHEDULE,)
        fixed = not self.grow or self.question.fewest == self.question.most
        if self.asked.leaves_schedule_open and fixed and len(parts) == 1:
            names = trained_schedules(asynchronous=False)
            schedules = tuple(name for name in names if self._runs_under(name, planned))
        if self.asked.planner is not None:
            trial = self.asked.planner.trial
        if trial is None and len(schedules) == 1:
            return (planned,)
        has = math.inf if memory is None else memory
        recomputed = RECOMPUTED if fixed else ()
        found = candidates(self.question, gpus, planned, schedules, trial or 1, has, recomputed)
        return found or (planned,)

    def _runs_under(self, schedule: str, planned: LaunchDegrees) -> bool:
        """True if the trainer runs the plan under another schedule."""
        stages = planned.positions * SCHEDULES[schedule].stages_on_a_rank()
        if stages > sum(planned.layers) or self.config.pipeline.stages_per_rank not in (
            None,
            stages // planned.positions,
        ):
            return False
        layers = tuple(np.diff(even_partition(sum(planned.layers), stages).bounds).tolist())
        return self.runs(planned.replace(schedule=schedule, layers=layers))

    def runs(self, degrees: LaunchDegrees) -> bool:
        """True if the trainer runs a launch that divides the work so."""
        try:
            self.with_degrees(degrees)
        except ContractError:
            return False
        return True

    def plans_with(self, gpu_type: str, degrees: LaunchDegrees) -> Mapping[int, LaunchDegrees]:
        """GPUs of the type -> the plan by which a gang with these degrees goes on with so many; none: {}."""
        key = gpu_type, degrees.replace(layers=(), step_seconds=0.0, memory_bytes=0.0, measured_on=())
        if key not in self._kept_degrees:
            best, question = self.plans.get(gpu_type, {}), self.question
            self._kept_degrees[key] = {} if question is None else question.plans_with(gpu_type, degrees, best)
        return self._kept_degrees[key]

    @functools.cached_property
    def _kept_degrees(self) -> dict[tuple[str, LaunchDegrees], Mapping[int, LaunchDegrees]]:
        return {}

    @functools.cached_property
    def planned_launches(self) -> Mapping[TypesByRank, tuple[PlannedLaunch, ...]]:
        """GPUs -> how a launch there divides the work, the fastest first; empty: as ``config`` says."""
        first: dict[TypesByRank, PlannedLaunch] = {
            ((gpu_type, gpus),): PlannedLaunch.of(degrees)
            for gpu_type, by_size in self.plans.items()
            for gpus, degrees in by_size.items()
        }
        first.update(self.mixes)
        return {gpus: (planned, *self.in_parts.get(gpus, ())) for gpus, planned in first.items()}

    @functools.cached_property
    def planned_speeds(self) -> Mapping[TypesByRank, tuple[PlannedSpeed, ...]]:
        """GPUs that it may have, the fastest first, and their plans; none: with its own plan. Empty: any."""
        if not self.plans:
            return {self.planned_gpus: ()} if self.planned_gpus else {}
        return {
            gpus: tuple(
                PlannedSpeed(1 / plan.degrees.step_seconds, plan.memory, plan.degrees.gpus_per_stage)
                for plan in plans
            )
            for gpus, plans in sorted(
                self.planned_launches.items(), key=lambda each: each[1][0].degrees.step_seconds
            )
        }

    @functools.cached_property
    def _launched(self) -> dict[LaunchDegrees, "JobSpec"]:
        return {}

    @property
    def holds_copies(self) -> bool:
        """Its ranks hold copies of each other's layers, and go on in place where one is lost."""
        return self.config.checkpoint.in_memory_every_steps > 0 and not self.is_script

    @functools.cached_property
    def template_digest(self) -> str:
        """Equal for equal templates."""
        return digest([self.template])[:16]

    @functools.cached_property
    def own_command(self) -> tuple[Any, ...]:
        """(image, command, arguments) of the template's first container."""
        containers = (self.template.get("spec") or {}).get("containers") or [{}]
        return tuple(containers[0].get(field) for field in ("image", "command", "args"))

    @property
    def tolerations(self) -> tuple[Mapping[str, Any], ...]:
        """Tolerations of the template's pods."""
        return tuple((self.template.get("spec") or {}).get("tolerations") or ())

    @functools.cached_property
    def pod_need(self) -> PodNeed:
        """Resources that its least gang asks of a node besides GPUs."""
        asks = pod_requests(self.template.get("spec") or {})
        pods = max(1, self.smallest_gang // self.gpus_per_pod)
        return PodNeed(asks=tuple(sorted(asks.items())), pods=pods, gpus_per_pod=self.gpus_per_pod)

    @functools.cached_property
    def node_signature(self) -> tuple[str, NodeRequirements, PodNeed]:
        """Equal for jobs that may be started on the same nodes."""
        tolerations = json.dumps(self.tolerations, sort_keys=True)
        return tolerations, read_requirements(self.template), self.pod_need

    @functools.cached_property
    def kind(self) -> str:
        """Equal for jobs that run alike: a model with its batches, or a command of an image."""
        if self.is_script:
            return digest(["script", *self.own_command])[:16]
        pipeline = self.config_fields["pipeline"]
        batches = {
            key: pipeline.get(key) for key in ("globalBatchSize", "microbatches", "schedule", "stagesPerRank")
        }
        parts = [self.config_fields["model"], batches, self.config_fields.get("dynamics")]
        planned = [[*self.plans.items()], [*self.mixes.items()]] if self.plans else []
        return digest([*parts, *planned])[:16]


def read_spec(item: Object) -> tuple[JobSpec | None, str]:
    """(spec, why it cannot be used): exactly one of them says something.

    Of its status what its launches have measured is read, where it can be.
    """
    try:
        job = read_training_job({**item, "status": {}})
    except InvalidObject as error:
        return None, str(error)
    try:
        measured = read_job_status(item).measured_layers if job.spec.planner is not None else ()
    except ValueError:
        measured = ()
    try:
        spec = _spec(job.spec, measured)
        hash(spec.node_signature)
    except ContractError as error:
        return None, "; ".join(str(problem.below("spec")) for problem in error.problems)
    except (AttributeError, TypeError) as error:  # the definition says little of resources
        what = "what its pods ask of a node cannot be read"
        return None, f"spec.template.spec: {what}: {error}. To fix: resources and overhead as quantities"
    return spec, ""


def spec_text(item: Object) -> str:
    """Fields of the job that :func:`read_spec` reads besides its name, as JSON."""
    asked, status = item.get("spec"), item.get("status")
    read = {"spec": asked}
    measured = status.get("measuredLayers") if isinstance(status, Mapping) else None
    if measured and isinstance(asked, Mapping) and asked.get("planner"):
        read["status"] = {"measuredLayers": measured}
    return json.dumps(read)


def read_spec_text(question: tuple[str, str]) -> tuple[JobSpec | None, str]:
    """Spec as by :func:`read_spec`, of a job's name and its :func:`spec_text`."""
    name, text = question
    return read_spec({"metadata": {"name": name, "namespace": "", "uid": ""}, **json.loads(text)})


PLANNED_BY = frozenset({*JobConfig.model_fields, "planner", "throughput", "mixed_pools", "gpu_types"})
"""Fields of a spec on which its plans may depend."""


def spec_as_edited(item: Object, before: JobSpec) -> tuple[JobSpec, bool]:
    """(spec, whether nothing else was edited) of a job with ``planner``, until it is planned.

    It has the edited fields on which no plan depends, and the others as ``before``.
    """
    try:
        asked = read_training_job({**item, "status": {}}).spec
        kept = asked.replace(**{name: value for name, value in before.asked if name in PLANNED_BY})
    except (InvalidObject, ContractError):
        return before, False  # why is told once it is read as a whole
    template = filled_in(kept.template.as_object(), trainer_template())
    # Pydantic's equality takes a schedule that is left open for the default.
    whole = kept == asked and kept.leaves_schedule_open == asked.leaves_schedule_open
    return dataclasses.replace(before, asked=kept, template=template), whole


def spec_until_planned(item: Object, allocation: JobAllocation | None) -> JobSpec | None:
    """The spec of a job whose ``planner`` has not answered yet: of the GPUs that it holds, as launched.

    None: it holds none, or cannot be read without its planner.
    """
    if allocation is None:
        return None
    given = {name: value for name, value in item["spec"].items() if name not in ("planner", "throughput")}
    spec, _ = read_spec({**item, "spec": given})
    if spec is None or allocation.degrees is None:
        return spec
    if allocation.degrees.step_seconds < LEAST_STEP_SECONDS:
        return None  # put there by hand
    pods = spec.config.parallelism.replace(gpus_per_pod=allocation.gpus_per_pod)
    gpus = types_by_rank(allocation.by_pool)
    planned = PlannedLaunch(allocation.degrees, (0.0,) * len(gpus))  # it runs: each part fits
    try:
        spec = dataclasses.replace(spec, config=spec.config.replace(parallelism=pods))
        return _with_plans(spec, {gpus: (planned,)}, (), {})
    except ContractError:
        return None


def spec_of_launch(plan_config: str, team: str) -> JobSpec:
    """Spec that a job was launched with, as far as its plan's ConfigMap says; it never fails for good.

    Where ``plan_config`` (JSON) cannot be read, the gang counts as a script's. ``team``: that pays for it.
    """
    try:
        config = JobConfig.from_json(plan_config)
    except ContractError:
        config = JobConfig(total_steps=MOST_STEP, pipeline=PipelineConfig(max_stages=1))
    asked = TrainingJobSpec.model_construct(**dict(config), entity=team or None, backoff_limit=sys.maxsize)
    return JobSpec(asked=asked, config=config, template={})


def _spec(asked: TrainingJobSpec, measured: tuple[MeasuredOnType, ...] = ()) -> JobSpec:
    pipeline, parallelism = asked.pipeline, asked.parallelism
    throughput: dict[str, dict[int, float]] = {}
    spread: dict[tuple[str, int], dict[int, float]] = {}
    for known in asked.throughput:
        gpus = sum(pipeline.used_replicas) or known.stages * parallelism.ranks_per_position
        throughput.setdefault(known.gpu_type, {})[gpus] = known.steps_per_second
        if known.spread:
            by_nodes = {each.nodes: each.steps_per_second for each in known.spread}
            spread[known.gpu_type, gpus] = {1: known.steps_per_second, **by_nodes}
    found = JobSpec(
        asked=asked,
        config=asked.config,
        template=filled_in(asked.template.as_object(), trainer_template()),
        gpu_types=asked.planned_types or asked.gpu_types,
        throughput=throughput,
        spread=spread,
    )
    return found if asked.planner is None else _planned(found, asked.planner, measured)


def _planned(spec: JobSpec, planner: PlannerConfig, measured: tuple[MeasuredOnType, ...]) -> JobSpec:
    """The spec with a plan for the GPUs that the job may have, if there is one.

    Speeds are as predicted where ``throughput`` does not state them: reports replace both. Where nothing can
    be planned from what was ``measured``, it is planned from what is stated.

    Raises:
        ContractError: nothing can be planned, or the trainer does not run what is planned.
    """
    config, pods = spec.config, spec.config.parallelism
    if pods.gpus_per_pod is None:
        most = max(profile.tensor for profile in planner.profiles)
        config = config.replace(parallelism=pods.replace(gpus_per_pod=most))
        spec = dataclasses.replace(spec, config=config)
    question = DegreesQuestion(
        planner=planner,
        batch_size=config.pipeline.global_batch_size,
        fewest=spec.smallest_gang,
        most=spec.largest_gang,
        per_pod=spec.gpus_per_pod,
        mixes=spec.mixes_pools,
        zero_stage=pods.zero_stage,
        measured=spec.measured_alike(measured),
    )
    if spec.layers not in (None, question.layers):
        reason = f"it has {question.layers} layers, model.layers is {spec.layers}"
        fix = "To fix: a profile of this model"
        raise ContractError(Problem("planner.profiles[0].layers", f"{reason}. {fix}"))
    try:
        planned = _with_plans(spec, planned_degrees(question), question.sizes, question.speeds)
    except ContractError:
        if not question.measured:
            raise
        return _planned(spec, planner, ())
    # Without what it worked out for the plan, which is as much again as all else of the spec.
    return dataclasses.replace(planned, question=dataclasses.replace(question))


def _with_plans(
    spec: JobSpec,
    found: Mapping[TypesByRank, tuple[PlannedLaunch, ...]],
    sizes: Sequence[int],
    speeds: Mapping[str, float],
) -> JobSpec:
    """The spec with the plans ``found``, as of :func:`planned_degrees`; ``sizes``: of one type, asked for.

    Raises:
        ContractError: the trainer does not run what is planned.
    """
    for gpus, planned in ((gpus, planned) for gpus, plans in found.items() for planned in plans):
        try:
            spec.with_degrees(planned.degrees)
        except ContractError as error:
            what = " + ".join(f"{count} x {gpu_type}" for gpu_type, count in gpus)
            reason = f"planned on {what}: {planned.degrees}; the trainer refuses it: {error}"
            raise ContractError(Problem("planner", reason)) from None
    plans: dict[str, dict[int, LaunchDegrees]] = {gpu_type: {} for gpus in found for gpu_type, _ in gpus}
    for ((gpu_type, count), *others), (planned, *_) in found.items():
        if not others:
            plans[gpu_type][count] = planned.degrees
    stated, every = spec.throughput, {*sizes, *(sum(count for _, count in gpus) for gpus in found)}
    throughput = {
        gpu_type: {
            gpus: stated.get(gpu_type, {}).get(gpus, 1 / by_size[gpus].step_seconds)
            if gpus in by_size
            else 0.0
            for gpus in sorted(every)
        }
        for gpu_type, by_size in plans.items()
    }
    return dataclasses.replace(
        spec,
        gpu_types=tuple(plans),
        throughput=throughput,
        spread={
            (of, count): known for (of, count), known in spec.spread.items() if count in plans.get(of, {})
        },
        plans=plans,
        mixes={gpus: planned for gpus, (planned, *_) in found.items() if len(gpus) > 1},
        in_parts={gpus: tuple(more) for gpus, (_, *more) in found.items() if more},
        gpu_speeds=speeds,
    )
