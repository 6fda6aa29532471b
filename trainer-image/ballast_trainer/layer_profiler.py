"""Profiler of a job's layers in one process, without a pipeline."""

from typing import Any

import torch
from ballast_policies.contract import Directive, Plan, Rank, Stage
from ballast_policies.contract.job import JobConfig, PipelineConfig

from ballast_trainer.device import choose_device
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.registry import build_dynamics
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.optimize import optimizer_step, squared_gradient_norm
from ballast_trainer.layers.precision import check_precision, computing_in
from ballast_trainer.loop.state import TrainingState
from ballast_trainer.models.protocol import Model
from ballast_trainer.profiling.activations import SavedTensors, weight_gradient_bytes
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.profiling.profile import Profile
from ballast_trainer.trees import Tree, mapped


def layer_rows(config: dict[str, Any], *, steps: int, at_step: int) -> dict[str, Any]:
    """Seconds and bytes of each layer, in the form that ``ballast plan`` takes.

    Forward and backward are of one microbatch, the optimizer's seconds of one step.  Activations
    are the bytes kept from the forward to the backward, the loss's with the last layer's; with
    ``recompute`` a layer's input alone.  The measurement is that of a running job.

    Args:
        config: the job.
        steps: how many to measure; the median counts.
        at_step: measure with the dynamic changes of this step, from the initial weights.

    Raises:
        ConfigurationError: a field cannot work.
    """
    job = ValidatedJob.from_mapping(config).with_ties()
    torch.set_num_threads(1)
    training = _whole_model(job.config, job.model)
    for step in range(at_step + 1):
        for dynamic in training.dynamics:
            dynamic.apply(step, training.layers, training.world)
    training.step = at_step
    training.rebuild()
    for number in range(steps + 1):
        _step(training, at_step + number)
        if number:
            # The first step is slower: memory is touched for the first time.
            training.profile.add(training.meter.seconds(), training.meter.activation_bytes)
    costs, kept = training.profile.costs(), training.profile.activation_bytes()
    assert costs is not None and kept is not None
    pipeline = job.config.pipeline
    repeated, gradients = _passing_bytes(training)
    rows = [
        {
            "name": f"layer {layer.index}",
            "forwardSeconds": costs.forward[layer.index] / pipeline.microbatches,
            "backwardSeconds": costs.backward[layer.index] / pipeline.microbatches,
            "optimizerSeconds": costs.optimizer[layer.index],
            "heldBytes": layer.byte_count(),
            "weightBytes": sum(parameter.nbytes for parameter in layer.module.parameters()),
            "activationBytes": kept[layer.index],
            "repeatedBytes": repeated[layer.index] if job.config.training.recompute else 0,
            "gradientBytes": gradients[layer.index],
            "outputBytes": training.meter.output_bytes[layer.index],
        }
        for layer in training.layers
    ]
    return {"microbatchSize": pipeline.global_batch_size // pipeline.microbatches, "layers": rows}


def _whole_model(config: JobConfig, model: Model) -> TrainingState:
    """The job on this process alone; how it is to be cut and scheduled does not matter here."""
    pipeline = PipelineConfig(
        microbatches=config.pipeline.microbatches, global_batch_size=config.pipeline.global_batch_size
    )
    device = choose_device(0)
    check_precision(config.training.precision, device)
    dynamics = build_dynamics(config.dynamics, model.layer_count, model.family)

    def prepare(index: int, module: torch.nn.Module) -> torch.nn.Module:
        for dynamic in dynamics:
            module = dynamic.prepare(index, module)
        return module

    ranks = (Rank(rank=0, pod="local", address="127.0.0.1", gpu_type="local"),)
    training = TrainingState(
        config=config.replace(pipeline=pipeline),
        model=model,
        device=device,
        speed=None,
        dynamics=dynamics,
        layers=LayerSet(model, config.training, device, prepare),
        meter=Meter(model.layer_count, device, None),
        profile=Profile(model.layer_count),
        world=World(epoch=1, rank=0, size=1, processes=("local",), device=device),
        plan=Plan(job="local", epoch=1, launch=1, directive=Directive.RUN, ranks=ranks),
        stages=(Stage(rank=0, first_layer=0, end_layer=model.layer_count),),
    )
    training.layers.hold(training.layers.make(index) for index in range(model.layer_count))
    return training


def _passing_bytes(training: TrainingState) -> tuple[list[int], list[int]]:
    """By layer, of one microbatch: all that its forward keeps, and gradients that flow into its weights."""
    inputs, _ = training.batch()
    value: Tree = inputs.chunk(training.microbatches)[0]
    kept, waiting = [], []
    for layer in training.layers:
        value = mapped(_learning, layer.taken(value))
        counter = SavedTensors(value)
        with counter.saving(layer.index), computing_in(training.config.training.precision, training.device):
            output = layer.module(value)
        kept.append(counter.count([layer.module]).get(layer.index, 0))
        waiting.append(weight_gradient_bytes(output))
        value = output
    return kept, waiting


def _learning(value: torch.Tensor) -> torch.Tensor:
    # No leaf, so that layers may change it in place.
    return value.detach().requires_grad_().clone() if value.is_floating_point() else value


def _step(training: TrainingState, step: int) -> None:
    config, meter = training.config, training.meter
    meter.start_step(step)
    assert training.pipeline is not None
    training.pipeline.run(training.batch)
    training.complete_gradients()
    for dynamic in training.dynamics:
        dynamic.after_backward(training.layers)
    optimizer_step(
        training.layers,
        config.training,
        meter,
        step=training.step,
        total_steps=config.total_steps,
        squared_norm=squared_gradient_norm(training.layers.parameters()),
        loss_scale=training.loss_scale.value,
    )
    training.send_tied_weights()
    for dynamic in training.dynamics:
        dynamic.after_optimizer(training.layers)
