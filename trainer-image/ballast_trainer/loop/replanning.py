"""Decisions of the planner from this job's measurements: rebalance, repack, and predicted step times."""

import dataclasses
import logging
import math
import operator
from collections.abc import Sequence

from ballast_policies.contract.messages import Proposal, Stage
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.registry import BalancerInput
from ballast_policies.planning.balancers.several_stages import StagedPipeline
from ballast_policies.planning.balancers.subset import PlaceBytes, RankSubsets
from ballast_policies.planning.launch import (
    LaunchRanks,
    first_stages,
    launch_partition,
    partition_of,
    stages_over,
)
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.need import MemoryNeed, bytes_of_cuts
from ballast_policies.planning.memory.stage_bytes import bytes_on_positions, reserves, stage_bytes
from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity
from ballast_policies.planning.rebalance import RebalanceDecision, decide_rebalance, least_gain
from ballast_policies.planning.repack import kept_positions, repack
from ballast_policies.planning.step_time import predict_step_seconds

from ballast_trainer.errors import ConfigurationError
from ballast_trainer.loop.state import ModelState, RunState
from ballast_trainer.pipeline.layout import holders_of
from ballast_trainer.profiling.profile import LayerCosts

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes by layer, on one rank that holds it.

    Attributes:
        bytes: of parameters, gradients and optimizer state.
        parameters: how many numbers of them are parameters.
        weight_bytes: of the parameters alone.
    """

    bytes: tuple[int, ...]
    parameters: tuple[int, ...]
    weight_bytes: tuple[int, ...]


def measured_layers(model: ModelState, sizes: LayerSizes) -> MeasuredLayers:
    """The layers' bytes; what a microbatch needs counts once it is measured."""
    costs = model.profile.costs()
    return dataclasses.replace(
        model.profile.bytes() or MeasuredLayers(),
        seconds=() if costs is None else costs.total,
        held_bytes=sizes.bytes,
        weight_bytes=sizes.weight_bytes,
    )


def pipeline_form(model: ModelState, ranks: int) -> PipelineForm:
    """Properties of the job's pipeline over ``ranks`` ranks that its memory depends on besides its layers."""
    form = PipelineForm.of(model.config, ranks)
    if ranks == 1:
        return dataclasses.replace(form, replicas=())
    return dataclasses.replace(form, positions=len(form.replicas) or ranks)


def within_memory(model: ModelState, sizes: LayerSizes, capacity: RankCapacity, limit: int) -> RankCapacity:
    """``capacity`` with ``limit`` bytes on each rank; each of its stages has an equal part of them."""
    layers, form = measured_layers(model, sizes), pipeline_form(model, model.world.positions)
    rows, stages = bytes_on_positions(layers, form).tolist(), len(model.stages)
    if stages > form.positions:
        part = limit * form.positions // stages
        by_stage = [rows[stage.rank] for stage in model.stages]
        return dataclasses.replace(capacity, memory=[part] * stages, rank_bytes=by_stage)
    return dataclasses.replace(
        capacity,
        memory=[limit] * stages,
        rank_bytes=rows,
        reserved=reserves(layers, form).tolist(),
        stage_bytes=stage_bytes(layers, form),
    )


def staged_pipeline(
    model: ModelState,
    costs: LayerCosts,
    placement: Sequence[int],
    capacity: RankCapacity = UNLIMITED,
    sizes: LayerSizes | None = None,
) -> StagedPipeline | None:
    """Simulation of the job's schedule where ranks hold several stages; None: one stage a rank.

    With ``sizes``, ranks keep to ``rebalance.memoryBytes``.
    """
    positions, limit = 1 + max(placement), model.config.rebalance.memory_bytes
    if len(placement) <= positions:
        return None
    taken = None
    if sizes is not None and limit is not None:
        taken = bytes_of_cuts(measured_layers(model, sizes), pipeline_form(model, positions))
    return StagedPipeline(
        schedule=model.schedule_request(positions).one_step(),
        forward=costs.forward,
        backward=costs.backward,
        optimizer=costs.optimizer,
        capacity=capacity,
        taken=taken,
        rank_memory=math.inf if limit is None else limit,
    )


def best_stages(model: ModelState, costs: LayerCosts | None, placement: tuple[int, ...]) -> tuple[Stage, ...]:
    """The best partition by measured costs; the first stages of a job before anything is measured."""
    if costs is None:
        return first_stages(model.definition.layer_count, placement)
    partition = exact_partition(costs.total, len(placement))
    staged = staged_pipeline(model, costs, placement)
    return stages_over(partition if staged is None else staged.balanced(partition), placement)


def stages_left(model: ModelState, sizes: LayerSizes | None, ranks: int) -> tuple[Stage, ...]:
    """The best partition over the ranks that are left after a loss, within memory where ``sizes`` are known.

    Raises:
        ConfigurationError: they are too few for the pipeline, its schedule or their memory.
    """
    config, positions = model.config, model.world.mesh.positions(ranks)
    if positions < config.pipeline.min_stages:
        raise ConfigurationError(
            "pipeline.minStages", f"{config.pipeline.min_stages}, and {positions} are left. To fix: lower it"
        )
    placement = model.placement(ranks)
    if len(placement) > model.definition.layer_count:
        raise ConfigurationError("pipeline.stagesPerRank", f"{len(placement)} stages need as many layers")
    stages = best_stages(model, model.profile.expected(), placement)
    limit = config.rebalance.memory_bytes
    if limit is None or sizes is None:
        return stages
    layers, form = measured_layers(model, sizes), pipeline_form(model, positions)
    if not MemoryNeed(layers, form).fits(positions, limit):
        raise ConfigurationError(
            "rebalance.memoryBytes", f"{limit}, and the layers do not fit {positions} ranks. To fix: raise it"
        )
    room = LaunchRanks(placement=placement, memory=(float(limit),) * positions)
    return launch_partition(stages, layers, form, room)


def best_step_seconds(model: ModelState, costs: LayerCosts) -> float:
    """Seconds per step of the best partition of these ranks, the reference of a repack's speed.

    A rebalance may soon put it in force.
    """
    stages, speeds = len(model.config.pipeline.used_replicas or ()), None
    if not stages:
        stages, speeds, costs = model.world.positions, _measured_speeds(model), unit_costs(model, costs)
    best = exact_partition(costs.total, stages, RankCapacity(speeds=speeds))
    return predict_step_seconds(best.loads(costs.total, speeds), model.microbatches_per_drain)


def predicted_step_seconds(model: ModelState, costs: LayerCosts, stages: Sequence[Stage]) -> float:
    """Predicted seconds per step under ``stages``: of several stages a rank by playing the schedule."""
    staged = staged_pipeline(model, costs, [stage.rank for stage in stages])
    if staged is not None:
        return staged.step_seconds(partition_of(stages))
    loads = [0.0] * (1 + max(stage.rank for stage in stages))
    replicas = model.schedule_request(len(loads)).replicas
    for stage, holders in zip(stages, holders_of(stages, replicas), strict=True):
        loads[stage.rank] += sum(costs.total[stage.first_layer : stage.end_layer]) / len(holders)
    return predict_step_seconds(loads, model.microbatches_per_drain)


def layer_sizes(model: ModelState) -> LayerSizes:
    """The present sizes of all layers; collective."""
    names = [field.name for field in dataclasses.fields(LayerSizes)]
    mine = {name: [0.0] * model.definition.layer_count for name in names}
    # Every copy of a layer is summed: of replicas, and of the ranks of a column.
    share, shared = 1 / (model.copies * model.world.mesh.column), model.config.parallelism.gradient_shares > 1
    for layer in model.layers:
        parameters = list(layer.module.parameters())
        mine["bytes"][layer.index] = share * layer.byte_count(shares_gradients=shared)
        apart = (layer.module.get_parameter(name).numel() for name in layer.of_experts)
        whole = sum(p.numel() for p in parameters) + (model.world.data.size - 1) * sum(apart)
        mine["parameters"][layer.index] = share * whole
        mine["weight_bytes"][layer.index] = share * sum(p.nbytes for p in parameters)
    return LayerSizes(**{name: tuple(map(round, row)) for name, row in model.world.sum_rows(mine).items()})


def rebalance_decision(
    model: ModelState,
    sizes: LayerSizes,
    *,
    steps_left: int,
    move_seconds: float | None,
    link_seconds: Sequence[float] | None = None,
) -> RebalanceDecision | None:
    """Decision to move layers now, over the steps that are left, by their expected costs.

    None before anything was measured, and where no partition fits the memory (which is logged).
    ``move_seconds``: of the last move; ``link_seconds``: of one transfer over each link, for the balancer
    ``network``.
    """
    costs = model.profile.expected(coming=True)
    if costs is None:
        return None
    try:
        return decide_rebalance(
            balancer_input(model, costs, model.stages, sizes, link_seconds=link_seconds),
            min_gain=least_gain_now(model),
            horizon_steps=steps_left,
            move_seconds=move_seconds,
            method=model.config.rebalance.balancer,
        )
    except PlanningError as error:
        logger.warning("layers stay where they are: %s", error)
        return None


def balancer_input(
    model: ModelState,
    costs: LayerCosts,
    stages: Sequence[Stage],
    sizes: LayerSizes | None = None,
    *,
    link_seconds: Sequence[float] | None = None,
) -> BalancerInput:
    """Input of a balancer for ``stages``; with ``sizes`` ranks keep to ``rebalance.memoryBytes``."""
    settings, capacity = model.config.rebalance, rank_capacity(model)
    if sizes is not None:
        capacity = dataclasses.replace(capacity, layer_bytes=sizes.bytes)
        if settings.memory_bytes is not None:
            capacity = within_memory(model, sizes, capacity, settings.memory_bytes)
    costs = unit_costs(model, costs)
    return BalancerInput(
        partition=partition_of(stages),
        seconds=costs.total,
        microbatches=model.microbatches_per_drain,
        capacity=capacity,
        balanced=sizes.parameters if sizes is not None and settings.by == "parameters" else None,
        link_seconds=link_seconds,
        staged=staged_pipeline(model, costs, [stage.rank for stage in stages], capacity, sizes),
    )


def least_gain_now(model: ModelState) -> float:
    """The gain from which layers move: ``rebalance.minGain``, or what the measured steps' noise may feign."""
    return least_gain(
        model.config.rebalance.min_gain,
        model.profile.measured(),
        partition_of(model.stages),
        [stage.rank for stage in model.stages],
    )


def rank_capacity(model: ModelState) -> RankCapacity:
    """Speed of each stage: as its rank's was measured; one with r replicas is r times as fast."""
    measured = _measured_speeds(model)
    holders = model.holders
    if measured is None:
        replicas = [float(len(of)) for of in holders]
        return RankCapacity(speeds=replicas if max(replicas) > 1 else None)
    return RankCapacity(speeds=[sum(measured[position] for position in of) for of in holders])


def unit_costs(model: ModelState, costs: LayerCosts) -> LayerCosts:
    """Costs of each layer on a rank of speed 1, whichever rank it was measured on."""
    measured = _measured_speeds(model)
    if measured is None:
        return costs
    factors: list[float] = []
    for stage, holders in zip(model.stages, model.holders, strict=True):
        speed = sum(measured[position] for position in holders) / len(holders)
        factors += [speed] * (stage.end_layer - stage.first_layer)
    return LayerCosts(
        forward=tuple(map(operator.mul, costs.forward, factors)),
        backward=tuple(map(operator.mul, costs.backward, factors)),
        optimizer=tuple(map(operator.mul, costs.optimizer, factors)),
    )


def _measured_speeds(model: ModelState) -> tuple[float, ...] | None:
    speeds = model.rank_speeds.speeds(model.world.mesh.column)
    return speeds if speeds is not None and len(speeds) == model.world.positions else None


def repack_proposal(
    model: ModelState, run: RunState, sizes: LayerSizes, *, reference_step_seconds: float | None
) -> Proposal | None:
    """A proposal to release ranks, if fewer keep the job's speed and hold its layers; else None.

    ``reference_step_seconds``: predicted for a step of this job before its layers got cheaper; the proposal
    keeps that speed, up to ``repack.maxSlowdown``.
    """
    config = model.config
    costs = model.profile.costs()
    fewest = max(config.repack.min_stages, config.pipeline.min_stages)
    if costs is None or model.world.positions <= fewest:
        return None
    costs, speeds = unit_costs(model, costs), _measured_speeds(model)
    in_force = partition_of(model.stages)
    if in_force.ranks != model.world.positions:
        # With several stages a rank, the proposal is computed as if each rank had one.
        in_force = exact_partition(costs.total, model.world.positions, RankCapacity(speeds=speeds))
    limit, layers = config.rebalance.memory_bytes, measured_layers(model, sizes)

    def bytes_on(ranks: int) -> PlaceBytes:
        form = pipeline_form(model, ranks)
        rows = bytes_on_positions(layers, form).tolist()
        return PlaceBytes(rows=rows, reserved=reserves(layers, form).tolist())

    def held(ranks: int) -> bool:
        return limit is None or MemoryNeed(layers, pipeline_form(model, ranks)).fits(ranks, limit)

    column, per_pod = model.world.mesh.column, len(run.plan.ranks) // len(run.plan.pods)
    # Positions that fill whole pods together.
    block = math.lcm(column, per_pod) // column

    def schedulable(ranks: int) -> bool:
        if ranks % block:
            return False
        try:
            placement = model.placement(ranks * column)
        except ConfigurationError:
            return False
        return len(placement) <= model.definition.layer_count and (len(placement) == ranks or held(ranks))

    memory = None if limit is None else [limit] * in_force.ranks
    decision = repack(
        RankSubsets(
            in_force,
            costs.total,
            RankCapacity(layer_bytes=sizes.bytes, memory=memory, speeds=speeds),
            bytes_on=None if limit is None else bytes_on,
        ),
        microbatches=model.microbatches_per_drain,
        min_ranks=fewest,
        target_ranks=config.repack.target_stages,
        max_slowdown=config.repack.max_slowdown,
        reference_step_seconds=reference_step_seconds,
        schedulable=schedulable,
    )
    if not decision.repack:
        return None
    on_nodes = [rank.node for rank in run.plan.ranks]
    by_position = [
        tuple(on_nodes[rank] for rank in model.world.mesh.column_ranks(at))
        for at in range(in_force.ranks if all(on_nodes) else 0)
    ]
    kept = kept_positions(decision, in_force, block, sizes.bytes, by_position, speeds)
    if not kept:
        return None
    ranks = [run.plan.ranks[rank] for at in kept for rank in model.world.mesh.column_ranks(at)]
    kept_pods = tuple(dict.fromkeys(rank.pod for rank in ranks))
    placement = model.placement(len(kept) * column)
    if len(placement) == decision.partition.ranks:
        stages = stages_over(decision.partition, placement)
    else:
        stages = best_stages(model, costs, placement)
        if limit is not None:
            room = LaunchRanks(placement=placement, memory=(float(limit),) * len(kept))
            stages = launch_partition(stages, layers, pipeline_form(model, len(kept)), room)
    return Proposal(
        epoch=run.plan.epoch,
        step=run.step,
        kept_pods=kept_pods,
        released_pods=tuple(pod for pod in run.plan.pods if pod not in kept_pods),
        stages=stages,
        step_seconds_before=reference_step_seconds or decision.step_seconds_before,
        step_seconds_after=decision.step_seconds_after,
        reason=decision.why,
    )
