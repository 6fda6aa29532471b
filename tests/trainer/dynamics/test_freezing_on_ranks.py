"""Criteria of freezing see what one process sees: whole layers, whatever part of the batch a rank has."""

import pytest
import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, FreezingCriterion, FreezingSettings
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.dynamics.freezing import Freezing, squared_gradients
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.layers.slicing import slicings
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.tensor_parallel.layers import split_layer

from tests.support.examples import first_daily
from tests.trainer.layers.trained_layers import ALONE, all_layers
from tests.trainer.tensor_parallel.ranks import on_ranks

LAYERS = 4


def held(count, prepare):
    """All layers of a small model, with the weights of one process."""
    model = build_gpt(layers=count, dim=16, heads=2, context=8, dropout=0.0)
    return all_layers(model, TrainingConfig(seed=0), prepare)


def figures(world, criterion, steps):
    """Figures and frozen layers by look: part of a layer's heads and units settles, the rest does not."""
    settings = FreezingSettings(criterion=FreezingCriterion(criterion), threshold=0.3, patience=1)
    dynamic = Freezing(DynamicConfig(kind="freezing", every_steps=2, freezing=settings), LAYERS)
    layers, seen = held(LAYERS, lambda at, module: dynamic.prepare(at, split_layer(module, world.tensor))), []
    for step in range(steps):
        dynamic.apply(step, layers, world)
        generator = torch.Generator().manual_seed(step)
        for layer in layers:
            cut = slicings(layer.module)
            for name, parameter in layer.module.named_parameters():
                slicing, shape = cut.get(name), list(parameter.shape)
                if slicing is not None:
                    shape[slicing.dim] *= world.tensor.size
                whole = torch.randn(shape, generator=generator)
                if layer.index == 2 and step > 3:
                    # The first half of the matrix has settled.
                    whole[: len(whole) // 2] *= 1e-4
                elif layer.index == 0 and step > 3:
                    whole *= 1e-4
                if slicing is not None:
                    whole = slicing.part(whole, world.tensor.index, world.tensor.size)
                if parameter.requires_grad:
                    parameter.grad = whole
                    with torch.no_grad():
                        parameter.add_(whole)
        dynamic.after_backward(layers)
        measured = dynamic.measured(layers)
        seen.append((measured["figures"], measured["layers"]))
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("criterion", first_daily(["weightChange", "gradientNorm"]))
def test_each_rank_of_a_tensor_group_sees_the_figure_of_the_whole_layer(criterion):
    """That of one process: so layers freeze at the same steps, however many ranks share them."""
    alone = figures(ALONE, criterion, 14)
    assert len(alone[-1][0]) == LAYERS and alone[-1][1][0] == 1.0
    for seen in on_ranks(figures, 2, criterion, 14, mesh=Mesh(tensor=2)):
        for (got, frozen), (wanted, reference) in zip(seen, alone, strict=True):
            assert got == pytest.approx(wanted, rel=1e-4)
            assert frozen == reference


def test_a_rank_whose_part_of_a_layer_does_not_learn_counts_the_step_too():
    """Adapters that all ranks have whole count on the first: the others agree with it on looks."""
    module = split_layer(held(LAYERS, lambda at, one: one)[1].module, Axis(ranks=(0, 1), index=1))
    assert squared_gradients(module) is None
    for name, parameter in module.named_parameters():
        parameter.grad = None if name in slicings(module) else torch.ones_like(parameter)
    assert squared_gradients(module) == 0.0


def looks(world, microbatches, steps):
    """What each layer's figure is at each look of a job of which this replica has some of 4 microbatches."""
    settings = FreezingSettings(criterion=FreezingCriterion.PLASTICITY, threshold=1e-9)
    dynamic = Freezing(DynamicConfig(kind="freezing", every_steps=1, freezing=settings), 3)
    layers = held(3, dynamic.prepare)
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
    alone = looks(ALONE, range(4), 14)
    assert min(alone[-1].values()) > 0, "every look has an update to see"
    for seen in on_ranks(of_replica, 2, 14, mesh=Mesh(data=2)):
        assert [set(figures) for figures in seen] == [set(figures) for figures in alone]
        for figures, reference in zip(seen, alone, strict=True):
            assert figures == pytest.approx(reference, rel=1e-4, abs=1e-9)
