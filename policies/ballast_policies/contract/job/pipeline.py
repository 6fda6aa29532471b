"""How a step's batch passes through the stages of the pipeline."""

from typing import Annotated, Any

from pydantic import Field

from ballast_policies.contract.conditions import AllOf, Condition, at
from ballast_policies.contract.limits import MOST_MICROBATCHES
from ballast_policies.contract.model import InCluster, Named, Settings
from ballast_policies.contract.rules import Rule
from ballast_policies.planning.schedules import DEFAULT_SCHEDULE, SCHEDULES, trained_schedules


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
    # The second rule is for schedules of other distributions, which CEL has no list of.
    return Rule(condition=condition, **facts), Rule(condition=_suits_row, **facts)


def _suits_row(pipeline: "PipelineConfig") -> bool:
    own = SCHEDULES[pipeline.schedule].stages_per_rank
    return pipeline.stages_per_rank is None or own in (None, pipeline.stages_per_rank)


def _unshared(pipeline: "PipelineConfig") -> str | None:
    if not pipeline.used_replicas:
        return None
    return SCHEDULES[pipeline.schedule].unshared(pipeline.used_replicas, pipeline.microbatches)


class PipelineConfig(Settings):
    """How a step's batch passes through the stages of the pipeline."""

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
    schedule: Annotated[str, Field(max_length=253), Named(SCHEDULES, usable=lambda kind: kind.trained)] = (
        DEFAULT_SCHEDULE
    )
    """Order of the microbatches: a name under [Schedules](#schedules), or ``prefix.name`` of a distribution
    that is installed in the operator's and the trainer's image."""
    stages_per_rank: int | None = Field(None, ge=1, le=1024)
    """Stages of the model on each rank, with LoopedBFS and the interleaved schedules. Absent: 2, or as many
    as the schedule has. ``minStages`` and ``maxStages`` count ranks of the pipeline all the same."""
    replicas: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field((), max_length=1024)
    """By stage, how many ranks hold it; microbatch k goes to replica k mod r. The job then has as many ranks
    as these add up to. Absent: one each."""

    @property
    def used_replicas(self) -> tuple[int, ...]:
        """The replicas of each stage; empty where every stage has one."""
        return self.replicas if any(count != 1 for count in self.replicas) else ()
