"""``TrainingJob``: what a user asks for.

The fields that the trainer acts on are the contract's :class:`~ballast_policies.contract.job.job.JobConfig`;
the others are here.  The CRD, its documentation and what the operator reads are made from both.
"""

import dataclasses
import enum
import math
from typing import Annotated, Literal

from ballast_policies.contract.conditions import Cel, Condition, Items, RowFact, Rule, absent, at, given
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.limits import LEAST_RATE, MOST_CANDIDATES
from ballast_policies.contract.messages import ExitCode
from ballast_policies.gpus.catalogue import gpu_named
from ballast_policies.planning.profile import ProfiledLayer
from ballast_policies.planning.schedules.registry import DEFAULT_SCHEDULE, SCHEDULES
from pydantic import Field

from ballast_operator.api import meta
from ballast_operator.api.base import (
    ApiModel,
    GpuType,
    MemoryQuantity,
    ObjectMeta,
    Time,
    cel_list,
    exactly_one,
    listed,
    memory_bytes,
)
from ballast_operator.api.costs import DataLocation, OnLimit, SpotUse
from ballast_operator.api.node_pool import SharesGpu
from ballast_operator.api.template import PodTemplate
from ballast_operator.api.training_job_status import TrainingJobStatus


class MixedPools(enum.StrEnum):
    """Permission for a gang to have GPUs of several pools at once."""

    NEVER = "Never"
    """Each launch is in one pool."""
    ALLOWED = "Allowed"
    """Several pools at once, where they are faster together, or only they have room for the gang."""


PREDICTED = SCHEDULES.own(lambda kind: kind.closed_form)
"""Schedules whose step time on mixed GPUs has a closed form."""


def can_mix(config: JobConfig) -> bool:
    """True if the job could set ``mixedPools: Allowed``."""
    return all(need.holds(config) for need, _, _ in _NEEDS)


_IN_ONE_POOL = at("mixed_pools") != MixedPools.ALLOWED

_ONE_STAGE = (
    "is for one stage on each rank, and one rank for each stage",
    "leave pipeline.stagesPerRank and pipeline.replicas out, or mixedPools",
)

_NEEDS: tuple[tuple[Condition, str, str], ...] = (
    (
        given("model"),
        "needs a model, which Ballast cuts into stages that suit mixed GPUs; a script it does not",
        "leave mixedPools out",
    ),
    (
        absent("model") | given("model.layers"),
        "needs the number of layers that are cut into stages",
        "set model.layers",
    ),
    (
        RowFact("pipeline.schedule", SCHEDULES, lambda kind: kind.closed_form),
        f"is for the schedules {' and '.join(PREDICTED)}, whose speed on mixed GPUs can be predicted",
        f"pipeline.schedule: {PREDICTED[0]}, or leave mixedPools out",
    ),
    (at("pipeline.stages_per_rank") == 1, *_ONE_STAGE),
    (Items("pipeline.replicas", 1), *_ONE_STAGE),
)

MIXED_POOLS_RULES = tuple(
    Rule(condition=_IN_ONE_POOL | need, field="mixed_pools", reason=f"mixedPools: Allowed {reason}", fix=fix)
    for need, reason, fix in _NEEDS
)


class PlannerProfile(ApiModel):
    """Layers on one of ``tensor`` GPUs of speed 1 that share each of them, their all-reduces included."""

    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor degree."""
    microbatch_size: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Samples of a microbatch."""
    layers: Annotated[tuple[ProfiledLayer, ...], listed(1024, least=1)]
    """Layers in their order."""


class PlannerGpu(ApiModel):
    """A GPU type on which the job may run."""

    gpu_type: GpuType
    """The GPU type."""
    speed: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Relative to the profiles' GPU."""
    memory: MemoryQuantity | None = None
    """Memory of a GPU. Absent: that of the catalogue (``ballast gpus``), where the type is a full name in it;
    else no limit."""

    @property
    def memory_bytes(self) -> float:
        """Bytes of a GPU; infinite: no limit."""
        if self.memory is not None:
            return memory_bytes(self.memory)
        named = gpu_named(self.gpu_type)
        return math.inf if named is None else named.memory_bytes


class PlannerConfig(ApiModel):
    """Input of the planning of degrees."""

    profiles: Annotated[tuple[PlannerProfile, ...], listed(8, "tensor", least=1)]
    """The layers, for each tensor degree that the job may have."""
    gpus: Annotated[tuple[PlannerGpu, ...], listed(16, "gpuType", least=1)]
    """GPU types on which it may run."""
    bandwidth: Annotated[float, Field(ge=1, le=1e15)] | None = None
    """Bytes/s between GPUs. Absent: transfers are free."""
    trial: Annotated[int, Field(ge=2, le=MOST_CANDIDATES)] | None = None
    """Best plans of a launch (schedules, where open, cuts and, of a fixed number of GPUs, recomputation) that
    its gang runs for five steps each before the measured fastest goes on. Absent: none."""


PLANNER_RULES = tuple(
    Rule(condition=absent("planner") | condition, field=field, reason=f"planner {reason}", fix=fix)
    for condition, field, reason, fix in (
        (
            given("model"),
            "planner",
            "plans the degrees of a model; a script has its own",
            "leave planner out",
        ),
        (
            at("pipeline.schedule") == DEFAULT_SCHEDULE,
            "pipeline.schedule",
            f"chooses the schedule, or keeps to {DEFAULT_SCHEDULE}",
            f"leave schedule out, or {DEFAULT_SCHEDULE}",
        ),
        (
            Items("pipeline.replicas", 1),
            "pipeline.replicas",
            "has as many replicas of each stage",
            "leave replicas out",
        ),
        (absent("plan"), "plan", "makes a plan for each launch", "leave plan or planner out"),
        (
            at("repack.enabled") == False,  # noqa: E712 - a comparison as a value
            "repack.enabled",
            "fixes the number of ranks of a launch",
            "repack.enabled: false",
        ),
    )
)


TRIAL_RULES = (
    Rule(
        condition=Cel(
            "!has(self.planner) || !has(self.planner.trial) || self.pipeline.maxStages != 1 || "
            "(has(self.parallelism) && self.parallelism.tensor * self.parallelism.data != 1)",
            lambda spec: (
                not (
                    spec.planner
                    and spec.planner.trial
                    and spec.pipeline.max_stages == spec.parallelism.ranks_per_position == 1
                )
            ),
        ),
        field="planner.trial",
        reason="trial compares how layers are cut over ranks, and the job has one",
        fix="a larger pipeline.maxStages, or leave trial out",
    ),
    *(
        Rule(
            condition=absent("planner.trial") | condition,
            field="planner.trial",
            reason=f"trial {reason}",
            fix=f"{fix}, or leave trial out",
        )
        for condition, reason, fix in (
            (
                at("rebalance.enabled") == True,  # noqa: E712 - a comparison as a value
                "moves layers, which rebalance.enabled: false keeps where they are",
                "rebalance.enabled: true",
            ),
            (
                at("checkpoint.in_memory_every_steps") == 0,
                "may change the schedule, and a rank that goes on from copies in memory has the launch's",
                "inMemoryEverySteps: 0",
            ),
        )
    ),
)


_A_SPEED = Rule(
    condition=Cel(
        f"self.stepsPerSecond == 0.0 || self.stepsPerSecond >= {LEAST_RATE}",
        lambda known: not 0 < known.steps_per_second < LEAST_RATE,
    ),
    field="steps_per_second",
    reason="a step would take more than thirty years",
    fix="0, where it cannot run",
)


class SpreadSpeed(ApiModel):
    """A speed on more nodes than would hold the gang."""

    RULES = (dataclasses.replace(_A_SPEED, fix="leave these nodes out"),)

    nodes: Annotated[int, Field(ge=2, le=1024)]
    """Nodes that it is on."""
    steps_per_second: Annotated[float, Field(gt=0, le=1e9)]
    """Steps/s, at most as on fewer."""


class KnownThroughput(ApiModel):
    """A speed that is known before the job has run; the trainer's reports replace it."""

    RULES = (
        _A_SPEED,
        Rule(
            condition=Cel(
                "!has(self.spread) || self.spread.all(s, s.stepsPerSecond <= self.stepsPerSecond)",
                lambda known: all(s.steps_per_second <= known.steps_per_second for s in known.spread),
            ),
            field="spread",
            reason="spread over more nodes it is faster than at stepsPerSecond, on as few as hold it",
            fix="state the faster speed as stepsPerSecond",
        ),
    )

    gpu_type: GpuType
    """The GPU type."""
    stages: Annotated[int, Field(ge=1, le=1024)]
    """Number of stages; of a job without ``model``, number of ranks."""
    steps_per_second: Annotated[float, Field(ge=0, le=1e9)]
    """Optimizer steps per second of the whole gang; 0: it cannot run there."""
    spread: Annotated[tuple[SpreadSpeed, ...], listed(16, "nodes")] = ()
    """Speeds on more nodes than hold it. Absent: as its kind was measured there, else the same."""


_Level = Annotated[str, Field(min_length=1, max_length=316)]


class JobTopology(ApiModel):
    """Closeness of its nodes to each other; a level is one of the ClusterPolicy's ``topology.levels``."""

    RULES = (
        Rule(
            condition=exactly_one("required", "preferred"),
            field="required",
            reason="topology has exactly one of required and preferred",
            fix="name one level",
        ),
    )

    required: _Level | None = None
    """Label of a level: all ranks are on nodes of one domain of it, or the job waits."""
    preferred: _Level | None = None
    """Label of a level: ranks are on nodes of as few domains of it as possible."""


NO_FAULTS = (int(ExitCode.STOPPED), int(ExitCode.PEER_LOST), 143)
"""Exit codes that are no failure of a job's own; 143 is SIGTERM's."""

_ExitCodes = Annotated[tuple[Annotated[int, Field(ge=1, le=255)], ...], listed(32, unique=True)]


class FailurePolicy(ApiModel):
    """Meaning of a job's exit codes."""

    RULES = (
        Rule(
            condition=Cel(
                "!has(self.failOn) || !has(self.ignore) || !self.failOn.exists(code, code in self.ignore)",
                lambda policy: set(policy.fail_on).isdisjoint(policy.ignore),
            ),
            field="fail_on",
            reason="an exit code is in failOn and in ignore",
            fix="leave it out of one of them",
        ),
        Rule(
            condition=Cel(
                f"!has(self.failOn) || !self.failOn.exists(code, code in {cel_list(NO_FAULTS)})",
                lambda policy: set(policy.fail_on).isdisjoint(NO_FAULTS),
            ),
            field="fail_on",
            reason=f"{', '.join(map(str, NO_FAULTS))}: ranks that were told to stop, or lost another, end so",
            fix="another exit code",
        ),
    )

    fail_on: _ExitCodes = ()
    """One of these fails the job for good."""
    ignore: _ExitCodes = ()
    """One of these counts as a lost pod, not toward ``backoffLimit``."""


class TrainingJobSpec(ApiModel, JobConfig):
    """Training, and the GPUs that it may run on."""

    RULES = (
        Rule(
            condition=Cel("has(self.model) == has(oldSelf.model)"),
            field="",
            reason="model is immutable: the checkpoints belong to what made them, a model or a command",
            fix="make a new TrainingJob",
        ),
        Rule(
            condition=Cel(
                "has(self.managedBy) == has(oldSelf.managedBy) && "
                "(!has(self.managedBy) || self.managedBy == oldSelf.managedBy)"
            ),
            field="managed_by",
            reason="managedBy is immutable",
            fix="make a new TrainingJob",
        ),
        Rule(
            condition=given("model") | (at("grow") == False),  # noqa: E712 - a comparison as a value
            field="grow",
            reason="grow: a job without a model changes its size by a restart, not while it trains",
            fix="leave grow out",
        ),
        Rule(
            condition=Cel(
                "!has(self.throughput) || has(self.pipeline.replicas) || self.throughput.all(known, "
                "!has(known.spread) || known.spread.all(s, s.nodes <= known.stages * "
                "(has(self.parallelism) ? self.parallelism.tensor * self.parallelism.data : 1)))",
                lambda spec: (
                    bool(spec.pipeline.replicas)
                    or all(
                        s.nodes <= known.stages * spec.parallelism.ranks_per_position
                        for known in spec.throughput
                        for s in known.spread
                    )
                ),
            ),
            field="throughput",
            reason="throughput[].spread has more nodes than the gang has GPUs: one GPU is on one node",
            fix="leave these nodes out",
        ),
        *MIXED_POOLS_RULES,
        Rule(
            condition=_IN_ONE_POOL | absent("topology"),
            field="topology",
            reason="topology is about the nodes of one pool, and mixedPools: Allowed is for several",
            fix="leave one of them out",
        ),
        Rule(
            condition=Cel(
                "!has(self.plan) || !has(self.plan.gpus) || size(self.plan.gpus) < 2 || "
                "self.mixedPools == 'Allowed'",
                lambda spec: len(spec.planned_types) < 2 or spec.mixed_pools is MixedPools.ALLOWED,
            ),
            field="mixed_pools",
            reason="plan.gpus has several GPU types, which are in several pools",
            fix="mixedPools: Allowed",
        ),
        Rule(
            condition=Cel(
                "!has(self.plan) || !has(self.plan.gpus) || !has(self.gpuTypes) || "
                "size(self.gpuTypes) == 0 || self.plan.gpus.all(g, g.gpuType in self.gpuTypes)",
                lambda spec: not spec.gpu_types or set(spec.planned_types) <= set(spec.gpu_types),
            ),
            field="plan.gpus",
            reason="plan.gpus has a GPU type that gpuTypes does not allow",
            fix="leave gpuTypes out",
        ),
        *PLANNER_RULES,
        *TRIAL_RULES,
        Rule(
            condition=Cel(
                "!has(self.planner) || !has(self.gpuTypes) || size(self.gpuTypes) == 0 || "
                "self.planner.gpus.all(g, g.gpuType in self.gpuTypes)",
                lambda spec: (
                    not (spec.planner and spec.gpu_types)
                    or {gpu.gpu_type for gpu in spec.planner.gpus} <= set(spec.gpu_types)
                ),
            ),
            field="planner.gpus",
            reason="planner.gpus has a GPU type that gpuTypes does not allow",
            fix="leave gpuTypes out",
        ),
    )
    gpu_types: Annotated[tuple[GpuType, ...], listed(64, unique=True)] = ()
    """GPU types that it may run on; empty: any."""
    throughput: Annotated[tuple[KnownThroughput, ...], listed(512, "gpuType", "stages")] = ()
    """Speeds that are known before the job has run."""
    memory_per_gpu: MemoryQuantity | None = None
    """Memory that each GPU must have, at any number of them, in place of what was measured. Absent: as
    measured of this job's layers, or those of one in its namespace with the same model, batches and
    parallelism."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share relative to other jobs."""
    entity: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """The team it belongs to, one of the ClusterPolicy's ``objective.entities``; read by ``hierarchical``."""
    user: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """User that it belongs to, in a team that shares by users (``objective.entities``, ``byUser``)."""
    deadline: Time | None = None
    """Time by which it should be done, as 2030-01-31T12:00:00Z; ``min-cost-slo`` keeps it where it can.
    DeadlineAtRisk says, under every policy, whether it can be met."""
    on_deadline_missed: OnLimit = OnLimit.CONTINUE
    """Consequence when ``deadline`` passes before the job is done."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Seconds that it may hold GPUs, over all launches; waits do not count. Then it saves, and has failed
    (``DeadlineExceeded``). Absent: no limit."""
    budget: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Limit of its whole cost, in the currency of ``pricePerGpuHour``; absent: no limit. BudgetExhausted says
    whether it is enough."""
    on_budget_exhausted: OnLimit = OnLimit.SUSPEND
    """Consequence when ``status.costSoFar`` reaches ``budget``. Its last checkpoint is still paid for."""
    spot: SpotUse = SpotUse.ALLOW
    """Its use of spot machines (``nodePools[].capacityType``), under every policy. A change takes effect at
    the next launch."""
    data_location: DataLocation | None = None
    """Region of its data, and the amount that is read: then data between regions counts in its cost, its
    budget, and in every policy that reads prices. Absent: data costs nothing."""
    mixed_pools: MixedPools = MixedPools.NEVER
    """Permission for its gang to have GPUs of several pools at once, with stages that suit them: where that
    is faster than one pool, or no pool has room. It shrinks live, and grows in the pool
    of its last ranks. A change takes effect at the next launch."""
    planner: PlannerConfig | None = None
    """Each launch has the degrees of the shortest step that fits its GPUs, in place of
    ``parallelism.tensor``, ``data``, ``pipeline.microbatches``, ``training.recompute`` and
    ``recomputeEvery``. Another number of GPUs, from ``minStages`` to ``maxStages`` times the stated
    ``tensor`` x ``data``, is another launch, unless its degrees are at most 5 % slower, and so is another mix
    of up to three types (``mixedPools``). ``gpusPerPod``: unless stated, the profiles' largest ``tensor``."""
    topology: JobTopology | None = None
    """Closeness of its nodes to each other. Absent: on as few nodes as possible, of these in as few domains
    as possible. A change takes effect at the next launch."""
    shares_gpu: SharesGpu = SharesGpu.NEVER
    """Permission for another job to run on its GPU at the same time, in pools with ``sharing``: of a job of
    one GPU whose memory is known. Nothing separates the two: where one takes more memory than it stated,
    either may fail. A change takes effect at the next launch; Never ends a pair at the end of the round."""
    grow: bool | None = None
    """Its number of GPUs follows what is free while it trains, from ``pipeline.minStages`` to
    ``pipeline.maxStages``; absent: where it can (with a model). false: it is launched with the most that its
    pool has, and keeps them."""
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """The controller whose job it is; absent: ``ballast.dev/operator``. Those of others are left alone."""
    suspend: bool = False
    """Save a checkpoint, stop and hold no GPUs until it is false again."""
    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 3
    """Failures of the job itself after which it is launched again; one more, and it has failed for good. Lost
    pods and nodes do not count."""
    failure_policy: FailurePolicy | None = None
    """Meaning of its pods' exit codes; absent: each failure counts alike."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds after its end until the job is deleted; absent: it is kept."""
    template: PodTemplate
    """The pods. Changes take effect at the next launch."""

    @property
    def planned_types(self) -> tuple[str, ...]:
        """GPU types of the plan, in the order of the ranks; empty: there is no plan, or it is of any type."""
        return () if self.plan is None else tuple(of_type.gpu_type for of_type in self.plan.gpus)

    @property
    def leaves_schedule_open(self) -> bool:
        """True if its planner chooses the schedule."""
        return "schedule" not in self.pipeline.model_fields_set

    @property
    def config(self) -> JobConfig:
        """Configuration that the trainer acts on."""
        return JobConfig.model_construct(**{name: getattr(self, name) for name in JobConfig.model_fields})


class TrainingJob(ApiModel):
    """A pipeline of stages that Ballast places on the GPUs that suit it, and reshapes as it trains."""

    RULES = (
        Rule(
            condition=Cel(
                f"size(self.metadata.name) <= {meta.JOB_NAME_LIMIT} && "
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                lambda job: meta.is_job_name(job.metadata.name),
            ),
            field="",
            reason=f"metadata.name is part of host names: at most {meta.JOB_NAME_LIMIT} lower case letters, "
            "digits and hyphens, a letter first and no hyphen last",
            fix="rename the job",
        ),
        Rule(
            condition=at("metadata.name") != meta.LEADER_LEASE,
            field="",
            reason=f"a job's Lease has its name, and {meta.LEADER_LEASE} is the Lease of the operator's "
            "leader",
            fix="rename the job",
        ),
    )

    api_version: Literal["ballast.dev/v1alpha1"] = meta.API_VERSION
    """Group and version."""
    kind: Literal["TrainingJob"] = meta.TRAINING_JOB_KIND
    """Kind."""
    metadata: ObjectMeta
    """Name and namespace."""
    spec: TrainingJobSpec
    """Training, and the GPUs that it may run on."""
    status: TrainingJobStatus = TrainingJobStatus()
    """State of the job."""
