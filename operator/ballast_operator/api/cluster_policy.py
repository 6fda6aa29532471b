"""``ClusterPolicy``: how an administrator wants GPUs shared.

The one source of its CRD, of its documentation and of what the operator reads.
"""

import enum
from typing import Annotated, Literal

from ballast_policies.allocation.registry import POLICY_NAMES
from pydantic import Field, field_validator

from ballast_operator.api import meta
from ballast_operator.api.base import (
    ApiModel,
    Conditions,
    DnsLabel,
    GpuType,
    ObjectMeta,
    Refused,
    Rule,
    StatusModel,
    Time,
    schema,
)

_Seconds = Annotated[float, Field(ge=0, le=1e9)]
_Name = Annotated[str, Field(max_length=253)]
_LabelValue = Annotated[str, Field(max_length=63)]


NEEDS_MORE = frozenset(
    {"hierarchical", "finish-time-fairness", "min-cost", "min-cost-slo", "allox", "gandiva"}
)
"""Policies of `ballast allocate` that need what this version's jobs do not say (teams, deadlines, time in
isolation, pairs); refused here."""

USABLE_POLICIES = tuple(name for name in POLICY_NAMES if name not in NEEDS_MORE)
"""Policies that the operator can feed."""


class CapacityType(enum.StrEnum):
    """How sure the nodes of a pool are to stay."""

    ON_DEMAND = "onDemand"
    """They stay."""
    SPOT = "spot"
    """They may be taken away at any time; jobs then go on from their checkpoint."""


class Objective(ApiModel):
    """What the allocation aims at."""

    REFUSED = (
        Refused("entities", "array", "this version has no policy that shares by team. To fix: leave it out"),
    )

    policy: Annotated[str, Field(json_schema_extra={"enum": list(USABLE_POLICIES)})] = USABLE_POLICIES[0]
    """Name of the policy."""

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in USABLE_POLICIES:
            raise ValueError(f"{value!r} is not one of {', '.join(USABLE_POLICIES)}")
        return value


class NodePool(ApiModel):
    """Nodes whose GPUs are alike."""

    REFUSED = (
        Refused("sharing", "string", "this version gives whole GPUs only. To fix: leave it out"),
        Refused("minNodes", "integer", "this version does not add or remove nodes. To fix: leave it out"),
        Refused("maxNodes", "integer", "this version does not add or remove nodes. To fix: leave it out"),
        Refused("priceFeed", "object", "this version reads no price feed. To fix: use pricePerGpuHour"),
    )

    name: DnsLabel
    """The pool's name, unique in the policy."""
    node_selector: Annotated[dict[str, _LabelValue], Field(min_length=1, max_length=32)]
    """Labels that its nodes have, all of them. No node may match two pools."""
    gpu_type: GpuType
    """Type of its GPUs; several pools may have the same."""
    gpu_resource: Annotated[
        str,
        Field(
            min_length=3,
            max_length=253,
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9][-A-Za-z0-9_.]*$",
        ),
    ] = "nvidia.com/gpu"
    """Resource that its nodes offer and pods ask for."""
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    """How sure its nodes are to stay. For people: lost nodes are dealt with alike in both."""
    price_per_gpu_hour: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Price of one GPU for one hour, in a currency of your choice; 0: not accounted for."""


class Moves(ApiModel):
    """How restless the allocation may be."""

    min_run_seconds: _Seconds = 0.0
    """A gang keeps its GPUs at least so long, once it trains."""
    max_moves_per_hour: Annotated[int, Field(ge=0, le=3600)] = 12
    """How often an hour a job may be stopped for another placement."""


class Solver(ApiModel):
    """Limits of the solver."""

    time_limit_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """After so long the solver is ended and the greedy fallback decides."""


class ClusterPolicySpec(ApiModel):
    """How GPUs are shared."""

    RULES = (
        Rule(
            "self.moves.minRunSeconds <= 100.0 * double(self.roundSeconds)",
            "moves.minRunSeconds is over a hundred rounds: nothing would ever move. "
            "To fix: lower it, or set moves.maxMovesPerHour to 0",
            field=".moves.minRunSeconds",
            holds=lambda spec: spec.moves.min_run_seconds <= 100 * spec.round_seconds,
        ),
    )
    REFUSED = (
        Refused(
            "spot",
            "object",
            "this version has no settings for spot pools. To fix: use nodePools[].capacityType",
        ),
    )

    objective: Objective = Objective()
    """What the allocation aims at."""
    round_seconds: Annotated[int, Field(ge=1, le=86_400)] = 360
    """Length of a round: how often GPUs may change hands. Arrivals and free GPUs are looked at at once."""
    node_pools: Annotated[
        tuple[NodePool, ...],
        Field(
            min_length=1, max_length=128, json_schema_extra=schema(list_type="map", list_map_keys=["name"])
        ),
    ]
    """The nodes that Ballast gives to jobs."""
    moves: Moves = Moves()
    """How restless the allocation may be."""
    solver: Solver = Solver()
    """Limits of the solver."""
    dry_run: bool = False
    """Decide and say so, but start and stop nothing."""


class PoolCapacity(StatusModel):
    """What a pool has."""

    pool: _Name
    """The pool's name."""
    gpu_type: _Name
    """Its GPU type."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """Ready nodes."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of these nodes that are not taken by pods of others."""
    gpus_held: Annotated[int, Field(ge=0)] = 0
    """GPUs that jobs hold."""


class Proposed(StatusModel):
    """What a job would get: filled in while ``spec.dryRun`` is set."""

    job: Annotated[str, Field(max_length=512)]
    """namespace/name."""
    gpu_type: _Name = ""
    """GPU type; empty: none."""
    pool: _Name = ""
    """Node pool."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs."""
    why: Annotated[str, Field(max_length=4096)] = ""
    """Why."""


class Round(StatusModel):
    """The last round."""

    plan_id: _Name
    """Its name, as ``status.lastDecision.planId`` of a job has it."""
    time: Time
    """When it was decided."""
    policy: _Name = ""
    """Policy that decided it."""
    solve_seconds: Annotated[float, Field(ge=0)] | None = None
    """Time for the solution."""
    objective_value: float | None = None
    """Value of the objective, in the unit that the policy documents."""
    gap: float | None = None
    """Relative distance to the proven bound; 0: optimal."""


class ClusterPolicyStatus(StatusModel):
    """What the policy sees and does."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation of the spec that this status is about."""
    conditions: Conditions = ()
    """Valid, Solved, Ready."""
    capacity: Annotated[
        tuple[PoolCapacity, ...],
        Field(max_length=128, json_schema_extra=schema(list_type="map", list_map_keys=["pool"])),
    ] = ()
    """What each pool has."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs over all pools."""
    gpus_held: Annotated[int, Field(ge=0)] | None = None
    """GPUs that jobs hold."""
    jobs_running: Annotated[int, Field(ge=0)] | None = None
    """Jobs that hold GPUs."""
    jobs_waiting: Annotated[int, Field(ge=0)] | None = None
    """Jobs that want GPUs and have none."""
    last_round: Round | None = None
    """The last round."""
    shadow_prices: dict[str, float] = Field(default_factory=dict)
    """GPU type -> what one more GPU would add to the objective."""
    proposed: Annotated[
        tuple[Proposed, ...], Field(max_length=1000, json_schema_extra=schema(list_type="atomic"))
    ] = ()
    """With ``spec.dryRun``: what jobs would get, the first thousand."""


class ClusterPolicy(ApiModel):
    """How an administrator wants the GPUs of a cluster shared between training jobs."""

    api_version: Literal["ballast.dev/v1alpha1"] = meta.API_VERSION
    """Group and version."""
    kind: Literal["ClusterPolicy"] = meta.CLUSTER_POLICY_KIND
    """Kind."""
    metadata: ObjectMeta
    """Name."""
    spec: ClusterPolicySpec
    """How GPUs are shared."""
    status: ClusterPolicyStatus = ClusterPolicyStatus()
    """What the policy sees and does."""
