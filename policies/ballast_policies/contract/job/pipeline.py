"""The pipeline's stages and the batch of a step, and a plan of ``ballast plan`` for them.

The plan says where the layers are cut, and which GPUs the stages are on. Beside them stand how many ranks
work at each position and what they do about slow ones, and when a job changes its shape while it trains:
layers that move between ranks, ranks that are released.
"""

import enum
import itertools
from typing import Annotated, Any

from pydantic import Field

from ballast_policies.contract.conditions import AllOf, Cel, Condition, RowFact, Rule, absent, at, given
from ballast_policies.contract.limits import MOST_LAYERS, MOST_MICROBATCHES, MOST_REPLICAS
from ballast_policies.contract.model import InCluster, Keyed, Named, Settings
from ballast_policies.planning.balancers.registry import BALANCERS, DEFAULT_BALANCER
from ballast_policies.planning.schedules.registry import (
    DEFAULT_SCHEDULE,
    DEFAULT_STAGES_PER_RANK,
    SCHEDULES,
    trained_schedules,
)


class BalanceBy(enum.StrEnum):
    """Quantity that is spread evenly over the ranks."""

    TIME = "time"
    PARAMETERS = "parameters"


class RebalanceConfig(Settings):
    """Conditions on which layers move between the ranks of a job while it trains."""

    RULES = (
        Rule(
            condition=RowFact("balancer", BALANCERS, lambda kind: kind.balances_parameters)
            | (at("by") == BalanceBy.TIME),
            field="by",
            reason="this balancer weighs seconds on links, which parameters cannot be compared with",
            fix="by: time, or balancer: exact",
        ),
        Rule(
            condition=RowFact("balancer", BALANCERS, lambda kind: kind.limits_memory)
            | absent("memory_bytes"),
            field="balancer",
            reason="this balancer has no limit of memory",
            fix="leave memoryBytes out, or balancer: exact",
        ),
    )

    enabled: bool = True
    """Layers move."""
    every_steps: int | None = Field(None, ge=1, le=2**31 - 1)
    """Steps between two decisions. Absent: a decision is due when the steps since the last one have lost as
    much time to uneven ranks as a decision and a move cost; of a schedule without a flush, every 20
    steps."""
    min_gain: float = Field(0.05, ge=0, le=1)
    """Layers move where the predicted step time falls by at least this fraction; where what is measured is
    noisy, by as much more as noise may feign, up to 0.1. 0: whatever is gained."""
    balancer: Annotated[str, Field(max_length=253), Named(BALANCERS)] = DEFAULT_BALANCER
    """Method that chooses the partition: a name under [Balancers](#balancers), or ``prefix.name`` of a
    distribution that is installed in the operator's and the trainer's image."""
    by: BalanceBy = BalanceBy.TIME
    """Quantity to spread evenly: measured ``time``, or ``parameters``, which need no measuring."""
    memory_bytes: int | None = Field(None, ge=1, le=2**53)
    """Limit of what parameters, gradients, optimizer state, and the measured activations and messages of the
    microbatches in flight take on a rank, after rebalances and repacks. Absent: no limit."""


class RepackConfig(Settings):
    """Conditions on which the job releases GPUs while it trains."""

    RULES = (
        Rule(
            condition=at("min_stages") <= at("target_stages"),
            field="target_stages",
            reason="targetStages is below minStages",
            fix="raise targetStages or lower minStages",
        ),
        Rule(
            condition=absent("target_stages") | (at("enabled") == True),  # noqa: E712 - a comparison as a value
            field="target_stages",
            reason="repack.enabled is false: targetStages has no effect",
            fix="enabled: true, or leave targetStages out",
        ),
    )

    enabled: bool = False
    """The job releases GPUs."""
    min_stages: int = Field(1, ge=1, le=1024)
    """Fewest stages that it may shrink to."""
    target_stages: int | None = Field(None, ge=1, le=1024)
    """Continue on this many positions of the pipeline, or on all. Absent: on the fewest that are enough."""
    every_steps: int = Field(20, ge=1, le=2**31 - 1)
    """Steps between two decisions."""
    max_slowdown: float = Field(0.1, ge=0, le=100)
    """Shrink where the predicted step time is at most that of before layers got cheaper x (1 + this)."""


class StragglerPolicy(enum.StrEnum):
    """Remedy of a tensor-parallel group for late ranks."""

    NONE = "none"
    RESIZE = "resize"
    MIGRATE = "migrate"
    SEMI = "semi"


class Selection(enum.StrEnum):
    """Choice of the columns that a late rank skips."""

    PRIORITY = "priority"
    RANDOM = "random"


class Imputation(enum.StrEnum):
    """Replacement of a gradient that is not computed."""

    ZERO = "zero"
    AVERAGE = "average"
    SAME = "same"


class StragglersConfig(Settings):
    """Handling of late ranks in a tensor-parallel group."""

    policy: StragglerPolicy = StragglerPolicy.NONE
    """``none``; ``resize``: a late rank skips columns (some accuracy is lost); ``migrate``: other ranks
    compute its columns (nothing is lost); ``semi``: the cheaper split of both."""
    selection: Selection = Selection.PRIORITY
    """Columns to skip: ``priority``, those whose weights change least, or ``random`` ones."""
    differentiated: bool = False
    """More is skipped in layers that change little, and less in the others."""
    imputation: Imputation = Imputation.ZERO
    """Replacement of a gradient that is not computed: ``zero``, ``average``, or the ``same`` as last time."""
    epoch_steps: int = Field(20, ge=1, le=2**31 - 1)
    """Steps between two choices of columns."""
    tolerance: float = Field(0.05, ge=0, le=1000)
    """A rank is late where it is slower than the fastest by more than this fraction."""


class ParallelismConfig(Settings):
    """Number of ranks at each position of the pipeline: ``tensor`` x ``data``."""

    tensor: int = Field(1, ge=1, le=1024)
    """Ranks that share the matrices of each layer."""
    data: int = Field(1, ge=1, le=MOST_REPLICAS)
    """Replicas of the pipeline; each takes its share of the microbatches."""
    zero_stage: int = Field(0, ge=0, le=3)
    """State of which the replicas (``data``) have a part each instead of all: 0, nothing; 1, the optimizer's
    state (ZeRO-1): each updates its part of the weights and gets the other parts; 2, the gradients, too
    (ZeRO-2): they are summed after each microbatch instead of each step; 3, the weights, too (ZeRO-3): those
    of a layer are gathered for each of its forwards and backwards, one layer at a time."""
    gpus_per_pod: int | None = Field(None, ge=1, le=1024)
    """GPUs of each pod, one process for each: as many as a node has, so that its ranks reach each other over
    NVLink and shared memory. The job has, takes and releases whole pods. Absent: ``tensor``, so
    that a tensor group is on one node."""
    scatter_gather: bool = True
    """Each tensor-parallel rank sends its part of the activations between stages, which the receivers put
    together."""
    stragglers: StragglersConfig = Field(default_factory=StragglersConfig)
    """Handling of slow ranks in a tensor-parallel group."""

    @property
    def ranks_per_position(self) -> int:
        """Ranks at one position of the pipeline."""
        return self.tensor * self.data

    @property
    def optimizer_shares(self) -> int:
        """Number of replicas that share a layer's optimizer."""
        return self.data if self.zero_stage else 1

    @property
    def gradient_shares(self) -> int:
        """Number of replicas that share a layer's gradients."""
        return self.data if self.zero_stage >= 2 else 1

    @property
    def weight_shares(self) -> int:
        """Number of replicas that share a layer's weights."""
        return self.data if self.zero_stage >= 3 else 1

    @property
    def ranks_per_pod(self) -> int:
        """Ranks of each pod, and its GPUs."""
        return self.gpus_per_pod or self.tensor


def _fixed_stages_rules() -> tuple[Rule, ...]:
    """``stagesPerRank`` is left out, or is what the schedule has."""
    free = [name for name in trained_schedules() if SCHEDULES[name].stages_per_rank is None]
    fixed: dict[int, list[str]] = {}
    for name in trained_schedules():
        count = SCHEDULES[name].stages_per_rank
        if count is not None:
            fixed.setdefault(count, []).append(name)
    facts: dict[str, Any] = {
        "field": "stages_per_rank",
        "reason": "the schedule has another number of stages per rank",
        "fix": f"leave stagesPerRank out, or use one of {', '.join(free)}",
    }
    condition: Condition = AllOf(
        tuple(
            at("schedule").is_not_in(names) | (at("stages_per_rank") == count)
            for count, names in sorted(fixed.items())
        )
    )
    # For CEL, whose first rule does not read the default; schedules of other distributions it has no list of.
    unnamed = given("schedule") | (at("stages_per_rank") == SCHEDULES[DEFAULT_SCHEDULE].stages_per_rank)
    return tuple(Rule(condition=each, **facts) for each in (condition, unnamed, _suits_row))


def _suits_row(pipeline: "PipelineConfig") -> bool:
    own = SCHEDULES[pipeline.schedule].stages_per_rank
    return pipeline.stages_per_rank is None or own in (None, pipeline.stages_per_rank)


def _unshared(pipeline: "PipelineConfig") -> str | None:
    if not pipeline.used_replicas:
        return None
    return SCHEDULES[pipeline.schedule].unshared(pipeline.used_replicas, pipeline.microbatches)


class PipelineConfig(Settings):
    """Passage of a step's batch through the stages of the pipeline."""

    RULES = (
        Rule(
            condition=at("min_stages") <= at("max_stages"),
            field="min_stages",
            reason="minStages is above maxStages",
            fix="lower minStages or raise maxStages",
        ),
        Rule(
            condition=at("global_batch_size") % at("microbatches") == 0,
            field="global_batch_size",
            reason="globalBatchSize is not a multiple of microbatches",
            fix="choose a multiple",
        ),
        *_fixed_stages_rules(),
        Rule(
            condition=lambda pipeline: _unshared(pipeline) is None,
            field="replicas",
            reason="replicas of a stage cannot share the microbatches",
            fix="raise microbatches to a multiple of every stage's replicas",
            explain=lambda pipeline: str(_unshared(pipeline)),
        ),
    )

    min_stages: int = Field(1, ge=1, le=1024)
    """Fewest stages that the job may be launched with; of a job without ``model``, fewest ranks (GPUs)."""
    max_stages: Annotated[int | None, Field(ge=1, le=1024), InCluster(required=True)] = None
    """Most stages that the job may be launched with; of a job without ``model``, most ranks (GPUs)."""
    microbatches: int = Field(8, ge=1, le=MOST_MICROBATCHES)
    """Microbatches that a batch is split into; at least one per stage."""
    global_batch_size: Annotated[
        int,
        Field(ge=1, le=2**31 - 1),
        InCluster(required_with="model", immutable="the order of the data follows from it"),
    ] = 16
    """Samples of one optimizer step, over all microbatches: a multiple of ``microbatches``. Required with
    ``model``."""
    schedule: Annotated[
        str,
        Field(max_length=253),
        Named(SCHEDULES, usable=lambda kind: kind.trained),
        InCluster(left_open=True),
    ] = DEFAULT_SCHEDULE
    """Order of the microbatches: a name under [Schedules](#schedules), or ``prefix.name`` of a distribution
    that is installed in the operator's and the trainer's image. Absent: 1F1B; with ``planner`` and
    a fixed number of GPUs, in one pool, the fastest that fits them."""
    stages_per_rank: int | None = Field(None, ge=1, le=1024)
    """Stages of the model on each rank, with LoopedBFS and the interleaved schedules. Absent: 2, or as many
    as the schedule has. ``minStages`` and ``maxStages`` count ranks of the pipeline all the same."""
    replicas: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field((), max_length=1024)
    """Number of ranks of each stage; microbatch k goes to replica k mod r. The job then has as many ranks
    as these add up to. Absent: one each."""

    @property
    def used_replicas(self) -> tuple[int, ...]:
        """The replicas of each stage; empty where every stage has one."""
        return self.replicas if any(count != 1 for count in self.replicas) else ()


_Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]


class PlannedGpus(Settings):
    """GPUs of one type of a plan."""

    gpu_type: Annotated[
        str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
    ]
    """The GPU type."""
    stages: int = Field(ge=1, le=1024)
    """Ranks of the pipeline on it, each with ``parallelism.tensor`` x ``parallelism.data`` GPUs."""


class PlanConfig(Settings):
    """Partition of the layers into stages, and their GPUs."""

    layers: tuple[_Layers, ...] = Field(min_length=1, max_length=1024)
    """Number of layers of each stage, in their order: together those of the model."""
    gpus: Annotated[tuple[PlannedGpus, ...], Field(max_length=64), Keyed("gpu_type")] = ()
    """GPU types in the order of the ranks. Several need ``mixedPools: Allowed``. Absent: any one type."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bounds of the stages in layers, 0 and the number of layers included."""
        return tuple(itertools.accumulate(self.layers, initial=0))


def _stages(config: Any) -> int | None:
    """Stages that a plan of the job has; None: left to the launch."""
    pipeline: PipelineConfig = config.pipeline
    if pipeline.replicas:
        return len(pipeline.replicas)
    if pipeline.max_stages is None or pipeline.max_stages == 1:
        return pipeline.max_stages
    each = SCHEDULES[pipeline.schedule].stages_on_a_rank(pipeline.stages_per_rank)
    return pipeline.max_stages * each


_SEVERAL = [name for name, kind in SCHEDULES.builtin.items() if kind.stages_on_a_rank() > 1]
_EACH = (
    "has(self.pipeline.stagesPerRank) ? self.pipeline.stagesPerRank : "
    f"has(self.pipeline.schedule) && self.pipeline.schedule in {_SEVERAL} ? {DEFAULT_STAGES_PER_RANK} : 1"
)
_REPLICAS = "has(self.pipeline.replicas) && size(self.pipeline.replicas) > 0"

PLAN_RULES = (
    Rule(
        condition=absent("plan") | (at("pipeline.min_stages") == at("pipeline.max_stages")),
        field="pipeline.min_stages",
        reason="plan is of one number of stages, and minStages is not maxStages",
        fix="minStages: maxStages, or leave plan out",
    ),
    Rule(
        condition=absent("plan") | (at("repack.enabled") == False),  # noqa: E712 - a comparison as a value
        field="repack.enabled",
        reason="plan fixes the number of ranks",
        fix="repack.enabled: false, or leave plan out",
    ),
    Rule(
        condition=Cel(
            "!has(self.plan) || !has(self.model) || !has(self.model.layers) || "
            "self.plan.layers.sum() == self.model.layers",
            lambda config: (
                config.plan is None
                or config.model is None
                or config.model.layers in (None, sum(config.plan.layers))
            ),
        ),
        field="plan.layers",
        reason="the layers of the stages do not add up to model.layers",
        fix="plan with a profile of this model",
        explain=lambda config: (
            f"plan.layers are {sum(config.plan.layers)} together, model.layers is {config.model.layers}"
        ),
    ),
    Rule(
        condition=Cel(
            "!has(self.plan) || !has(self.pipeline.maxStages) || size(self.plan.layers) == "
            f"({_REPLICAS} ? size(self.pipeline.replicas) : self.pipeline.maxStages == 1 ? 1 : "
            f"self.pipeline.maxStages * ({_EACH}))",
            lambda config: config.plan is None or _stages(config) in (None, len(config.plan.layers)),
        ),
        field="plan.layers",
        reason="plan.layers has another number of stages than pipeline.maxStages (x stagesPerRank)",
        fix="the pipeline of the same plan",
        explain=lambda config: (
            f"plan.layers has {len(config.plan.layers)} stages, the pipeline of maxStages {_stages(config)}"
        ),
    ),
    Rule(
        condition=Cel(
            "!has(self.plan) || !has(self.plan.gpus) || size(self.plan.gpus) == 0 || "
            "!has(self.pipeline.maxStages) || "
            "self.plan.gpus.map(g, g.stages).sum() == self.pipeline.maxStages",
            lambda config: (
                config.plan is None
                or not config.plan.gpus
                or config.pipeline.max_stages in (None, sum(of_type.stages for of_type in config.plan.gpus))
            ),
        ),
        field="plan.gpus",
        reason="the stages of plan.gpus do not add up to pipeline.maxStages",
        fix="the pipeline of the same plan",
        explain=lambda config: (
            f"the stages of plan.gpus are {sum(of_type.stages for of_type in config.plan.gpus)}, "
            f"pipeline.maxStages is {config.pipeline.max_stages}"
        ),
    ),
)
