"""Plasticity is that of one process, whatever part of the batch a replica has seen."""

import pytest
import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, FreezingCriterion, FreezingSettings
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.freezing import Freezing
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.models.gpt import build_gpt

from tests.trainer.tensor_parallel.ranks import on_ranks

CPU = torch.device("cpu")
LAYERS = 3


def looks(world, microbatches, steps):
    """What each layer's figure is at each look of a job of which this replica has some of 4 microbatches."""
    settings = FreezingSettings(criterion=FreezingCriterion.PLASTICITY, threshold=1e-9)
    dynamic = Freezing(DynamicConfig(kind="freezing", every_steps=1, freezing=settings), LAYERS)
    model = build_gpt(layers=LAYERS, dim=16, heads=2, context=8, dropout=0.0)
    layers = LayerSet(model, TrainingConfig(seed=0), CPU, dynamic.prepare)
    layers.hold(layers.make(index) for index in range(LAYERS))
    seen = []
    for step in range(steps):
        dynamic.apply(step, layers, world)
        for number, microbatch in enumerate(microbatches):
            CURRENT_FORWARD.set(step, number)
            value = torch.randint(
                0, 256, (2, 8), generator=torch.Generator().manual_seed(10 * step + microbatch)
            )
            for layer in layers:
                value = layer.module(value)
        dynamic.after_backward(layers)
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in (parameter for layer in layers for parameter in layer.module.parameters()):
                parameter.add_(torch.randn(parameter.shape, generator=generator) / (5 + step))
        dynamic.after_optimizer(layers)
        seen.append(dynamic.measured(layers)["figures"])
    CURRENT_FORWARD.set(0, None)
    return seen


def of_replica(world, steps):
    """Of 2 replicas: the first half of the microbatches, or the second."""
    return looks(world, range(2 * world.data.index, 2 * world.data.index + 2), steps)


@pytest.mark.processes
def test_replicas_measure_the_plasticity_that_one_process_measures():
    """The same figures on each, so that layers freeze at the same steps."""
    alone = looks(World(epoch=1, rank=0, size=1, processes=("local",), device=CPU), range(4), 14)
    assert min(alone[-1].values()) > 0, "every look has an update to see"
    for seen in on_ranks(of_replica, 2, 14, mesh=Mesh(data=2)):
        assert [set(figures) for figures in seen] == [set(figures) for figures in alone]
        for figures, reference in zip(seen, alone, strict=True):
            assert figures == pytest.approx(reference, rel=1e-4, abs=1e-9)
