"""Memory of this job's layers on its ranks: as measured, by the formula of launches and forecasts."""

import dataclasses

from ballast_policies.planning import RankCapacity
from ballast_policies.planning.memory.bounds import bytes_on_positions, reserves
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.stage_bytes import stage_bytes
from ballast_policies.planning.schedules import SCHEDULES

from ballast_trainer.loop.state import TrainingState
from ballast_trainer.pipeline.layout import used_replicas


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """By layer, on one rank that holds it.

    Attributes:
        bytes: of parameters, gradients and optimizer state.
        parameters: how many numbers of them are parameters.
        weight_bytes: of the parameters alone.
    """

    bytes: tuple[int, ...]
    parameters: tuple[int, ...]
    weight_bytes: tuple[int, ...]


def measured_layers(training: TrainingState, sizes: LayerSizes) -> MeasuredLayers:
    """The layers' bytes; what a microbatch needs counts once it is measured."""
    costs, passing = training.profile.costs(), training.profile.passing_bytes()
    outputs, gradients, repeated = passing or ((), (), ())
    return MeasuredLayers(
        seconds=() if costs is None else costs.total,
        held_bytes=sizes.bytes,
        weight_bytes=sizes.weight_bytes,
        activation_bytes=training.profile.activation_bytes() or (),
        output_bytes=outputs,
        gradient_bytes=gradients,
        repeated_bytes=repeated,
    )


def pipeline_form(training: TrainingState, ranks: int) -> PipelineForm:
    """What the memory of the job's pipeline over ``ranks`` ranks depends on besides its layers."""
    pipeline = training.config.pipeline
    replicas = tuple(used_replicas(pipeline.replicas, ranks))
    return PipelineForm(
        schedule=pipeline.schedule,
        positions=len(replicas) or ranks,
        microbatches=training.microbatches,
        stages_per_rank=SCHEDULES[pipeline.schedule].stages_on_a_rank(pipeline.stages_per_rank),
        replicas=replicas,
        optimizer=training.config.training.optimizer,
        averaged=training.config.parallelism.data > 1,
        gradient_shares=training.config.parallelism.gradient_shares,
    )


def within_memory(
    training: TrainingState, sizes: LayerSizes, capacity: RankCapacity, limit: int
) -> RankCapacity:
    """``capacity`` with ``limit`` bytes on each rank; each of its stages has an equal part of them."""
    layers, form = measured_layers(training, sizes), pipeline_form(training, training.world.positions)
    rows, stages = bytes_on_positions(layers, form).tolist(), len(training.stages)
    if stages > form.positions:
        part = limit * form.positions // stages
        by_stage = [rows[stage.rank] for stage in training.stages]
        return dataclasses.replace(capacity, memory=[part] * stages, rank_bytes=by_stage)
    return dataclasses.replace(
        capacity,
        memory=[limit] * stages,
        rank_bytes=rows,
        reserved=reserves(layers, form).tolist(),
        stage_bytes=stage_bytes(layers, form),
    )
