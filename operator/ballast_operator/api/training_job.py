"""``TrainingJob``: what a user asks for.

The fields that the trainer acts on are the contract's :class:`~ballast_policies.contract.job.JobConfig`;
the others are here.  The CRD, its documentation and what the operator reads are made from both.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from ballast_policies.contract.decode import decode
from ballast_policies.contract.errors import ContractError, camel
from ballast_policies.contract.job import JobConfig
from ballast_policies.contract.settings import cluster_problems
from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from ballast_operator.api import meta
from ballast_operator.api.base import ApiModel, GpuType, MemoryQuantity, ObjectMeta, Rule, Time, schema
from ballast_operator.api.costs.budgets import OnLimit
from ballast_operator.api.costs.job_data import DataLocation
from ballast_operator.api.costs.spot_use import SpotUse
from ballast_operator.api.placement.mixed_pools import RULES as MIXED_POOLS_RULES
from ballast_operator.api.placement.mixed_pools import MixedPools
from ballast_operator.api.placement.shared_gpus import SharesGpu
from ballast_operator.api.schema.settings_schema import settings_schema
from ballast_operator.api.template import PodTemplate
from ballast_operator.api.training_job_status import TrainingJobStatus

CONFIG = "config"
"""The attribute of the spec that holds the trainer's fields; in JSON they stand in the spec itself."""

CONFIG_FIELDS = frozenset(camel(name) for name in JobConfig.__dataclass_fields__)
"""The trainer's fields, as JSON spells them."""


class KnownThroughput(ApiModel):
    """A speed that is known before the job has run; the trainer's reports replace it."""

    gpu_type: GpuType
    """The GPU type."""
    stages: Annotated[int, Field(ge=1, le=1024)]
    """Number of stages; of a job without ``model``, number of ranks."""
    steps_per_second: Annotated[float, Field(ge=0, le=1e9)]
    """Optimizer steps per second of the whole gang; 0: it cannot run there."""


def _read_config(value: Any) -> JobConfig:
    problems = cluster_problems(JobConfig, value) if isinstance(value, Mapping) else []
    try:
        config = decode(JobConfig, value)
    except ContractError as error:
        found = {problem.path for problem in error.problems}
        problems = [*error.problems, *(problem for problem in problems if problem.path not in found)]
    if not problems:
        return config
    raise ValidationError.from_exception_data(
        "TrainingJobSpec",
        [
            InitErrorDetails(
                type=PydanticCustomError("config", "{text}", {"text": problem.reason, "path": problem.path}),
                loc=(),
                input=None,
            )
            for problem in problems
        ],
    )


class _Config:
    """The contract reads and writes the value; its schema is only made where one is asked for."""

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _read_config,
            serialization=core_schema.plain_serializer_function_ser_schema(JobConfig.to_dict),
        )

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return settings_schema(JobConfig)


class TrainingJobSpec(ApiModel):
    """What to train, and on what it may run."""

    RULES = (
        Rule(
            "has(self.model) == has(oldSelf.model)",
            "model is immutable: the checkpoints belong to what made them, a model or a command. "
            "To fix: make a new TrainingJob",
        ),
        Rule(
            "!has(self.grow) || has(self.model) || !self.grow",
            "grow: a job without a model changes its size by a restart, not while it trains. "
            "To fix: leave grow out",
            ".grow",
            holds=lambda spec: not (spec.grow and spec.config.is_script),
        ),
        *MIXED_POOLS_RULES,
    )
    config: Annotated[JobConfig, _Config()]
    """What the trainer acts on."""
    gpu_types: Annotated[
        tuple[GpuType, ...], Field(max_length=64, json_schema_extra=schema(list_type="set"))
    ] = ()
    """GPU types that it may run on; empty: any."""
    throughput: Annotated[
        tuple[KnownThroughput, ...],
        Field(max_length=512, json_schema_extra=schema(list_type="map", list_map_keys=["gpuType", "stages"])),
    ] = ()
    """Speeds that are known before the job has run."""
    memory_per_gpu: MemoryQuantity | None = None
    """Memory that each GPU must have, at any number of them, in place of what was measured. Absent: as
    measured of this job's layers, or those of one in its namespace with the same model, batches and
    parallelism."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share relative to other jobs."""
    entity: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """The team it belongs to, one of the ClusterPolicy's ``objective.entities``; read by ``hierarchical``."""
    deadline: Time | None = None
    """When it should be done, as 2030-01-31T12:00:00Z; ``min-cost-slo`` keeps it where it can.
    DeadlineAtRisk says, under every policy, whether it can be met."""
    on_deadline_missed: OnLimit = OnLimit.CONTINUE
    """What happens when ``deadline`` passes before the job is done."""
    budget: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """What it may cost in all, in the currency of ``pricePerGpuHour``; absent: no limit. BudgetExhausted
    says whether it is enough."""
    on_budget_exhausted: OnLimit = OnLimit.SUSPEND
    """What happens when ``status.costSoFar`` reaches ``budget``. Its last checkpoint is still paid for."""
    spot: SpotUse = SpotUse.ALLOW
    """Whether it may run on spot machines (``nodePools[].capacityType``), under every policy. A change takes
    effect at the next launch."""
    data_location: DataLocation | None = None
    """Where its data is, and how much of it is read: then data between regions counts in its cost, its
    budget, and in every policy that reads prices. Absent: data costs nothing."""
    mixed_pools: MixedPools = MixedPools.NEVER
    """Whether its gang may have GPUs of several pools at once, with stages that suit them: where that is
    faster than one pool, or no pool has room. Its size stays, or shrinks as nodes leave. A change takes
    effect at the next launch."""
    shares_gpu: SharesGpu = SharesGpu.NEVER
    """Whether another job may run on its GPU at the same time, in pools with ``sharing``: of a job of one
    GPU whose memory is known. Nothing separates the two: where one takes more memory than it stated,
    either may fail. A change takes effect at the next launch; Never ends a pair at the end of the
    round."""
    grow: bool | None = None
    """Whether its number of GPUs follows what is free while it trains, from ``pipeline.minStages`` to
    ``pipeline.maxStages``; absent: where it can (with a model). false: it is launched with the most that
    its pool has, and keeps them."""
    suspend: bool = False
    """Save a checkpoint, stop and hold no GPUs until it is false again."""
    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 3
    """Failures of the job itself after which it has failed for good; lost pods and nodes do not count."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds after its end until the job is deleted; absent: it is kept."""
    template: PodTemplate
    """The pods. Changes take effect at the next launch."""

    @model_serializer(mode="wrap")
    def _with_config(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        own = serialize(self)
        config: dict[str, Any] = own.pop(CONFIG)
        return {**config, **own}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, of_model: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The trainer's fields beside the operator's own."""
        generated = super().__get_pydantic_json_schema__(of_model, handler)
        own = handler.resolve_ref_schema(generated)
        config = own["properties"].pop(CONFIG)
        own["properties"] = {**config["properties"], **own["properties"]}
        own["required"] = [*config["required"], *(name for name in own["required"] if name != CONFIG)]
        rules = "x-kubernetes-validations"
        own[rules] = [*config[rules], *own.get(rules, [])]
        return generated


class TrainingJob(ApiModel):
    """A pipeline of stages that Ballast places on the GPUs that suit it, and reshapes as it trains."""

    RULES = (
        Rule(
            f"size(self.metadata.name) <= {meta.JOB_NAME_LIMIT} && "
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            f"metadata.name is part of host names: at most {meta.JOB_NAME_LIMIT} lower case letters, digits "
            "and hyphens, a letter first and no hyphen last. To fix: rename the job",
            holds=lambda job: meta.is_job_name(job.metadata.name),
        ),
        Rule(
            f"self.metadata.name != '{meta.LEADER_LEASE}'",
            f"a job's Lease has its name, and {meta.LEADER_LEASE} is the Lease of the operator's leader. "
            "To fix: rename the job",
            holds=lambda job: job.metadata.name != meta.LEADER_LEASE,
        ),
    )

    api_version: Literal["ballast.dev/v1alpha1"] = meta.API_VERSION
    """Group and version."""
    kind: Literal["TrainingJob"] = meta.TRAINING_JOB_KIND
    """Kind."""
    metadata: ObjectMeta
    """Name and namespace."""
    spec: TrainingJobSpec
    """What to train, and on what it may run."""
    status: TrainingJobStatus = TrainingJobStatus()
    """What has become of it."""
