"""Layers that one rank holds, and those of a small model that have computed the gradients of one batch."""

import torch
from ballast_policies.contract.job.training import TrainingConfig
from ballast_policies.contract.messages import Stage
from ballast_trainer.checkpoints.checkpoints import Checkpoints
from ballast_trainer.checkpoints.manifest import Manifest
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import World
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.precision import computing_in
from ballast_trainer.loop.state import ModelState
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.registry import build_model
from ballast_trainer.pipeline.layout import ScheduleRequest
from ballast_trainer.pipeline.stages import PipelineBuilder
from ballast_trainer.profiling.meter import Meter

CPU = torch.device("cpu")
ALONE = World(epoch=1, rank=0, size=1, processes=("local",), device=CPU)


def all_layers(model, config=None, prepare=lambda index, module: module, **shared):
    """All layers of a model on one rank."""
    layers = LayerSet(model, config or TrainingConfig(), CPU, prepare, **shared)
    layers.hold(layers.make(index) for index in range(model.layer_count))
    return layers


def saved_layers(config):
    """All layers of a configuration's job as its last checkpoint has them."""
    job = ValidatedJob.from_mapping(config)
    layers = all_layers(job.model, job.config.training)
    of = Manifest(step=0, layer_count=job.model.layer_count, seed=0, files={})
    saved = Checkpoints(config["checkpoint"]["path"], keep=1, job=of)
    manifest = saved.newest(ALONE)
    assert manifest.step == config["totalSteps"]
    saved.load(ALONE, layers, manifest)
    return layers


def one_stage(model, layers, microbatches, meter=None, **more):
    """The pipeline of a rank that holds all layers."""
    return builder_of_one_stage(model, layers, microbatches, meter, **more).build(())


def builder_of_one_stage(model, layers, microbatches, meter=None, **more):
    """What builds it, or tries it."""
    return PipelineBuilder(
        stages=(Stage(rank=0, first_layer=0, end_layer=model.layer_count),),
        schedule=ScheduleRequest(name="1F1B", ranks=1, microbatches=microbatches),
        rank=0,
        layers=layers,
        meter=meter or Meter(model.layer_count, CPU, None),
        loss=model.loss,
        **more,
    )


def trained_layers(config, *, seed=3):
    """Layers of a small model with the gradients of one batch, not yet learnt from."""
    model = build_gpt(layers=4, dim=16, heads=2, context=8, dropout=0.0)
    layers = all_layers(model, config)
    inputs, targets = model.batch(seed, 0, 4)
    value = inputs
    with computing_in(config.precision, CPU):
        for layer in layers:
            value = layer.module(value)
    return layers, lambda scale: (scale.scaled(model.loss)(value, targets)).backward()


def weights(layers):
    return [parameter.detach().clone() for parameter in layers.parameters()]


def first_rank(config, stages, ranks, data=1):
    """The state of rank 0 of a job that has held no layer and measured nothing yet."""
    model = build_model(config.model)
    return ModelState(
        config=config,
        definition=model,
        device=CPU,
        dynamics=(),
        layers=LayerSet(model, config.training, CPU, lambda index, module: module),
        meter=Meter(model.layer_count, CPU, None),
        world=World(
            epoch=1,
            rank=0,
            size=ranks,
            processes=tuple(f"rank-{rank}" for rank in range(ranks)),
            device=CPU,
            mesh=Mesh(data=data),
            data=Axis(ranks=tuple(range(data))),
        ),
        stages=stages,
        loss=model.loss,
    )
