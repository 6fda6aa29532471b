"""Which layers go where: the planner's answers, from what this job measured."""

import itertools
from collections.abc import Sequence

from ballast_policies.contract import Proposal, Stage
from ballast_policies.planning import (
    Partition,
    RebalanceDecision,
    decide_rebalance,
    even_partition,
    exact_partition,
    predict_step_seconds,
    repack,
)

from ballast_trainer.runtime.profile import LayerCosts
from ballast_trainer.runtime.state import Training


def stages_of(partition: Partition) -> tuple[Stage, ...]:
    """One stage a rank."""
    return tuple(
        Stage(rank=rank, first_layer=first, end_layer=end)
        for rank, (first, end) in enumerate(itertools.pairwise(partition.bounds))
    )


def partition_of(stages: Sequence[Stage]) -> Partition:
    """The inverse of :func:`stages_of`."""
    return Partition(bounds=(0, *(stage.end_layer for stage in stages)))


def usable_stages(stages: Sequence[Stage], ranks: int, layer_count: int) -> tuple[Stage, ...] | None:
    """A plan's stages where they fit the model and give every rank one, else None."""
    if not stages or stages[-1].end_layer != layer_count:
        return None
    return tuple(stages) if [stage.rank for stage in stages] == list(range(ranks)) else None


def initial_stages(costs: LayerCosts | None, ranks: int, layer_count: int) -> tuple[Stage, ...]:
    """The best partition by measured costs, or the same number of layers on each rank before any."""
    if costs is None:
        return stages_of(even_partition(layer_count, ranks))
    return stages_of(exact_partition(costs.total, ranks))


def best_step_seconds(training: Training, costs: LayerCosts) -> float:
    """Predicted seconds per step under the best partition over the same ranks.

    What a repack must keep up with: not the partition that happens to be in force, which a
    rebalance will soon have improved.
    """
    loads = exact_partition(costs.total, training.world.size).loads(costs.total)
    return predict_step_seconds(loads, training.config.pipeline.microbatches)


def rebalance_decision(training: Training, *, move_seconds: float | None) -> RebalanceDecision | None:
    """Whether to move layers now, over the steps that are left; None before anything was measured."""
    costs = training.profile.costs()
    if costs is None:
        return None
    return decide_rebalance(
        partition_of(training.stages),
        costs.total,
        microbatches=training.config.pipeline.microbatches,
        min_gain=training.config.rebalance.min_gain,
        horizon_steps=training.config.total_steps - training.step,
        move_seconds=move_seconds,
    )


def repack_proposal(training: Training, *, reference_step_seconds: float | None) -> Proposal | None:
    """An offer of ranks, where fewer keep the job's speed; None where they do not.

    Args:
        training: the job.
        reference_step_seconds: predicted step of this job before its layers got cheaper; its speed
            is what the offer keeps, up to ``repack.maxSlowdown``.
    """
    config = training.config
    costs = training.profile.costs()
    fewest = max(config.repack.min_stages, config.pipeline.min_stages)
    if costs is None or training.world.size <= fewest:
        return None
    decision = repack(
        partition_of(training.stages),
        costs.total,
        microbatches=config.pipeline.microbatches,
        min_ranks=fewest,
        max_slowdown=config.repack.max_slowdown,
        reference_step_seconds=reference_step_seconds,
    )
    if not decision.repack:
        return None
    pods = training.world.pods
    return Proposal(
        epoch=training.plan.epoch,
        step=training.step,
        kept_pods=tuple(pods[rank] for rank in decision.kept_ranks),
        released_pods=tuple(pods[rank] for rank in decision.released_ranks),
        stages=stages_of(decision.partition),
        step_seconds_before=reference_step_seconds or decision.step_seconds_before,
        step_seconds_after=decision.step_seconds_after,
        reason=decision.why,
    )
