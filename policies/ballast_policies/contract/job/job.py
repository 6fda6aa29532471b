"""The whole configuration of a job, and the rules over several of its parts."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field

from ballast_policies.contract.conditions import AllOf, ItemRows, Items, RowFact, Rule, absent, at, given
from ballast_policies.contract.decode import decode, decode_text
from ballast_policies.contract.job.dynamics import DynamicConfig
from ballast_policies.contract.job.model import DataConfig, ModelConfig
from ballast_policies.contract.job.output import (
    EXPORT_RULES,
    CallbackConfig,
    CheckpointConfig,
    ExportConfig,
    MetricsConfig,
    ProfilingConfig,
)
from ballast_policies.contract.job.pipeline import (
    PLAN_RULES,
    ParallelismConfig,
    PipelineConfig,
    PlanConfig,
    RebalanceConfig,
    RepackConfig,
    StragglerPolicy,
)
from ballast_policies.contract.job.rules import CHANGE_RULES, OPTIMIZER_RULES, POD_RULES, with_model_only
from ballast_policies.contract.job.training import (
    EVALUATION_RULES,
    Decay,
    EvaluationConfig,
    Precision,
    TrainingConfig,
)
from ballast_policies.contract.limits import OBJECT
from ballast_policies.contract.model import InCluster, Keyed, Settings
from ballast_policies.planning.balancers.registry import BALANCERS
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_policies.planning.schedules.registry import SCHEDULES, replicable_schedules

_WHOLE_LAYERS = DYNAMICS.own(lambda case: not case.inside_layers)
_COMPARE_RANKS = ", ".join(DYNAMICS.own(lambda case: case.compares_ranks))
_ONE_EACH = Items("pipeline.replicas", 1)
_FLUSHES = RowFact("pipeline.schedule", SCHEDULES, lambda kind: not kind.asynchronous)
_REPLICABLE = RowFact("pipeline.schedule", SCHEDULES, lambda kind: kind.build_replicated is not None)
_ONE_RANK_PER_POSITION = at("parallelism.tensor") * at("parallelism.data") == 1


def _balancer_predicts(config: "JobConfig") -> bool:
    schedules = BALANCERS[config.rebalance.balancer].schedules
    return schedules is None or config.pipeline.schedule in schedules


_RULES = (
    *with_model_only(
        pipeline=PipelineConfig,
        parallelism=ParallelismConfig,
        plan=None,
        dynamics=tuple,
        rebalance=RebalanceConfig,
        repack=RepackConfig,
        training=TrainingConfig,
        data=None,
        metrics=MetricsConfig,
        evaluation=None,
        callback=None,
        profiling=None,
        export=None,
    ),
    *EVALUATION_RULES,
    *EXPORT_RULES,
    Rule(
        condition=absent("model") | (at("pipeline.max_stages") <= at("pipeline.microbatches")),
        field="pipeline.max_stages",
        reason="maxStages is above microbatches: a pipeline needs at least one microbatch per stage",
        fix="raise microbatches or lower maxStages",
    ),
    Rule(
        condition=at("pipeline.max_stages") <= at("model.layers"),
        field="pipeline.max_stages",
        reason="maxStages is above model.layers: a stage needs at least one layer",
        fix="lower maxStages",
    ),
    Rule(
        condition=(at("pipeline.max_stages") == 1)
        | (at("pipeline.max_stages") * at("pipeline.stages_per_rank") <= at("model.layers")),
        field="pipeline.stages_per_rank",
        reason="maxStages x stagesPerRank is above model.layers: each needs at least one layer",
        fix="lower stagesPerRank or maxStages",
    ),
    Rule(
        # What most jobs have is asked for first: the API server reads one field of the two.
        condition=(at("repack.min_stages") == 1) | (at("repack.min_stages") <= at("pipeline.max_stages")),
        field="repack.min_stages",
        reason="repack.minStages is above pipeline.maxStages: the job could never shrink",
        fix="lower repack.minStages",
    ),
    Rule(
        condition=at("pipeline.min_stages") <= at("repack.target_stages"),
        field="repack.target_stages",
        reason="repack.targetStages is below pipeline.minStages: the job could never shrink to it",
        fix="raise repack.targetStages or lower pipeline.minStages",
    ),
    Rule(
        condition=at("repack.target_stages") <= at("pipeline.max_stages"),
        field="repack.target_stages",
        reason="repack.targetStages is above pipeline.maxStages: the job could never shrink to it",
        fix="lower repack.targetStages",
    ),
    *(
        Rule(
            condition=condition,
            field="rebalance.balancer",
            reason="this balancer predicts the steps of other schedules only",
            fix="pipeline.schedule: 1F1B, or balancer: exact",
        )
        # The second is for balancers of other distributions, which CEL has no list of.
        for condition in (
            AllOf(
                tuple(
                    at("rebalance.balancer").is_not_in([name])
                    | at("pipeline.schedule").is_in(sorted(kind.schedules))
                    for name, kind in BALANCERS.builtin.items()
                    if kind.schedules is not None
                )
            ),
            _balancer_predicts,
        )
    ),
    Rule(
        condition=RowFact("rebalance.balancer", BALANCERS, lambda kind: kind.replicas) | _ONE_EACH,
        field="rebalance.balancer",
        reason="this balancer has no pipeline.replicas",
        fix="leave replicas out, or balancer: exact",
    ),
    Rule(
        condition=_FLUSHES | (at("training.clip_norm") == 0.0),
        field="training.clip_norm",
        reason="clipNorm needs a schedule with a flush: without one no stage knows the norm over all stages",
        fix="leave clipNorm out, or use a schedule with a flush, e.g. 1F1B",
    ),
    Rule(
        condition=_FLUSHES | (at("training.precision") != Precision.FP16),
        field="training.precision",
        reason="fp16 needs a schedule with a flush: without one no step can be undone on all stages when one "
        "overflows",
        fix="precision: bf16 or fp32",
    ),
    Rule(
        condition=_FLUSHES | (at("training.skip_bad_samples") == 0),
        field="training.skip_bad_samples",
        reason="without a flush ranks are at several steps, and cannot agree on what to leave out",
        fix="0, or a schedule with a flush, e.g. 1F1B",
    ),
    Rule(
        condition=_FLUSHES | (at("parallelism.tensor") == 1),
        field="parallelism.tensor",
        reason="a schedule without a flush has whole layers on its ranks",
        fix="tensor: 1, or a schedule with a flush, e.g. 1F1B",
    ),
    Rule(
        condition=(at("pipeline.microbatches") % at("parallelism.data") == 0) | (at("parallelism.data") == 1),
        field="parallelism.data",
        reason="pipeline.microbatches is not a multiple of parallelism.data, whose replicas share them",
        fix="choose a multiple",
    ),
    Rule(
        condition=(at("parallelism.zero_stage") == 0) | (at("parallelism.data") != 1),
        field="parallelism.zero_stage",
        reason="zeroStage shares the optimizer's state between replicas, and parallelism.data is 1",
        fix="parallelism.data: 2 or more, or leave zeroStage out",
    ),
    Rule(
        condition=(at("parallelism.zero_stage") == 0) | _FLUSHES,
        field="parallelism.zero_stage",
        reason="a schedule without a flush has several versions of the weights, each whole on every replica",
        fix="a schedule with a flush, e.g. 1F1B, or leave zeroStage out",
    ),
    Rule(
        condition=(at("parallelism.zero_stage") < 2)
        | RowFact("pipeline.schedule", SCHEDULES, lambda kind: not kind.splits_backward),
        field="parallelism.zero_stage",
        reason="a schedule that splits the backward has a stage's whole gradients at once",
        fix="zeroStage: 1, or pipeline.schedule: 1F1B",
    ),
    Rule(
        condition=(at("parallelism.zero_stage") < 2)
        | (at("parallelism.tensor") == 1)
        | (at("parallelism.stragglers.policy") == StragglerPolicy.NONE),
        field="parallelism.zero_stage",
        reason="what stragglers leave out or hand over is added to a step's whole gradients",
        fix="zeroStage: 1, or stragglers.policy: none",
    ),
    *OPTIMIZER_RULES,
    Rule(
        condition=_ONE_EACH | _REPLICABLE,
        field="pipeline.replicas",
        reason="this schedule has no replicas of a stage",
        fix=f"leave replicas out, or use one of {', '.join(replicable_schedules())}",
    ),
    Rule(
        condition=_ONE_EACH | _ONE_RANK_PER_POSITION,
        field="parallelism",
        reason="pipeline.replicas are chosen stage by stage, with one rank for each",
        fix="data: 1 and tensor: 1, or leave replicas out",
    ),
    Rule(
        condition=_ONE_EACH | (at("repack.enabled") == False),  # noqa: E712 - a comparison as a value
        field="repack.enabled",
        reason="pipeline.replicas fix the number of ranks",
        fix="repack.enabled: false, or leave replicas out",
    ),
    Rule(
        condition=_ONE_EACH | ItemRows("dynamics", DYNAMICS, lambda case: not case.compares_ranks, "kind"),
        field="dynamics",
        reason=f"a change that compares weights rank by rank ({_COMPARE_RANKS}) would count those of "
        "pipeline.replicas several times",
        fix=f"leave {_COMPARE_RANKS} or replicas out",
    ),
    Rule(
        condition=(at("parallelism.tensor") == 1)
        | ItemRows("dynamics", DYNAMICS, lambda case: not case.inside_layers, "kind"),
        field="dynamics",
        reason=f"parallelism.tensor cuts layers, of the changes only {', '.join(_WHOLE_LAYERS)} allows that",
        fix="tensor: 1, with parallelism.data or more stages in its place",
    ),
    *(
        Rule(
            condition=(at(field) == False)  # noqa: E712
            | ItemRows("dynamics", DYNAMICS, lambda case: not case.inside_layers, "kind"),
            field=field,
            reason="what changes the inside of layers knows no ends of packed samples, of the changes only "
            f"{', '.join(_WHOLE_LAYERS)} may go with packing",
            fix="packing: false with padToMultipleOf, or leave the change out",
        )
        for field in ("data.packing", "evaluation.data.packing")
    ),
    Rule(
        condition=_FLUSHES | (at("checkpoint.in_memory_every_steps") == 0),
        field="checkpoint.in_memory_every_steps",
        reason="without a flush the weights depend on where the pipeline drains, which copies would change",
        fix="0, or a schedule with a flush, e.g. 1F1B",
    ),
    Rule(
        condition=_ONE_EACH | (at("checkpoint.in_memory_every_steps") == 0),
        field="checkpoint.in_memory_every_steps",
        reason="pipeline.replicas fix the number of ranks, and none may be lost",
        fix="0, or parallelism.data in place of replicas",
    ),
    *CHANGE_RULES,
    *POD_RULES,
    *PLAN_RULES,
    Rule(
        condition=(at("parallelism.tensor") == 1)
        | at("parallelism.stragglers.policy").is_in([StragglerPolicy.NONE, StragglerPolicy.RESIZE])
        | RowFact("pipeline.schedule", SCHEDULES, lambda kind: not kind.splits_backward),
        field="parallelism.stragglers.policy",
        reason="migrated columns return the gradients of weights and inputs together, which this schedule "
        "computes apart",
        fix="policy: resize, or pipeline.schedule: 1F1B",
    ),
    Rule(
        condition=(at("training.decay") == Decay.CONSTANT)
        | given("training.decay_steps")
        | (at("training.warmup_steps") < at("total_steps")),
        field="training.warmup_steps",
        reason="training.warmupSteps leaves no step for the decay",
        fix="lower it",
    ),
)


class JobConfig(Settings):
    """The fields of ``TrainingJob.spec`` that the trainer acts on."""

    RULES = _RULES

    total_steps: int = Field(ge=1, le=2**53)
    """Optimizer steps until the job has succeeded. A change takes effect at the next launch."""
    model: Annotated[
        ModelConfig | None, InCluster(immutable="the checkpoint holds the weights of this one")
    ] = None
    """The model to build. Absent: the job runs its template's own command, as it is, one process a GPU."""
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    """Passage of a step's batch through the stages. Changes take effect at the next launch."""
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    """Number of ranks at each position of the pipeline. Changes take effect at the next launch."""
    plan: PlanConfig | None = None
    """Partition of the layers at each launch, and the GPUs: as ``ballast plan`` prints it. Then ``rebalance``
    moves layers where it measures better. Absent: cut by what is known of layers and GPUs. Changes take
    effect at the next launch."""
    dynamics: Annotated[tuple[DynamicConfig, ...], Field(max_length=16), Keyed("kind")] = ()
    """Changes of the model while it trains, each kind once."""
    rebalance: RebalanceConfig = Field(default_factory=RebalanceConfig)
    """Conditions on which layers move between ranks."""
    repack: RepackConfig = Field(default_factory=RepackConfig)
    """Conditions on which GPUs are released."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """Optimizer, learning rate, precision and the like. Changes take effect at the next launch."""
    data: Annotated[DataConfig | None, InCluster(immutable="the step determines which samples come next")] = (
        None
    )
    """The training data. Absent: the model's own."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Place and frequency of checkpoints."""
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    """Outputs of rank 0's metrics, besides standard output and the job's status."""
    evaluation: EvaluationConfig | None = None
    """Measurement of the loss on validation data. Absent: never. Changes take effect at the next launch."""
    callback: CallbackConfig | None = None
    """Function of yours that is called at steps, evaluations and checkpoints. Changes take effect at the next
    launch."""
    profiling: ProfilingConfig | None = None
    """Steps that torch's profiler traces. Absent: none. Changes take effect at the next launch."""
    export: ExportConfig | None = None
    """Place of the whole model after the last step. Absent: nowhere; ``ballast-train export`` does it later.
    Changes take effect at the next launch."""

    @property
    def model_name(self) -> str:
        """Name of the model; empty where there is none."""
        return self.model.name if self.model is not None else ""

    @property
    def is_script(self) -> bool:
        """It runs its template's own command, and not the trainer."""
        return self.model is None

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> Self:
        """Read what JSON or YAML has.

        Raises:
            ContractError: fields are missing, unknown, of the wrong type or out of range; it names them all.
        """
        return decode(cls, value)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read ``config.json``, ignoring fields of a newer operator.

        Raises:
            ContractError: it is not JSON, above :data:`~ballast_policies.contract.limits.OBJECT`, or a field
                cannot be used.
        """
        return decode_text(cls, text, unknown="ignore", limits=OBJECT)

    def resolved(self) -> Self:
        """Configuration with what the schedule decides where it is left open: no clipping without a flush."""
        if self.training.clip_norm is not None or not SCHEDULES[self.pipeline.schedule].asynchronous:
            return self
        return self.replace(training=self.training.replace(clip_norm=0.0))
