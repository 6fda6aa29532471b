"""Decisions of the planner from this job's measurements: rebalance, repack, and predicted step times."""

import dataclasses
import logging
import math
import operator
from collections.abc import Sequence

from ballast_policies.contract import Proposal, Stage
from ballast_policies.planning import (
    PlanningError,
    RankCapacity,
    RebalanceDecision,
    decide_rebalance,
    exact_partition,
    kept_positions,
    predict_step_seconds,
    repack,
)
from ballast_policies.planning.balancers import StagedPipeline
from ballast_policies.planning.balancers.place_memory import PlaceBytes
from ballast_policies.planning.following.noise import least_gain
from ballast_policies.planning.launch.launch_partition import LaunchRanks, launch_partition
from ballast_policies.planning.memory.bounds import bytes_on_positions, reserves
from ballast_policies.planning.memory.need import MemoryNeed
from ballast_policies.planning.memory.several_stages import bytes_of_cuts
from ballast_policies.planning.rank_capacity import UNLIMITED
from ballast_policies.planning.stages import first_stages, partition_of, stages_over

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.loop.memory import LayerSizes, measured_layers, pipeline_form, within_memory
from ballast_trainer.loop.state import TrainingState
from ballast_trainer.pipeline.layout import holders_of
from ballast_trainer.profiling.profile import LayerCosts

logger = logging.getLogger(__name__)


def staged_pipeline(
    training: TrainingState,
    costs: LayerCosts,
    placement: Sequence[int],
    capacity: RankCapacity = UNLIMITED,
    sizes: LayerSizes | None = None,
) -> StagedPipeline | None:
    """What plays the job's schedule where ranks hold several stages; None: one stage a rank.

    With ``sizes``, ranks keep to ``rebalance.memoryBytes``.
    """
    positions, limit = 1 + max(placement), training.config.rebalance.memory_bytes
    if len(placement) <= positions:
        return None
    taken = None
    if sizes is not None and limit is not None:
        taken = bytes_of_cuts(measured_layers(training, sizes), pipeline_form(training, positions))
    return StagedPipeline(
        schedule=training.schedule_request(positions).one_step(),
        forward=costs.forward,
        backward=costs.backward,
        optimizer=costs.optimizer,
        capacity=capacity,
        taken=taken,
        rank_memory=math.inf if limit is None else limit,
    )


def best_stages(
    training: TrainingState,
    costs: LayerCosts | None,
    placement: tuple[int, ...],
    replicas: Sequence[int] = (),
) -> tuple[Stage, ...]:
    """The best partition by measured costs; the first stages of a job before anything is measured."""
    if costs is None:
        return first_stages(training.model.layer_count, placement, replicas)
    partition = exact_partition(costs.total, len(placement))
    staged = staged_pipeline(training, costs, placement)
    return stages_over(partition if staged is None else staged.balanced(partition), placement)


def stages_left(training: TrainingState, sizes: LayerSizes | None, ranks: int) -> tuple[Stage, ...]:
    """The best partition over the ranks that are left after a loss.

    Args:
        training: the job of before.
        sizes: of its layers, for the memory limit; None: not known.
        ranks: how many are left.

    Raises:
        ConfigurationError: they are too few for the pipeline, its schedule or their memory.
    """
    config, positions = training.config, training.world.mesh.positions(ranks)
    if positions < config.pipeline.min_stages:
        raise ConfigurationError(
            "pipeline.minStages", f"{config.pipeline.min_stages}, and {positions} are left. To fix: lower it"
        )
    placement = training.placement(ranks)
    if len(placement) > training.model.layer_count:
        raise ConfigurationError("pipeline.stagesPerRank", f"{len(placement)} stages need as many layers")
    stages = best_stages(training, training.profile.expected(), placement)
    limit = config.rebalance.memory_bytes
    if limit is None or sizes is None:
        return stages
    layers, form = measured_layers(training, sizes), pipeline_form(training, positions)
    if not MemoryNeed(layers, form).fits(positions, limit):
        raise ConfigurationError(
            "rebalance.memoryBytes", f"{limit}, and the layers do not fit {positions} ranks. To fix: raise it"
        )
    room = LaunchRanks(placement=placement, memory=(float(limit),) * positions)
    return launch_partition(stages, layers, form, room)


def best_step_seconds(training: TrainingState, costs: LayerCosts) -> float:
    """Predicted seconds per step under the best partition over the same ranks.

    The reference for the speed of a repack: the partition in force may soon be improved by a
    rebalance.
    """
    loads = exact_partition(costs.total, training.world.positions).loads(costs.total)
    return predict_step_seconds(loads, training.microbatches_per_drain)


def predicted_step_seconds(training: TrainingState, costs: LayerCosts, stages: Sequence[Stage]) -> float:
    """Predicted seconds per step under ``stages``: of several stages a rank by playing the schedule."""
    staged = staged_pipeline(training, costs, [stage.rank for stage in stages])
    if staged is not None:
        return staged.step_seconds(partition_of(stages))
    loads = [0.0] * (1 + max(stage.rank for stage in stages))
    for stage, holders in zip(
        stages, holders_of(stages, training.config.pipeline.replicas, len(loads)), strict=True
    ):
        loads[stage.rank] += sum(costs.total[stage.first_layer : stage.end_layer]) / len(holders)
    return predict_step_seconds(loads, training.microbatches_per_drain)


def layer_sizes(training: TrainingState) -> LayerSizes:
    """The present sizes of all layers; collective."""
    count = training.model.layer_count
    mine = [0.0] * (3 * count)
    # Every copy of a layer is summed: of replicas, and of the ranks of a column.
    share = 1 / (training.copies * training.world.mesh.column)
    for layer in training.layers:
        mine[layer.index] = share * layer.byte_count(
            shares_gradients=training.config.parallelism.gradient_shares > 1
        )
        mine[count + layer.index] = share * sum(p.numel() for p in layer.module.parameters())
        mine[2 * count + layer.index] = share * sum(p.nbytes for p in layer.module.parameters())
    summed = [round(value) for value in training.world.sum(mine)]
    return LayerSizes(
        bytes=tuple(summed[:count]),
        parameters=tuple(summed[count : 2 * count]),
        weight_bytes=tuple(summed[2 * count :]),
    )


def rebalance_decision(
    training: TrainingState,
    sizes: LayerSizes,
    *,
    move_seconds: float | None,
    link_seconds: Sequence[float] | None = None,
) -> RebalanceDecision | None:
    """Whether to move layers now, over the steps that are left, by what layers are expected to cost.

    None before anything was measured, and where no partition fits the memory (which is logged).

    Args:
        training: the job.
        sizes: of its layers.
        move_seconds: seconds of the last move; None before the first.
        link_seconds: one transfer over each link, for the balancer ``network``.
    """
    costs = training.profile.expected(coming=True)
    if costs is None:
        return None
    settings = training.config.rebalance
    capacity = dataclasses.replace(rank_capacity(training), layer_bytes=sizes.bytes)
    if settings.memory_bytes is not None:
        capacity = within_memory(training, sizes, capacity, settings.memory_bytes)
    costs = unit_costs(training, costs)
    placement = [stage.rank for stage in training.stages]
    staged = staged_pipeline(training, costs, placement, capacity, sizes)
    try:
        return decide_rebalance(
            partition_of(training.stages),
            costs.total,
            microbatches=training.microbatches_per_drain,
            min_gain=settings.min_gain,
            horizon_steps=training.config.total_steps - training.step,
            measured=training.profile.measured(),
            placement=placement,
            move_seconds=move_seconds,
            capacity=capacity,
            balanced=sizes.parameters if settings.by == "parameters" else None,
            link_seconds=link_seconds,
            method=settings.balancer,
            staged=staged,
        )
    except PlanningError as error:
        logger.warning("layers stay where they are: %s", error)
        return None


def least_gain_now(training: TrainingState) -> float:
    """The gain from which layers move: ``rebalance.minGain``, or what the measured steps' noise may feign."""
    return least_gain(
        training.config.rebalance.min_gain,
        training.profile.measured(),
        partition_of(training.stages),
        [stage.rank for stage in training.stages],
    )


def rank_capacity(training: TrainingState) -> RankCapacity:
    """Speed of each stage: as its rank's was measured; one with r replicas is r times as fast."""
    measured = _measured_speeds(training)
    holders = training.holders
    if measured is None:
        replicas = [float(len(of)) for of in holders]
        return RankCapacity(speeds=replicas if max(replicas) > 1 else None)
    return RankCapacity(speeds=[sum(measured[position] for position in of) for of in holders])


def unit_costs(training: TrainingState, costs: LayerCosts) -> LayerCosts:
    """Costs of each layer on a rank of speed 1, whichever rank it was measured on."""
    measured = _measured_speeds(training)
    if measured is None:
        return costs
    factors: list[float] = []
    for stage, holders in zip(training.stages, training.holders, strict=True):
        speed = sum(measured[position] for position in holders) / len(holders)
        factors += [speed] * (stage.end_layer - stage.first_layer)
    return LayerCosts(
        forward=tuple(map(operator.mul, costs.forward, factors)),
        backward=tuple(map(operator.mul, costs.backward, factors)),
        optimizer=tuple(map(operator.mul, costs.optimizer, factors)),
    )


def _measured_speeds(training: TrainingState) -> tuple[float, ...] | None:
    speeds = training.rank_speeds.speeds()
    return speeds if speeds is not None and len(speeds) == training.world.positions else None


def repack_proposal(
    training: TrainingState, sizes: LayerSizes, *, reference_step_seconds: float | None
) -> Proposal | None:
    """A proposal to release ranks, if fewer keep the job's speed and hold its layers; else None.

    Args:
        training: the job.
        sizes: of its layers, for the memory limit.
        reference_step_seconds: predicted step of this job before its layers got cheaper; the
            proposal keeps its speed, up to ``repack.maxSlowdown``.
    """
    config = training.config
    costs = training.profile.costs()
    fewest = max(config.repack.min_stages, config.pipeline.min_stages)
    if costs is None or training.world.positions <= fewest:
        return None
    in_force = partition_of(training.stages)
    if in_force.ranks != training.world.positions:
        # With several stages a rank, the proposal is computed as if each rank had one.
        in_force = exact_partition(costs.total, training.world.positions)
    limit, layers = config.rebalance.memory_bytes, measured_layers(training, sizes)

    def bytes_on(ranks: int) -> PlaceBytes:
        form = pipeline_form(training, ranks)
        rows = bytes_on_positions(layers, form).tolist()
        return PlaceBytes(rows=rows, reserved=reserves(layers, form).tolist())

    def held(ranks: int) -> bool:
        return limit is None or MemoryNeed(layers, pipeline_form(training, ranks)).fits(ranks, limit)

    column, per_pod = training.world.mesh.column, len(training.plan.ranks) // len(training.plan.pods)
    # Positions that fill whole pods together.
    block = math.lcm(column, per_pod) // column

    def schedulable(ranks: int) -> bool:
        if ranks % block:
            return False
        try:
            placement = training.placement(ranks * column)
        except ConfigurationError:
            return False
        return len(placement) <= training.model.layer_count and (len(placement) == ranks or held(ranks))

    decision = repack(
        in_force,
        costs.total,
        microbatches=training.microbatches_per_drain,
        min_ranks=fewest,
        target_ranks=config.repack.target_stages,
        max_slowdown=config.repack.max_slowdown,
        reference_step_seconds=reference_step_seconds,
        capacity=RankCapacity(
            layer_bytes=sizes.bytes, memory=None if limit is None else [limit] * in_force.ranks
        ),
        bytes_on=None if limit is None else bytes_on,
        schedulable=schedulable,
    )
    if not decision.repack:
        return None
    on_nodes = [rank.node for rank in training.plan.ranks]
    by_position = [
        tuple(on_nodes[rank] for rank in training.world.mesh.column_ranks(at))
        for at in range(in_force.ranks if all(on_nodes) else 0)
    ]
    kept = kept_positions(decision, in_force, block, sizes.bytes, by_position)
    ranks = [training.plan.ranks[rank] for at in kept for rank in training.world.mesh.column_ranks(at)]
    kept_pods = tuple(dict.fromkeys(rank.pod for rank in ranks))
    placement = training.placement(len(kept) * column)
    if len(placement) == decision.partition.ranks:
        stages = stages_over(decision.partition, placement)
    else:
        stages = best_stages(training, costs, placement)
        if limit is not None:
            room = LaunchRanks(placement=placement, memory=(float(limit),) * len(kept))
            stages = launch_partition(stages, layers, pipeline_form(training, len(kept)), room)
    return Proposal(
        epoch=training.plan.epoch,
        step=training.step,
        kept_pods=kept_pods,
        released_pods=tuple(pod for pod in training.plan.pods if pod not in kept_pods),
        stages=stages,
        step_seconds_before=reference_step_seconds or decision.step_seconds_before,
        step_seconds_after=decision.step_seconds_after,
        reason=decision.why,
    )
