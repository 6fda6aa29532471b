"""``ClusterPolicy`` and its spec: how an administrator wants GPUs shared.

The one source of its CRD, of its documentation and of what the operator reads.
"""

from typing import Annotated, Literal

from ballast_policies.allocation.custom import CALLABLE
from ballast_policies.allocation.policy import SpaceSharing
from ballast_policies.allocation.problem import ENTITY_POLICIES, ProblemError
from ballast_policies.allocation.registry import DEFAULT_POLICY, POLICIES, find_policy
from ballast_policies.contract.conditions import Cel, Rule
from pydantic import Field, field_validator

from ballast_operator.api import meta
from ballast_operator.api.base import ApiModel, LabelKey, Name, ObjectMeta, cel_list, listed, registered
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus
from ballast_operator.api.costs import DataPrice, SpotLimits, TeamBudget
from ballast_operator.api.node_pool import CapacityType, NodePool

_Seconds = Annotated[float, Field(ge=0, le=1e9)]
_Limit = Annotated[int, Field(ge=0, le=1_000_000)]
_ByType = Annotated[dict[str, _Limit], Field(max_length=64)]


class EntityShare(ApiModel):
    """A team: jobs name it in ``spec.entity``."""

    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share relative to the teams and jobs beside it."""
    policy: Annotated[str, Field(json_schema_extra={"enum": list(ENTITY_POLICIES)})] = ENTITY_POLICIES[0]
    """Division of its share inside: ``fairness`` by weight, ``fifo`` first come, first served."""
    by_user: bool = False
    """Its share is divided equally between its users (``spec.user`` of jobs), and by ``policy`` inside."""
    parent: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """The team that it is a part of; absent: none."""
    max_gpus_by_type: _ByType | None = None
    """GPU type -> GPUs of it that its jobs, its parts' too, may hold at a time, under every policy."""

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ENTITY_POLICIES:
            raise ValueError(f"{value!r} is not one of {', '.join(ENTITY_POLICIES)}")
        return value


_SHARING = POLICIES.own(lambda policy: policy.space_sharing is SpaceSharing.ALWAYS)

CHOOSABLE = tuple(name for name in POLICIES.builtin if name not in _SHARING)
"""Ballast's own policies that a ClusterPolicy can name."""


class Objective(ApiModel):
    """Objective of the allocation. Any policy may follow any other, live: by changing one line."""

    RULES = (
        registered("policy", POLICIES, also=CALLABLE, described="or module:function of the operator's image"),
        Rule(
            condition=Cel(
                f"!has(self.policy) || !(self.policy in {cel_list(_SHARING)})",
                lambda objective: find_policy(objective.policy).space_sharing is not SpaceSharing.ALWAYS,
            ),
            field="policy",
            reason=f"policy {', '.join(_SHARING)} puts any two jobs on the same GPUs by trial",
            fix="name another policy, under which jobs that allow it share GPUs (nodePools[].sharing)",
        ),
        Rule(
            condition=Cel(
                "!has(self.entities) || self.entities.all(name, size(name) > 0 && size(name) <= 253)",
                lambda objective: all(0 < len(name) <= 253 for name in objective.entities),
            ),
            field="entities",
            reason="an entity's name has 1 to 253 characters",
            fix="rename it",
        ),
        Rule(
            condition=Cel(
                "!has(self.entities) || self.entities.all(name, !has(self.entities[name].parent) || "
                "(self.entities[name].parent != name && self.entities[name].parent in self.entities))",
                lambda objective: all(
                    entity.parent is None or (entity.parent != name and entity.parent in objective.entities)
                    for name, entity in objective.entities.items()
                ),
            ),
            field="entities",
            reason="an entity's parent is not another of the entities",
            fix="name one of them, or leave it out",
        ),
        # CEL has no loops: only the operator sees a circle, and says so in the condition Valid.
        Rule(
            condition=lambda objective: all(_ends(name, objective.entities) for name in objective.entities),
            field="entities",
            reason="the entities' parents lead in a circle",
            fix="let one of them have no parent",
        ),
    )

    policy: Name = DEFAULT_POLICY
    """Name of the policy: one of docs/policies.md, ``prefix.name`` of a distribution in the operator's
    image, or ``module:function`` of that image, called in its solver process."""
    heterogeneity_agnostic: bool = False
    """The baseline: each GPU type that a job may use counts as fast as the job's fastest. What it reaches
    is reported with the real speeds."""
    entities: Annotated[dict[str, EntityShare], Field(max_length=64)] = Field(default_factory=dict)
    """Teams by name, for ``hierarchical``. Empty: each team that jobs name has weight 1."""

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            find_policy(value)
        except ProblemError as error:
            raise ValueError(str(error).removeprefix("policy: ")) from error
        return value


def _ends(name: str, entities: "dict[str, EntityShare]") -> bool:
    """True if the parents of ``name`` come to an end; an unknown parent is another rule's matter."""
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        entity = entities.get(name)
        if entity is None or entity.parent is None:
            return True
        name = entity.parent
    return False


class Moves(ApiModel):
    """Limits on how often the allocation moves gangs."""

    min_run_seconds: _Seconds = 0.0
    """A gang keeps its GPUs while it starts, and at least this long from its first step on."""
    max_moves_per_hour: Annotated[int, Field(ge=0, le=3600)] = 12
    """Gangs, of all jobs together, that may be stopped for another placement in an hour; one whose node is
    gone does not count."""


class Solver(ApiModel):
    """Limits of the solver."""

    time_limit_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds after which the solver is ended and the greedy fallback decides."""


class NamespaceLimits(ApiModel):
    """Limits of one namespace; where a field is absent, that of ``eachNamespace`` holds."""

    max_gpus: _Limit | None = None
    """GPUs that its jobs may hold at a time; 0: none."""
    max_gpus_by_type: _ByType | None = None
    """GPU type -> GPUs of it that its jobs may hold at a time; other types have no limit of their own."""
    max_running_jobs: _Limit | None = None
    """Jobs that may hold GPUs at a time."""
    max_waiting_jobs: _Limit | None = None
    """Waiting jobs that take part in the allocation, the oldest first."""


class EachNamespace(ApiModel):
    """Limits of every namespace that has none of its own."""

    max_gpus: _Limit | None = None
    """GPUs that its jobs may hold at a time; absent: no limit."""
    max_gpus_by_type: _ByType | None = None
    """GPU type -> GPUs of it that its jobs may hold at a time; absent: no limit."""
    max_running_jobs: _Limit | None = None
    """Jobs that may hold GPUs at a time; absent: no limit."""
    max_waiting_jobs: _Limit = 10_000
    """Waiting jobs that take part in the allocation, the oldest first."""


class Tenants(ApiModel):
    """Limits that keep one namespace from taking everything; weights and teams share what is below them."""

    each_namespace: EachNamespace = EachNamespace()
    """Limits of every namespace."""
    namespaces: Annotated[dict[str, NamespaceLimits], Field(max_length=1024)] = Field(default_factory=dict)
    """Namespace -> limits of its own."""

    def of(self, namespace: str) -> NamespaceLimits:
        """The namespace's own limits, and those of every namespace where it has none."""
        own = dict(self.namespaces.get(namespace, NamespaceLimits()))
        stated = {name: limit for name, limit in own.items() if limit is not None}
        return NamespaceLimits.model_construct(**{**dict(self.each_namespace), **stated})

    def field_of(self, namespace: str, limit: str) -> str:
        """Field that states the limit of the namespace."""
        own = self.namespaces.get(namespace)
        part = f"namespaces.{namespace}" if own is not None and limit in own.to_dict() else "eachNamespace"
        return f"tenants.{part}.{limit}"


UNHEALTHY = (
    "GpuMemWatch",
    "GpuInforomWatch",
    "GpuSmWatch",
    "GpuNvlinkWatch",
    "GpuMcuWatch",
    "GpuPmuWatch",
    "GpuDriverWatch",
    "SysLogsXIDError",
    "SysLogsSXIDError",
    "SysLogsGPUFallenOff",
    "GPUMissing",
    "NVLinkStatusInactive",
    "AcceleratedHardwareReady=False",
)
"""Conditions of nodes whose GPUs are broken: NVSentinel's fatal ones (by DCGM and the system's log), those of
AKS's node-problem-detector and of EKS's monitoring agent; not AKS's ``XIDErrors``, which any job can cause.

https://github.com/NVIDIA/NVSentinel, https://learn.microsoft.com/azure/aks/node-problem-detector,
https://docs.aws.amazon.com/eks/latest/userguide/node-health.html
"""


_ConditionOfNode = Annotated[
    str, Field(min_length=1, max_length=316, pattern=r"^[A-Za-z0-9][-A-Za-z0-9_./]*(=(True|False))?$")
]


class NodeHealth(ApiModel):
    """Criteria of sick nodes. What runs there is not stopped."""

    unhealthy_conditions: Annotated[tuple[_ConditionOfNode, ...], listed(64, unique=True)] = UNHEALTHY
    """Conditions of nodes on which nothing is started: a type that is ``True``, or ``type=False``."""
    failed_jobs: Annotated[int, Field(ge=2, le=100)] = 2
    """So many jobs whose pods failed, or ranks are slow, on a node make it avoided; one alone never does."""
    within_seconds: Annotated[float, Field(gt=0, le=604_800)] = 3600.0
    """These count together when they are this close to each other."""
    avoid_seconds: Annotated[float, Field(ge=0, le=604_800)] = 3600.0
    """Seconds such a node is avoided, as long as others fit; 0: not at all."""


class TopologyLevel(ApiModel):
    """A level of the topology: nodes with the same value of its label, and of those above, are a domain."""

    node_label: LabelKey
    """Label of nodes, as ``topology.kubernetes.io/rack``. A node without it is a domain of its own."""


class Topology(ApiModel):
    """Distance of nodes to each other, as in Kueue's Topology."""

    levels: Annotated[tuple[TopologyLevel, ...], listed(8, "nodeLabel")] = ()
    """Levels from the widest to the narrowest, as block, rack."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the levels, the widest first."""
        return tuple(level.node_label for level in self.levels)


class ClusterPolicySpec(ApiModel):
    """Rules by which GPUs are shared."""

    RULES = (
        Rule(
            condition=Cel(
                "self.moves.minRunSeconds <= 100.0 * double(self.roundSeconds)",
                lambda spec: spec.moves.min_run_seconds <= 100 * spec.round_seconds,
            ),
            field="moves.min_run_seconds",
            reason="moves.minRunSeconds is over a hundred rounds: nothing would ever move",
            fix="lower it, or set moves.maxMovesPerHour to 0",
        ),
        Rule(
            condition=Cel(
                "!has(self.budgets) || self.budgets.all(team, size(team) > 0 && size(team) <= 253)",
                lambda spec: all(0 < len(team) <= 253 for team in spec.budgets),
            ),
            field="budgets",
            reason="a team's name has 1 to 253 characters",
            fix="name the team as jobs do in spec.entity",
        ),
        Rule(
            condition=Cel(
                "!has(self.spot) || !has(self.spot.onDemandShare) || self.spot.onDemandShare == 0.0 || "
                "self.nodePools.exists(pool, !has(pool.capacityType) || pool.capacityType != 'spot')",
                lambda spec: (
                    spec.spot.on_demand_share == 0
                    or any(pool.capacity_type is not CapacityType.SPOT for pool in spec.node_pools)
                ),
            ),
            field="spot.on_demand_share",
            reason="spot.onDemandShare is above 0 and every pool is spot: nothing would ever be started",
            fix="add a pool of machines on demand, or leave it out",
        ),
    )

    objective: Objective = Objective()
    """Objective of the allocation."""
    round_seconds: Annotated[int, Field(ge=1, le=86_400)] = 360
    """Length of a round: how often GPUs may change hands. Arrivals and free GPUs are looked at at once."""
    node_pools: Annotated[tuple[NodePool, ...], listed(128, "name", least=1)]
    """The nodes that Ballast gives to jobs."""
    moves: Moves = Moves()
    """Limits on moves of running jobs."""
    solver: Solver = Solver()
    """Limits of the solver."""
    tenants: Tenants = Tenants()
    """Limits of namespaces. What runs is never stopped for them."""
    spot: SpotLimits = SpotLimits()
    """Limits of spot machines. What runs is never stopped for them."""
    topology: Topology = Topology()
    """Racks, blocks and NVLink domains, by labels of nodes: gangs are kept together there."""
    node_health: NodeHealth = NodeHealth()
    """Criteria of sick nodes, which are kept from new launches."""
    budgets: Annotated[dict[str, TeamBudget], Field(max_length=256)] = Field(default_factory=dict)
    """Team -> what its jobs may cost, under every policy. Jobs name their team in ``spec.entity``."""
    data_prices: Annotated[tuple[DataPrice, ...], listed(256, "fromRegion", "toRegion")] = ()
    """Prices of data between regions, for jobs with ``spec.dataLocation``: the most exact entry counts.
    Without a price a job is not placed there."""
    dry_run: bool = False
    """Decide and say so, but start and stop nothing."""


class ClusterPolicy(ApiModel):
    """Rules by which an administrator shares the GPUs of a cluster between training jobs."""

    api_version: Literal["ballast.dev/v1alpha1"] = meta.API_VERSION
    """Group and version."""
    kind: Literal["ClusterPolicy"] = meta.CLUSTER_POLICY_KIND
    """Kind."""
    metadata: ObjectMeta
    """Name."""
    spec: ClusterPolicySpec
    """Rules by which GPUs are shared."""
    status: ClusterPolicyStatus = ClusterPolicyStatus()
    """State of the policy: its capacity, decisions and costs."""
