"""A plan of ``ballast plan`` in a job: where its layers are cut, and which GPUs its stages are on."""

import itertools
from typing import Annotated, Any

from pydantic import Field

from ballast_policies.contract.conditions import Cel, absent, at
from ballast_policies.contract.job.pipeline import PipelineConfig
from ballast_policies.contract.limits import MOST_LAYERS
from ballast_policies.contract.model import Keyed, Settings
from ballast_policies.contract.rules import Rule
from ballast_policies.planning.schedules import DEFAULT_STAGES_PER_RANK, SCHEDULES

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
    """Where the layers are cut, and on which GPUs."""

    layers: tuple[_Layers, ...] = Field(min_length=1, max_length=1024)
    """Number of layers of each stage, in their order: together those of the model."""
    gpus: Annotated[tuple[PlannedGpus, ...], Field(max_length=64), Keyed("gpu_type")] = ()
    """GPU types in the order of the ranks. Several need ``mixedPools: Allowed``. Absent: any one type."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the layers are cut, 0 and their number included."""
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


def _explain_layers(config: Any) -> str:
    return f"plan.layers are {sum(config.plan.layers)} together, model.layers is {config.model.layers}"


def _explain_stages(config: Any) -> str:
    return f"plan.layers has {len(config.plan.layers)} stages, the pipeline of maxStages {_stages(config)}"


def _explain_gpus(config: Any) -> str:
    planned = sum(of_type.stages for of_type in config.plan.gpus)
    return f"the stages of plan.gpus are {planned}, pipeline.maxStages is {config.pipeline.max_stages}"


_SEVERAL = [name for name, kind in SCHEDULES.builtin.items() if kind.stages_on_a_rank() > 1]
_EACH = (
    "has(self.pipeline.stagesPerRank) ? self.pipeline.stagesPerRank : "
    f"self.pipeline.schedule in {_SEVERAL} ? {DEFAULT_STAGES_PER_RANK} : 1"
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
        explain=_explain_layers,
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
        explain=_explain_stages,
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
        explain=_explain_gpus,
    ),
)
